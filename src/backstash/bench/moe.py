"""What a Mixture-of-Experts layer costs: ours in each recipe, against plain PyTorch.

A step is forward and backward of one layer, router to combine.  The yardstick is the layer
as one writes it with what PyTorch has: a softmax, ``topk``, a sort, ``grouped_mm`` over the
experts, ``index_add``.  Both have the same weights and get the same tokens and the same
choices, at every imbalance; both pay for choosing.

A step needs 18 T K H I floating-point operations, the forward 6 of them; what a layer does
beyond that, quantizing or gathering, makes its rate lower.  A step is waited for, so a GPU starts
idle and its host counts; *queued* are steps one behind the other, as those of a model's layers.
*Saved* is what autograd keeps for backward without the weights, counted storage by storage; *peak*
is what a step takes on a GPU beyond what was there before.

Letters: T tokens, K experts a token, H features, I features inside an expert, E experts, R
rows (T * K).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from backstash.bench.choice import chosen
from backstash.bench.record import Row
from backstash.bench.timing import Pair, time_pair, time_queued
from backstash.bench.workloads import IMBALANCES, Load, ScriptedRouter, router_choices
from backstash.device import default_device, device_name
from backstash.moe import MoE
from backstash.recipes import Operand, Phase, Role, autocast, recipe, recipe_names
from backstash.saving import Meter, saving

FORWARD_FLOP, STEP_FLOP = 6, 18
# An imbalance that changes from step to step is back at its start after so many.
STEPS = 4
# Roundings to the dtype add up over the sums of a step.
ROUNDINGS = 8
PLAIN = "high_precision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one layer."""

    name: str
    load: Load
    hidden: int
    ffn: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """R, the rows of all experts together."""
        return self.load.tokens * self.load.top_k

    def flop(self, factor: int) -> int:
        """Operations of a forward (factor 6) or a step (18)."""
        return factor * self.rows * self.hidden * self.ffn


