"""Into pages and back beside a copy: ``backstash bench stash``, on a GPU.

The yardstick is a copy from the device to itself of the bytes that are valid, timed in turns;
for what spills it is a copy to pinned host memory, and for what is compressed one that moves as
many bytes.  At some sizes a copy in one piece runs at two thirds of the speed of one in two, so
of some numbers of pieces the fastest is taken.  What comes back is compared first, bit for bit.
Buffers are random and twice as large as what is valid in them.

Letters: T rows that are valid, B bytes of a row.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backstash import kernels
from backstash.bench.choice import chosen
from backstash.bench.record import Row
from backstash.bench.timing import Pair, time_gpu_pair
from backstash.device import default_device, device_name
from backstash.errors import DeviceError
from backstash.formats import MXFP8

PAGE_BYTES = 1 << 16
PIECES = (1, 2, 3, 4)
WAYS = ("stash", "restore")
LARGE, NARROW, SPILLED, SQUEEZED = 0.97, 0.85, 0.85, 0.85


class Kind(enum.Enum):
    """What becomes of the buffers."""

    PAGED = "bytes, in pages of the device"
    SPILLED = "bytes, in pages of the host"
    COMPRESSED = "bfloat16 values, as MXFP8 in pages of the device"


@dataclasses.dataclass(frozen=True)
class Work:
    """Buffers that one launch takes, and the share of a copy's speed that is wanted."""

    what: str
    target: float
    buffers: tuple[tuple[int, int], ...]
    kind: Kind = Kind.PAGED

    @property
    def nbytes(self) -> int:
        """Valid bytes of all buffers."""
        return sum(rows * width for rows, width in self.buffers)

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        if self.kind is Kind.COMPRESSED:
            return self.nbytes + self.nbytes // 2 * 33 // 32
        return 2 * self.nbytes


