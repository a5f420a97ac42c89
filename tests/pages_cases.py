"""A pool's four tensors with operations on them, and what the operations must do.

The model is Python: a list of free pages for each tier, and the bytes that each launch holds.
"""

from __future__ import annotations

import dataclasses
import random
from types import ModuleType

import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels.reference import pages as reference
from backstash.kernels.reference.pages import PoolState, new_pool_state, page_payload, table_length


@dataclasses.dataclass(eq=False)
class Held:
    """A launch: what it was given, elements that are valid, and the table that says where."""

    sources: list[Tensor]
    lengths: list[int]
    table: Tensor


class Pool:
    """The tensors of a pool, full of a byte that no test writes."""

    def __init__(
        self,
        device_pages: int,
        host_pages: int,
        page_bytes: int,
        kernels: ModuleType = reference,
        device: str = "cpu",
    ) -> None:
        self.kernels = kernels
        self.page_bytes = page_bytes
        self.sizes = (device_pages, host_pages)
        self.device = torch.device(device)
        self.free_N, self.state = new_pool_state(device_pages, host_pages, self.device)
        self.device_pages = torch.full(
            (device_pages * page_bytes,), 0xEE, dtype=torch.uint8, device=device
        )
        self.host_pages = self._on_host(host_pages * page_bytes, torch.uint8, 0xEE)
        self.receipt = self._on_host(1, torch.int64, reference.RECEIPT_PENDING)
        self.launches = 0

    def stash(self, sources: list[Tensor], rows: list[Tensor], widths: list[int]) -> Held:
        """One launch; its lengths are those that a reader would compute by hand."""
        # Inside a capture nothing may be read, and the counts are not those of the replay.
        on_gpu = self.device.type == "cuda"
        known = [] if on_gpu and torch.cuda.is_current_stream_capturing() else rows
        lengths = [
            max(0, min(int(count), len(source) // width)) * width
            for source, count, width in zip(sources, known, widths, strict=bool(known))
        ]
        slots = sum(-(-len(x) // page_payload(x.dtype, self.page_bytes)) for x in sources)
        table = torch.full(
            (table_length(len(sources), slots),), -7, dtype=torch.int64, device=self.device
        )
        self.kernels.stash_pages(
            sources,
            rows,
            widths,
            table,
            self.device_pages,
            self.host_pages,
            self.free_N,
            self.state,
            self.receipt,
            page_bytes=self.page_bytes,
            number=self.launches,
        )
        self.launches += 1
        return Held(sources, lengths, table)

    def restore(self, held: Held, places: list[int] | None = None) -> list[Tensor]:
        """Some buffers of a launch, in memory full of 0xAB."""
        places = list(range(len(held.sources))) if places is None else places
        buffers = [torch.full_like(held.sources[place], 0xAB) for place in places]
        self.kernels.restore_pages(
            buffers,
            places,
            held.table,
            self.device_pages,
            self.host_pages,
            self.state,
            buffers=len(held.sources),
            page_bytes=self.page_bytes,
        )
        return buffers

    def release(self, held: Held) -> None:
        """Give the pages of a launch back."""
        self.release_all([held])

    def release_all(self, held: list[Held]) -> None:
        """The same for some launches at once."""
        self.kernels.release_pages(
            [one.table for one in held],
            self.free_N,
            self.state,
            buffers=[len(one.sources) for one in held],
            device_size=self.sizes[0],
        )

    def counter(self, place: PoolState) -> int:
        """One of the counters."""
        return int(self.state[place])

    def free_pages(self) -> list[list[int]]:
        """The numbers of the free pages of each tier, in the order in which they will go."""
        device_size = self.sizes[0]
        free: list[int] = self.free_N.tolist()
        rings = (
            (PoolState.HEAD_DEVICE, PoolState.TAIL_DEVICE, free[:device_size]),
            (PoolState.HEAD_HOST, PoolState.TAIL_HOST, free[device_size:]),
        )
        return [
            [ring[i % len(ring)] for i in range(self.counter(head), self.counter(tail))]
            for head, tail, ring in rings
            if ring or self.counter(head) == self.counter(tail)
        ]

    def pages_of(self, held: Held) -> list[int]:
        """The pages that a launch holds, as its table says."""
        first = reference.TABLE_HEADER + 2 * len(held.sources)
        count = int(held.table[0] + held.table[1])
        return held.table[first : first + count].tolist()

    def _on_host(self, count: int, dtype: torch.dtype, value: int) -> Tensor:
        pinned = self.device.type == "cuda" and count > 0
        return torch.empty(count, dtype=dtype, pin_memory=pinned).fill_(value)


def gpu_pool(device_pages: int, host_pages: int, page_bytes: int) -> Pool:
    """A pool on a GPU, with the operations as users of ``kernels`` get them."""
    return Pool(device_pages, host_pages, page_bytes, kernels, "cuda")


def random_bytes(count: int, seed: int, device: str = "cpu") -> Tensor:
    """Bytes that are neither of the two fillings."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 0xA0, (count,), dtype=torch.uint8, generator=generator).to(device)


def check_restored(held: Held, buffers: list[Tensor], places: list[int] | None = None) -> None:
    """The valid prefix is there, bit for bit, and nothing else was written."""
    places = list(range(len(held.sources))) if places is None else places
    for buffer, place in zip(buffers, places, strict=True):
        length = held.lengths[place]
        assert torch.equal(buffer[:length], held.sources[place][:length])
        assert (buffer[length:] == 0xAB).all()


def random_program(
    kernels: ModuleType, seed: int, steps: int, page: int, device: str = "cpu"
) -> None:
    """Stash, restore and release at random; the model is what ``Held`` knows."""
    rng = random.Random(seed)
    pool = Pool(rng.randint(0, 12), rng.randint(0, 6), page, kernels, device)
    live: list[Held] = []
    overflowed: list[Held] = []
    for step in range(steps):
        everyone = live + overflowed
        if everyone and rng.random() < 0.5:
            held = rng.choice(everyone)
            if rng.random() < 0.3:
                places = rng.sample(range(len(held.sources)), rng.randint(1, len(held.sources)))
                if held in live:
                    check_restored(held, pool.restore(held, places), places)
                continue
            if held in live:
                check_restored(held, pool.restore(held))
                live.remove(held)
            else:
                overflowed.remove(held)
            pool.release(held)
        else:
            widths = [rng.choice([1, 4, 6, 16, 48]) for _ in range(rng.randint(1, 4))]
            capacities = [rng.randint(1, 3 * page // width + 2) for width in widths]
            overflows = pool.counter(PoolState.OVERFLOWS)
            held = pool.stash(
                [
                    random_bytes(c * w, step, device)
                    for c, w in zip(capacities, widths, strict=True)
                ],
                [torch.tensor([rng.randint(-1, c + 2)], device=device) for c in capacities],
                widths,
            )
            fits = pool.counter(PoolState.OVERFLOWS) == overflows
            (live if fits else overflowed).append(held)
        taken = [page for held in live for page in pool.pages_of(held)]
        free = [page for ring in pool.free_pages() for page in ring]
        assert sorted(taken + free) == list(range(sum(pool.sizes)))
    for held in live + overflowed:
        pool.release(held)
    assert [sorted(ring) for ring in pool.free_pages()] == [
        list(range(pool.sizes[0])),
        list(range(pool.sizes[0], sum(pool.sizes))),
    ]
    assert pool.counter(PoolState.MISSING) == 0