# The first shape of a device is measured in each recipe and at each imbalance.
SHAPES: Mapping[str, Sequence[Shape]] = {
    "cpu": (
        Shape(
            name="small",
            load=Load(tokens=512, experts=8, top_k=2, ranks=2),
            hidden=128,
            ffn=64,
            dtype=torch.float32,
        ),
    ),
    "cuda": (
        Shape(
            name="Qwen3-30B-A3B",
            load=Load(tokens=32768, experts=128, top_k=8, ranks=8),
            hidden=2048,
            ffn=768,
            dtype=torch.bfloat16,
        ),
        Shape(
            name="wide",
            load=Load(tokens=32768, experts=64, top_k=4, ranks=8),
            hidden=4096,
            ffn=1024,
            dtype=torch.bfloat16,
        ),
        Shape(
            name="narrow",
            load=Load(tokens=24576, experts=128, top_k=8, ranks=8),
            hidden=1536,
            ffn=256,
            dtype=torch.bfloat16,
        ),
        # A step of this one takes as long as the host takes to launch it.
        Shape(
            name="small",
            load=Load(tokens=1024, experts=16, top_k=4, ranks=4),
            hidden=256,
            ffn=128,
            dtype=torch.bfloat16,
        ),
    ),
}
# Of the first shape on a GPU with a balanced load; elsewhere nothing is promised.
TARGETS: Mapping[str, float] = {PLAIN: 0.56, "float8_rowwise": 0.40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table, before it is measured."""

    shape: Shape
    recipe: str = PLAIN
    imbalance: str = "balanced"
    target: float | None = None

    @property
    def what(self) -> str:
        """Its name."""
        return f"{self.shape.name}, {self.recipe}, {self.imbalance}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What one of the two layers costs."""

    forward_tflops: float
    step_tflops: float
    saved_bytes: int
    peak_bytes: int | None
    """``None`` on a CPU, whose allocator does not count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRow(Row):
    """One row: ``pair`` are the steps, ``values`` the rows of all experts."""

    device: str
    dtype: str
    hidden: int
    ffn: int
    load: Load
    recipe: str
    imbalance: str
    forward: Pair
    queued: Pair | None
    """By the GPU's own clock; ``None`` on a CPU."""
    ours: Cost
    plain: Cost
    errors: Mapping[str, float]
    """Of the output and each gradient: the norm of the difference over that of the plain one."""


class PlainMoE(nn.Module):
    """The layer in plain PyTorch, with the weights of ours."""

    def __init__(self, layer: MoE, script: Sequence[Tensor]) -> None:
        super().__init__()
        self.top_k = layer.router.top_k
        self.router_weight = layer.router.weight
        self.fc1_weight = layer.experts.fc1_weight
        self.fc2_weight = layer.experts.fc2_weight
        device = self.router_weight.device
        self.script = itertools.cycle([expert_TK.to(device) for expert_TK in script])

    def forward(self, x_TH: Tensor) -> Tensor:
        """Give each token its experts' weighted sum."""
        scores_TE = F.linear(x_TH.float(), self.router_weight.float()).softmax(-1)
        scores_TE.topk(self.top_k, dim=-1)  # paid for, and told otherwise
        expert_TK = next(self.script)
        prob_TK = scores_TE.gather(1, expert_TK)
        prob_TK = prob_TK / prob_TK.sum(-1, keepdim=True)
        expert_R, order_R = expert_TK.flatten().sort(stable=True)
        expert_E = torch.arange(scores_TE.shape[1], device=x_TH.device)
        ends_E = torch.searchsorted(expert_R, expert_E, right=True, out_int32=True)
        token_R = order_R // self.top_k
        h_RF = F.grouped_mm(x_TH[token_R], self.fc1_weight.transpose(1, 2), offs=ends_E)
        gate_RI, up_RI = h_RF.chunk(2, dim=-1)
        y_RH = F.grouped_mm(F.silu(gate_RI) * up_RI, self.fc2_weight.transpose(1, 2), offs=ends_E)
        y_RH = y_RH * prob_TK.flatten()[order_R].unsqueeze(-1).to(y_RH.dtype)
        return torch.zeros_like(x_TH).index_add(0, token_R, y_RH)


class Contest:
    """Both layers with the same weights, tokens and choices, and the gradient of the output."""

    def __init__(self, case: Case, device: torch.device) -> None:
        shape, load = case.shape, case.shape.load
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.recipe = recipe(case.recipe)
        layer = MoE(
            shape.hidden, shape.ffn, load.experts, load.top_k, device=device, dtype=shape.dtype
        )
        script = list(router_choices(IMBALANCES[case.imbalance], load, steps=STEPS))
        ScriptedRouter(layer, script)
        self.layer, self.plain = layer, PlainMoE(layer, script)
        new = {"device": device, "dtype": shape.dtype}
        self.x_TH = torch.randn(load.tokens, shape.hidden, **new).requires_grad_()
        self.dy_TH = torch.randn(load.tokens, shape.hidden, **new)
        self.inputs = {
            "x": self.x_TH,
            "router": layer.router.weight,
            "fc1": layer.experts.fc1_weight,
            "fc2": layer.experts.fc2_weight,
        }
        self.used_E = torch.bincount(script[-1].flatten(), minlength=load.experts) > 0

    def forward_ours(self) -> Tensor:
        """Our output."""
        with autocast(recipe=self.recipe):
            return self.layer(self.x_TH)

    def forward_plain(self) -> Tensor:
        """The yardstick's output."""
        return self.plain(self.x_TH)

    def step(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        """The output and every gradient."""
        y_TH = forward()
        return [y_TH, *torch.autograd.grad(y_TH, list(self.inputs.values()), self.dy_TH)]

    def check_outputs(self) -> dict[str, float]:
        """Compare a step of each, after others from which a scale may be learnt.

        Raises:
            RuntimeError: They differ by more than the recipe's formats allow.
        """
        for forward in (self.forward_ours, self.forward_plain):
            for _ in range(STEPS - 1):
                self.step(forward)
        allowed = tolerance(self.case)
        errors = {}
        both = zip(self.step(self.forward_ours), self.step(self.forward_plain), strict=True)
        for name, (ours, plain) in zip(["y", *self.inputs], both, strict=True):
            if ours.ndim == 3:
                # PyTorch leaves anything in the gradient of an expert without rows.
                used_E = self.used_E.to(self.device)
                ours, plain = ours[used_E], plain[used_E]
            errors[name] = relative_error(ours, plain)
            if not errors[name] <= allowed:
                raise RuntimeError(
                    f"{name} in recipe {self.case.recipe} differs from plain PyTorch by "
                    f"{errors[name]:.1e}, allowed are {allowed:.1e}; nothing is timed"
                )
        return errors

    def time(
        self, forward: Callable[[], object], plain: Callable[[], object], repeats: int
    ) -> Pair:
        """Time two functions of this device in turns."""
        return time_pair(self._finished(forward), self._finished(plain), repeats)

    def cost(self, forward: Callable[[], Tensor], forward_us: float, step_us: float) -> Cost:
        """Rates for these times, and bytes."""
        meter = Meter()
        with saving(meter):
            forward()
        shape = self.case.shape
        return Cost(
            forward_tflops=shape.flop(FORWARD_FLOP) / forward_us / 1e6,
            step_tflops=shape.flop(STEP_FLOP) / step_us / 1e6,
            saved_bytes=meter.bytes,
            peak_bytes=self._peak_bytes(forward),
        )

    def _peak_bytes(self, forward: Callable[[], Tensor]) -> int | None:
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(STEPS):
            self.step(forward)
        return torch.cuda.max_memory_allocated(self.device) - before

    def _finished(self, function: Callable[[], object]) -> Callable[[], object]:
        if self.device.type != "cuda":
            return function

        def run() -> None:
            function()
            torch.cuda.synchronize(self.device)

        return run


def measure(repeats: int, only: Sequence[str] = ()) -> Iterator[LayerRow]:
    """Measure every case, or those that are chosen, after both layers were seen to agree in it.

    Raises:
        ConfigError: No case's name contains one of the texts of ``only``.
    """
    device = default_device()
    names = {case.what: case for case in cases(device.type)}
    return (measure_case(names[name], device, repeats) for name in chosen([*names], only))


def cases(device_type: str) -> list[Case]:
    """Each recipe, then each imbalance, then the other shapes."""
    main, *others = SHAPES[device_type]
    targets = TARGETS if device_type == "cuda" else {}
    recipes = sorted(recipe_names(), key=lambda name: (name != PLAIN, name))
    return [
        *(Case(shape=main, recipe=name, target=targets.get(name)) for name in recipes),
        *(Case(shape=main, imbalance=name) for name in IMBALANCES if name != "balanced"),
        *(Case(shape=shape) for shape in others),
    ]


def measure_case(case: Case, device: torch.device, repeats: int) -> LayerRow:
    """Compare, then time, then count bytes."""
    contest = Contest(case, device)
    ours, plain = contest.forward_ours, contest.forward_plain
    errors = contest.check_outputs()
    forward = contest.time(ours, plain, repeats)
    our_step, plain_step = (functools.partial(contest.step, layer) for layer in (ours, plain))
    step = contest.time(our_step, plain_step, repeats)
    queued = time_queued(our_step, plain_step, repeats) if device.type == "cuda" else None
    return LayerRow(
        case="moe",
        what=case.what,
        values=case.shape.rows,
        target=case.target,
        pair=step,
        device=device_name(device),
        dtype=str(case.shape.dtype).removeprefix("torch."),
        hidden=case.shape.hidden,
        ffn=case.shape.ffn,
        load=case.shape.load,
        recipe=case.recipe,
        imbalance=case.imbalance,
        forward=forward,
        queued=queued,
        ours=contest.cost(ours, forward.ours_us, step.ours_us),
        plain=contest.cost(plain, forward.theirs_us, step.theirs_us),
        errors=errors,
    )


def tolerance(case: Case) -> float:
    """How far a step may be from plain PyTorch: the formats' tolerance, and the dtype's."""
    chosen = recipe(case.recipe)
    roles = [
        Role(operand, phase, "GroupedMLP", linear)
        for operand in Operand
        for phase in Phase
        for linear in ("fc1", "fc2")
    ]
    formats = max(chosen.format(role).rtol for role in roles)
    return formats + ROUNDINGS * torch.finfo(case.shape.dtype).eps


def relative_error(ours: Tensor, plain: Tensor) -> float:
    """The norm of the difference over that of the yardstick; NaN where anything is NaN."""
    difference = torch.linalg.vector_norm(ours.float() - plain.float())
    return (difference / torch.linalg.vector_norm(plain.float()).clamp(min=1e-30)).item()


def show(rows: list[LayerRow]) -> None:
    """Print a table for each shape, the ratio first."""
    for shape, of_shape in itertools.groupby(rows, lambda row: row.what.partition(",")[0]):
        table = Table(
            title=f"a step of one MoE layer ({shape}), against grouped_mm and index_add",
            caption="second lines: quartiles of the ratio, plain PyTorch, imbalance",
        )
        for header in ("ratio", "wanted", "ms", "queued", "TFLOP/s", "saved MB", "peak MB"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("recipe")
        for row in of_shape:
            table.add_row(*_cells(row))
        Console().print(table)


def _cells(row: LayerRow) -> list[str]:
    pair, queued, ours, plain = row.pair, row.queued, row.ours, row.plain
    return [
        f"[bold]{pair.ratio:.2f}[/bold]\n{pair.ratio_low:.2g}-{pair.ratio_high:.2g}",
        "" if row.target is None else f"≤ {row.target:.2f}",
        f"{pair.ours_us / 1000:.2f}\n{pair.theirs_us / 1000:.2f}",
        "-" if queued is None else f"{queued.ours_us / 1000:.2f}\n{queued.theirs_us / 1000:.2f}",
        f"{_rate(ours.step_tflops)}\n{_rate(plain.step_tflops)}",
        f"{_megabytes(ours.saved_bytes)}\n{_megabytes(plain.saved_bytes)}",
        f"{_megabytes(ours.peak_bytes)}\n{_megabytes(plain.peak_bytes)}",
        f"{row.recipe}\n{row.imbalance}",
    ]


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 1 else f"{tflops:.2g}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.2f}"