# A layer's input in MXFP8 with its scales, its pre-activation, its routing weights, and so on.
EXPERT_LAYER = ((131072, 2048), (4096, 2048), (131072, 3072), (131072, 4), (131072, 768))
WORKS = (
    Work("2048 bf16", LARGE, ((131072, 4096),)),
    Work("1536 bf16", LARGE, ((131072, 3072),)),
    Work("768 bf16", LARGE, ((131072, 1536),)),
    Work("7168 bf16", LARGE, ((65536, 14336),)),
    Work("2048 bf16, few rows", LARGE, ((8192, 4096),)),
    Work("64 bytes", NARROW, ((131072, 64),)),
    Work("96 bytes", NARROW, ((131072, 96),)),
    Work("4 bytes", NARROW, ((131072, 4),)),
    Work("an expert layer", LARGE, (*EXPERT_LAYER, (4096, 768))),
    Work("1536 bf16, spilled", SPILLED, ((131072, 3072),), Kind.SPILLED),
    Work("2048 bf16 to MXFP8", SQUEEZED, ((131072, 4096),), Kind.COMPRESSED),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StashRow(Row):
    """A row, and what it moved: ``values`` valid rows, and bytes read and written."""

    device: str
    bytes_moved: int

    @property
    def share(self) -> float:
        """The speed of ours over that of the copy."""
        return 1 / self.pair.ratio

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes read and written in a second."""
        return self.bytes_moved / self.pair.ours_us / 1000


class Pages:
    """A pool with room for two launches of a work, as the one before a capture stays there."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.kind = work.kind
        self.sources = [_random(2 * rows * width, device) for rows, width in work.buffers]
        if work.kind is Kind.COMPRESSED:
            self.sources = [x.view(torch.bfloat16).normal_() for x in self.sources]
        self.restored = [_random(x.nbytes, device).view(x.dtype) for x in self.sources]
        self.rows = [torch.tensor([rows], device=device) for rows, _ in work.buffers]
        item = self.sources[0].itemsize
        self.widths = [width // item for _, width in work.buffers]
        self.lengths = [rows * width // item for rows, width in work.buffers]
        payload = kernels.page_payload(self.sources[0].dtype, PAGE_BYTES)
        pages = 2 * sum(-(-length // payload) for length in self.lengths)
        slots = sum(-(-source.numel() // payload) for source in self.sources)
        count = (0, pages) if work.kind is Kind.SPILLED else (pages, 0)
        pinned = device.type == "cuda"
        self.device_pages = torch.empty(count[0] * PAGE_BYTES, dtype=torch.uint8, device=device)
        self.host_pages = torch.empty(
            count[1] * PAGE_BYTES, dtype=torch.uint8, pin_memory=pinned and count[1] > 0
        )
        self.free_N, self.state = kernels.new_pool_state(*count, device)
        length = kernels.table_length(len(self.sources), slots)
        self.table = torch.empty(length, dtype=torch.int64, device=device)
        self.receipt = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)

    def stash(self) -> None:
        """Copy the valid rows into pages."""
        kernels.stash_pages(
            self.sources,
            self.rows,
            self.widths,
            self.table,
            self.device_pages,
            self.host_pages,
            self.free_N,
            self.state,
            self.receipt,
            page_bytes=PAGE_BYTES,
            number=0,
        )

    def restore(self) -> None:
        """Copy them back."""
        kernels.restore_pages(
            self.restored,
            range(len(self.restored)),
            self.table,
            self.device_pages,
            self.host_pages,
            self.state,
            buffers=len(self.restored),
            page_bytes=PAGE_BYTES,
        )

    def release(self) -> None:
        """Give the pages back."""
        size = self.device_pages.numel() // PAGE_BYTES
        kernels.release_pages(
            [self.table], self.free_N, self.state, buffers=[len(self.restored)], device_size=size
        )

    def check(self, what: str) -> None:
        """Refuse to time copies that do not give back what they were given.

        Raises:
            RuntimeError: They do not.
        """
        self.stash()
        self.restore()
        self.release()
        for source, restored, length in zip(self.sources, self.restored, self.lengths, strict=True):
            wanted = source[:length]
            if self.kind is Kind.COMPRESSED:
                wanted = MXFP8.quantize(wanted.view(-1, 32)).dequantize().view(-1)
            if not torch.equal(wanted, restored[:length]):
                raise RuntimeError(f"{what}: the bytes that came back differ; nothing is timed")


def measure(repeats: int, only: Sequence[str] = ()) -> Iterator[StashRow]:
    """Compare, then time each work in both directions, or the rows whose names contain a text.

    Raises:
        DeviceError: There is no GPU.
        ConfigError: No row's name contains one of the texts.
        RuntimeError: Something came back that was not stashed; nothing is timed.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "bench stash compares GPU kernels with a copy and found no GPU; run it on one"
        )
    return _rows(repeats, chosen([f"{way} {work.what}" for work in WORKS for way in WAYS], only))


def _rows(repeats: int, wanted: Sequence[str]) -> Iterator[StashRow]:
    device = default_device()
    for work in WORKS:
        stashing, restoring = (f"{way} {work.what}" for way in WAYS)
        if stashing not in wanted and restoring not in wanted:
            continue
        pages = Pages(work, device)
        pages.check(work.what)
        there, back = _copies(work, pages)
        if stashing in wanted:
            pair = time_gpu_pair(pages.stash, there, repeats, between=pages.release)
            yield _row(stashing, work, pair, device)
        if restoring in wanted:
            pages.stash()
            yield _row(restoring, work, time_gpu_pair(pages.restore, back, repeats), device)


def _copies(work: Work, pages: Pages) -> tuple[Callable[[], object], Callable[[], object]]:
    """The yardsticks: as many bytes from the device to itself, or to the host and back."""
    if work.kind is Kind.SPILLED:
        source = _random(work.moved // 2, pages.table.device)
        target = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        return (
            lambda: target.copy_(source, non_blocking=True),
            lambda: source.copy_(target, non_blocking=True),
        )
    nbytes = work.moved // 2
    target, source = (_random(nbytes, pages.table.device) for _ in range(2))
    copies = [functools.partial(copy_in_pieces, target, source, n) for n in PIECES]
    copy = min(copies, key=lambda copy: time_gpu_pair(copy, copy, 3).ours_us)
    return copy, copy


def copy_in_pieces(target: Tensor, source: Tensor, pieces: int) -> None:
    """Copy bytes in so many launches at most, each of whole blocks of 512 but the last."""
    cut = -(-len(source) // pieces // 512) * 512
    for part, whole in zip(target.split(cut), source.split(cut), strict=True):
        part.copy_(whole)


def _row(what: str, work: Work, pair: Pair, device: torch.device) -> StashRow:
    return StashRow(
        case="stash",
        what=what,
        values=work.buffers[0][0],
        target=work.target,
        pair=pair,
        device=device_name(device),
        bytes_moved=work.moved,
    )


def _random(count: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def show(rows: Sequence[StashRow]) -> None:
    """Print the table, the share of a copy's speed first."""
    table = Table(title="into pages and back, beside a copy of the same bytes")
    for header in ("of a copy", "quartiles", "wanted", "GB/s", "µs", "copy µs"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("what")
    for row in rows:
        pair = row.pair
        table.add_row(
            f"[bold]{row.share:.2f}[/bold]",
            f"{1 / pair.ratio_high:.2f}-{1 / pair.ratio_low:.2f}",
            "" if row.target is None else f"≥ {row.target:.2f}",
            f"{row.gigabytes_per_s:.0f}",
            f"{pair.ours_us:.1f}",
            f"{pair.theirs_us:.1f}",
            row.what,
        )
    Console(width=120).print(table)
