"""Every kind of value that can be saved, and every way in which saved tensors travel.

Shared by the tests of ``backstash.saving``.  A ``Carrier`` saves values in the forward of
a function and collects what came back in each of its backwards.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.saving import saving

ROWS, COLUMNS = 37, 5
COUNTS = [5, 0, 20, 1]
VALID = sum(COUNTS)


class ShardedTensor(Tensor):
    """A fake distributed weight: a plain subclass with the marker and something of its own."""

    is_distributed_weight = True
    note: str


def values_2d() -> Tensor:
    return torch.randn(ROWS, COLUMNS)


def _parameter() -> nn.Parameter:
    return nn.Parameter(values_2d())


def _distributed() -> Tensor:
    weight = values_2d().as_subclass(ShardedTensor).requires_grad_()
    weight.note = "mine"  # pyright: ignore[reportAttributeAccessIssue]
    return weight


def _quantized(format: bs.Format, usage: bs.Usage) -> Callable[[], Tensor]:
    return lambda: format.quantize(values_2d(), usage=usage)


def _grouped(format: bs.Format | None) -> Callable[[], bs.GroupedTensor]:
    def make() -> bs.GroupedTensor:
        grouped = bs.GroupedTensor.from_counts(values_2d(), COUNTS)
        return grouped if format is None else format.quantize(grouped, usage=bs.Usage.BOTH)

    return make


FORMATS = {
    "float8_current": bs.FLOAT8_CURRENT,
    "float8_delayed": bs.FLOAT8_DELAYED,
    "mxfp8": bs.MXFP8,
}
BY_REFERENCE: dict[str, Callable[[], Any]] = {
    "parameter": _parameter,
    "frozen_parameter": lambda: _parameter().requires_grad_(False),
    "distributed_weight": _distributed,
    "kept_leaf": lambda: bs.keep_identity(values_2d().requires_grad_()),
    "kept_subclass": lambda: bs.keep_identity(TwoTensor(values_2d(), values_2d())),
    "quantized_parameter": lambda: nn.Parameter(bs.MXFP8.quantize(values_2d())),
}
BY_VALUE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "plain": values_2d,
    "plain_with_grad": lambda: values_2d().requires_grad_(),
    "empty": lambda: torch.empty(0, COLUMNS),
    "scalar": lambda: torch.tensor(2.5),
    "integers": lambda: torch.arange(7),
    "not_contiguous": lambda: torch.randn(COLUMNS, ROWS).t(),
    "two_tensor": lambda: TwoTensor(values_2d(), values_2d()),
    "two_tensor_of_codes": lambda: TwoTensor(
        values_2d().to(torch.float8_e4m3fn), values_2d().to(torch.float8_e4m3fn)
    ),
    "two_tensor_of_transposed_codes": lambda: TwoTensor(
        values_2d().to(torch.float8_e5m2).t(), values_2d().to(torch.float8_e5m2).t()
    ),
    **{
        f"{name}_{usage.name.lower()}": _quantized(format, usage)
        for (name, format), usage in itertools.product(FORMATS.items(), bs.Usage)
        if usage.name
    },
    "mxfp8_both": _quantized(bs.MXFP8, bs.Usage.BOTH),
    "grouped": _grouped(None),
    **{f"grouped_{name}": _grouped(format) for name, format in FORMATS.items()},
}
VALUES = BY_REFERENCE | BY_VALUE


def same(saved: Any, restored: Any) -> bool:
    """Is a value equal, bit for bit where it is real, and of the same class?"""
    if isinstance(saved, bs.GroupedTensor):
        return (
            isinstance(restored, bs.GroupedTensor)
            and same(saved.ends_G, restored.ends_G)
            and same(saved.overflow, restored.overflow)
            and type(saved.data) is type(restored.data)
            and same(_real(saved), _real(restored))
        )
    if saved is None or restored is None:
        return saved is restored
    kinds = [(type(t), t.dtype, t.shape, t.stride(), t.device) for t in (saved, restored)]
    return kinds[0] == kinds[1] and _equal(saved.detach(), restored.detach())


def _equal(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, TwoTensor) and isinstance(other, TwoTensor):
        return _equal(one.a, other.a) and _equal(one.b, other.b)
    if one.dtype.itemsize == 1 and one.dtype.is_floating_point:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def _real(grouped: bs.GroupedTensor) -> Tensor:
    return grouped.dequantize().data[: int(grouped.ends_G[-1])]


class Carrier:
    """Values to save, and what each backward got of them."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.restored: list[tuple[Any, ...]] = []

    def __call__(self, x: Tensor) -> Tensor:
        return _Carry.apply(x, self)  # pyright: ignore[reportReturnType]

    def check(self) -> None:
        """Everything that came back is the same, and what is kept by reference is itself."""
        assert self.restored
        for restored in self.restored:
            assert len(restored) == len(self.values)
            assert all(map(same, self.values, restored))


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, carrier: Carrier) -> Tensor:
        bs.save_for_backward(ctx, *carrier.values)
        ctx.plan = carrier
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.plan.restored.append(bs.saved_values(ctx))
        return dy * 2, None


