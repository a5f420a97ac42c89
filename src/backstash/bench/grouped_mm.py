"""Grouped matmuls beside torch's own: ``backstash bench grouped_mm``, on a GPU.

Ours leave nothing unwritten, neither the tail of an output nor the gradient of an empty
group's weight; the yardstick does, and so is not quite the same work.  Forward, and both
gradients, with groups of one size and with a skew (Dirichlet with concentration 0.3), in
bfloat16, in float8 rows (:mod:`backstash.bench.grouped_float8`) and on codes of blocks
(:mod:`backstash.bench.grouped_codes`).

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backstash import kernels
from backstash.bench import grouped_codes, grouped_float8
from backstash.bench.grouped_float8 import Result
from backstash.bench.record import Row
from backstash.bench.timing import Pair, time_gpu_pair
from backstash.device import default_device, device_name
from backstash.errors import DeviceError

# (T, K, N, G)
SIZES = (
    (262144, 2048, 1536, 128),
    (262144, 768, 2048, 128),
    (32768, 2048, 1536, 128),
    (32768, 768, 2048, 128),
    (32768, 7168, 2048, 128),
)
TARGETS = {"balanced": 0.97, "skewed": 1.1}
CONCENTRATION = 0.3
# What is compared beside bfloat16, by the name it has in the table.
CODES = {"float8 ": grouped_float8.works, "": grouped_codes.works}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulRow(Row):
    """One product of ``values`` rows.  ``target`` is the share of torch's speed that is wanted."""

    device: str
    features: tuple[int, int]
    groups: int
    tflops: float

    @property
    def share(self) -> float:
        """Torch's time over ours."""
        return 1 / self.pair.ratio


def measure(repeats: int) -> list[MatmulRow]:
    """Compare every product with torch's, then time both.

    Raises:
        DeviceError: There is no GPU.
        RuntimeError: A product is not torch's; nothing is timed.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "bench grouped_mm compares matmuls on a GPU and found no GPU; run it on one"
        )
    rows = []
    for size in SIZES:
        for load, target in TARGETS.items():
            for what, ours, theirs in products(size, load):
                check_outputs(what, ours(), theirs())
                pair = time_gpu_pair(ours, theirs, repeats)
                rows.append(_row(f"{what}, {load}", size, target, pair))
            ends_G = group_ends(size[0], size[3], load).cuda()
            for name, works in CODES.items():
                for work in works(size, ends_G):
                    check_outputs(work.what, work.ours(), work.theirs(), work.tolerance)
                    pair = time_gpu_pair(work.ours, work.theirs, repeats)
                    wanted = target if work.target is None else work.target
                    rows.append(
                        _row(f"{name}{work.what}, {load}", size, wanted, pair, work.products)
                    )
    return rows


def _row(
    what: str, size: tuple[int, int, int, int], target: float, pair: Pair, products: int = 1
) -> MatmulRow:
    T, K, N, G = size
    return MatmulRow(
        case="grouped_mm",
        what=what,
        values=T,
        target=target,
        pair=pair,
        device=device_name(default_device()),
        features=(K, N),
        groups=G,
        tflops=2 * T * K * N * products / pair.ours_us / 1e6,
    )


def products(
    size: tuple[int, int, int, int], load: str
) -> Iterator[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]]:
    """Forward, the gradient of the rows and that of the weights: ours and torch's."""
    T, K, N, G = size
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x_TK, dy_TN = torch.randn(T, K, **new), torch.randn(T, N, **new)
    w_GNK = torch.randn(G, N, K, **new)
    ends_G = group_ends(T, G, load).cuda()
    yield (
        "forward",
        lambda: kernels.grouped_mm(x_TK, w_GNK, ends_G),
        lambda: F.grouped_mm(x_TK, w_GNK.mT, offs=ends_G),
    )
    yield (
        "gradient of rows",
        lambda: kernels.grouped_mm_dx(dy_TN, w_GNK, ends_G),
        lambda: F.grouped_mm(dy_TN, w_GNK, offs=ends_G),
    )
    yield (
        "gradient of weights",
        lambda: kernels.grouped_mm_dw(dy_TN, x_TK, ends_G),
        lambda: F.grouped_mm(dy_TN.t(), x_TK, offs=ends_G),
    )


def group_ends(T: int, G: int, load: str) -> Tensor:
    """Ends of G groups that share T rows; none is empty, so that torch's result is whole."""
    share_G = torch.full((G,), 1 / G)
    if load == "skewed":
        share_G = torch.distributions.Dirichlet(torch.full((G,), CONCENTRATION)).sample()
    count_G = 1 + (share_G * (T - G)).floor().int()
    count_G[count_G.argmax()] += T - int(count_G.sum())
    return count_G.cumsum(0).int()


def check_outputs(what: str, ours: Result, theirs: Result, tolerance: float = 1e-2) -> None:
    """Refuse to time a product that is not the yardstick's, as near as ``tolerance`` says.

    Raises:
        RuntimeError: It is not.
    """
    both = ((one,) if isinstance(one, Tensor) else one for one in (ours, theirs))
    for found, wanted in zip(*both, strict=True):
        difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
        if not difference <= tolerance:
            raise RuntimeError(f"{what}: outputs differ by {difference:.1e}; nothing is timed")


def show(rows: Sequence[MatmulRow]) -> None:
    """Print the table, the share of torch's speed first."""
    table = Table(title="grouped matmuls, against torch's")
    for header in ("of torch", "quartiles", "wanted", "TFLOP/s", "rows", "K, N", "groups"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("product")
    for row in rows:
        pair = row.pair
        table.add_row(
            f"[bold]{row.share:.2f}[/bold]",
            f"{1 / pair.ratio_high:.2f}-{1 / pair.ratio_low:.2f}",
            f"≥ {row.target:.2f}",
            f"{row.tflops:.0f}",
            str(row.values),
            f"{row.features[0]}, {row.features[1]}",
            str(row.groups),
            row.what,
        )
    Console(width=120).print(table)
