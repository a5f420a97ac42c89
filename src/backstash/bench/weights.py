"""What sharded weights cost: a step beside torch's ``fully_shard`` of the same model.

A step is forward and backward of a stack of feed-forward blocks, each rank on tokens of its
own; an optimizer would do the same to both.  The yardstick has the same values in
``torch.nn.Linear`` and is sharded block by block (:mod:`backstash.bench.weights_contest`).

*Exposed* is what a step takes beyond the same step on whole weights: collectives that do not
hide behind a matmul, and whatever else sharding does.  *Alone* is, on a GPU, the time in which
a kernel of NCCL runs and no other, from a profile.  *Peak* is the part of the weights that a
rank holds and what a step takes beyond it.  *Wire* is what is gathered and reduced, once for
all ranks: for the yardstick by watching its collectives.

Processes are those of ``torchrun``, or as many as there are GPUs, or two on a CPU.
"""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from backstash.bench.record import Row
from backstash.bench.timing import pair_of_turns
from backstash.bench.weights_contest import SHAPES, Contest, Cost, Setting
from backstash.device import default_device, device_name, launch_environment

SETTINGS = (
    Setting(),
    Setting(carrier="peers"),
    Setting(gather="mxfp8", recipe="mxfp8"),
    Setting(gather="float8_current", recipe="float8_current"),
    Setting(gather="mxfp8"),
    Setting(parts=8),
    Setting(parts=8, carrier="peers"),
    Setting(gather="mxfp8", parts=8),
    Setting(gather="float8_current", parts=8),
)
CPU_RANKS = 2
TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsRow(Row):
    """One row: ``pair`` are the steps, ``values`` the elements of all weights."""

    device: str
    ranks: int
    dtype: str
    blocks: int
    hidden: int
    ffn: int
    tokens: int
    gather: str
    recipe: str
    carrier: str
    ours: Cost
    fully_shard: Cost
    errors: Mapping[str, float]
    """Of the loss and the worst gradient: the norm of the difference over the yardstick's."""


def measure(repeats: int) -> list[WeightsRow]:
    """Measure every way to gather; the rows are on rank 0, the other ranks have none."""
    if dist.is_initialized():
        return measure_rank(default_device(), repeats)
    launch = launch_environment()
    if launch.world_size > 1:
        return _join(launch.rank, launch.world_size, "env://", repeats)
    ranks = torch.cuda.device_count() or CPU_RANKS
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_start, (ranks, folder, repeats), nprocs=ranks)  # pyright: ignore
        return pickle.loads((Path(folder) / "rows").read_bytes())


def measure_rank(device: torch.device, repeats: int) -> list[WeightsRow]:
    """Measure on this rank, whose process group is there."""
    shape = SHAPES[device.type]
    contests = (Contest(setting, shape, device) for setting in SETTINGS)
    rows = [measure_contest(contest, repeats) for contest in contests]
    return rows if dist.get_rank() == 0 else []


def measure_contest(contest: Contest, repeats: int) -> WeightsRow:
    """Compare, then time, then count bytes."""
    setting, shape = contest.setting, contest.shape
    errors = contest.check_outputs()
    turns = contest.turns(repeats)
    ours, theirs, whole, plain = zip(*turns, strict=True)
    pairs = zip(ours, theirs, strict=True)
    return WeightsRow(
        case="weights",
        what=f"{dist.get_world_size()} ranks, gather in {setting.gather}",
        values=contest.values,
        target=None,
        pair=pair_of_turns([(mine * 1000, other * 1000) for mine, other in pairs]),
        device=device_name(contest.device),
        ranks=dist.get_world_size(),
        dtype=str(shape.dtype).removeprefix("torch."),
        blocks=shape.blocks,
        hidden=shape.hidden,
        ffn=shape.ffn,
        tokens=shape.tokens,
        gather=setting.gather,
        recipe=setting.recipe,
        carrier=setting.carrier,
        ours=contest.cost(contest.ours, ours, whole),
        fully_shard=contest.cost(contest.theirs, theirs, plain),
        errors=errors,
    )


def show(rows: list[WeightsRow]) -> None:
    """Print the table, the ratio first; nothing on ranks that have no rows."""
    if not rows:
        return
    first = rows[0]
    table = Table(
        title=f"a step with sharded weights, {first.ranks} x {first.device}, beside fully_shard",
        caption="second lines: quartiles of the ratio, fully_shard",
    )
    for header in ("ratio", "step\nms", "exposed\nms", "alone\nms", "peak\nMB", "wire B\n/value"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("gather")
    table.add_column("layers in")
    table.add_column("tokens", justify="right")
    table.add_column("by")
    for row in rows:
        pair, both = row.pair, (row.ours, row.fully_shard)
        table.add_row(
            f"[bold]{pair.ratio:.2f}[/bold]\n{pair.ratio_low:.2f}-{pair.ratio_high:.2f}",
            "\n".join(f"{cost.step_ms:.2f}" for cost in both),
            "\n".join(f"{cost.exposed_ms:.2f}" for cost in both),
            "\n".join("-" if c.overlap is None else f"{c.overlap.alone_ms:.2f}" for c in both),
            "\n".join("-" if c.peak_bytes is None else f"{c.peak_bytes / 1e6:.0f}" for c in both),
            "\n".join(f"{cost.wire_bytes / row.values:.2f}" for cost in both),
            row.gather,
            row.recipe,
            str(row.tokens),
            row.carrier,
        )
    Console().print(table)


def _start(rank: int, ranks: int, folder: str, repeats: int) -> None:
    rows = _join(rank, ranks, f"file://{folder}/store", repeats)
    if rank == 0:
        (Path(folder) / "rows").write_bytes(pickle.dumps(rows))


def _join(rank: int, ranks: int, where: str, repeats: int) -> list[WeightsRow]:
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = (
            torch.device("cuda", rank % torch.cuda.device_count()),
            "cpu:gloo,cuda:nccl",
        )
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=where,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    try:
        return measure_rank(device, repeats)
    finally:
        dist.destroy_process_group()