class Keeper:
    """A handler that takes everything, as a copy; its handles are weakly known."""

    def __init__(self) -> None:
        self.packed = 0
        self.unpacked = 0
        self.rows: list[Tensor | None] = []

    def pack(self, tensor: Tensor, rows: Tensor | None) -> Any:
        self.packed += 1
        self.rows.append(rows)
        return [tensor.detach().clone()]

    def unpack(self, handle: Any) -> Tensor:
        self.unpacked += 1
        return handle[0]


class Declining:
    """A handler that looks and takes nothing."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.rows: list[Tensor | None] = []

    def pack(self, tensor: Tensor, rows: Tensor | None) -> None:
        self.seen.append(tensor)
        self.rows.append(rows)

    def unpack(self, handle: Any) -> Tensor:
        raise AssertionError("nothing was taken")


def identity() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def detaching() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.detach(), lambda t: t.detach())


def copying() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: [t.detach().clone()], lambda packed: packed[0].clone())


def rounding() -> saved_tensors_hooks:
    """Keep every float as bfloat16: what is a code or a scale must not be seen as one."""

    def pack(t: Tensor) -> tuple[Tensor, torch.dtype]:
        return (t.bfloat16() if t.is_floating_point() else t), t.dtype

    return saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1]))


@contextlib.contextmanager
def nest(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


HOOKS: dict[str, Callable[[], Any]] = {
    "no_hooks": contextlib.nullcontext,
    "identity": identity,
    "detaching": detaching,
    "copying": copying,
    "save_on_cpu": lambda: save_on_cpu(pin_memory=False),
    "identity_in_save_on_cpu": lambda: nest(save_on_cpu(pin_memory=False), identity()),
    "save_on_cpu_in_identity": lambda: nest(identity(), save_on_cpu(pin_memory=False)),
    "declining": lambda: saving(Declining()),
    "meter": lambda: saving(bs.Meter()),
    "accepting": lambda: saving(Keeper()),
    "second_accepts": lambda: saving(Declining(), Keeper()),
    "outer_accepts": lambda: nest(saving(Keeper()), saving(Declining())),
    "declining_in_save_on_cpu": lambda: nest(save_on_cpu(pin_memory=False), saving(Declining())),
    "accepting_in_save_on_cpu": lambda: nest(save_on_cpu(pin_memory=False), saving(Keeper())),
    "save_on_cpu_in_accepting": lambda: nest(saving(Keeper()), save_on_cpu(pin_memory=False)),
}


def _run(context: Callable[[], Any], function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with context():
        return function(x)


def _checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    def run(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = checkpoint(function, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        return y

    return run


def _nested_checkpoint(outer: bool, inner: bool) -> Callable[..., Tensor]:
    run_outer, run_inner = _checkpointed(outer), _checkpointed(inner)
    return lambda function, x: run_outer(lambda x: run_inner(function, x), x)


_MODES = {"reentrant": True, "without_reentry": False}
#: Each runs a function of one tensor in its own way: ``ROUTES[name](function, x)``.
ROUTES: dict[str, Callable[..., Tensor]] = {
    **{
        name: (lambda function, x, _context=context: _run(_context, function, x))
        for name, context in HOOKS.items()
    },
    **{f"checkpoint_{name}": _checkpointed(mode) for name, mode in _MODES.items()},
    **{
        f"checkpoint_{one}_in_{other}": _nested_checkpoint(_MODES[other], _MODES[one])
        for one, other in itertools.product(_MODES, _MODES)
    },
    **{
        f"checkpoint_{name}_in_accepting": (
            lambda function, x, _mode=mode: _run(
                lambda: saving(Keeper()), lambda x: _checkpointed(_mode)(function, x), x
            )
        )
        for name, mode in _MODES.items()
    },
    **{
        f"accepting_in_checkpoint_{name}": (
            lambda function, x, _mode=mode: _checkpointed(_mode)(
                lambda x: _run(lambda: saving(Keeper()), function, x), x
            )
        )
        for name, mode in _MODES.items()
    },
}


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def grad_of(tensor: Tensor) -> Tensor:
    """The gradient, which must be there."""
    assert tensor.grad is not None
    return tensor.grad


def hook_stack_is_empty() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # pyright: ignore
