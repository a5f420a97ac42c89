"""What may be done with a ``QuantizedTensor``: a table, and a loud default.

An operation is here because it has an exact meaning on the buffers (move, copy, view, take
rows, compare), or because it says by its name that it writes (``copy_``, ``mul_`` and the other
in-place arithmetic of optimizers and initializers): then the values are decoded, changed in
float32 or wider, and quantized into the same buffers again.  What only the optimizers of torch
do is in :mod:`backstash.tensors.optimizer_steps`.  Any other operation raises: calling
``dequantize()`` is the caller's decision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from backstash.errors import DtypeError, LayoutError, UnsupportedOpError
from backstash.formats.format import HIGH_PRECISION_DTYPES
from backstash.tensors.parts import part, views_count_writes
from backstash.tensors.quantized import QuantizedTensor

aten = torch.ops.aten
_OPERATIONS: dict[Any, Callable[..., Any]] = {}


def run_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` as the table says.

    Raises:
        UnsupportedOpError: The table does not know ``func``.
    """
    run = _OPERATIONS.get(func)
    if run is None:
        raise not_defined(func)
    return run(func, args, kwargs)


def not_defined(func: Any) -> UnsupportedOpError:
    """The error for an operation that the table does not know."""
    remedy = _REMEDIES.get(func, "call .dequantize() on it first, or quantize the result yourself")
    return UnsupportedOpError(
        f"{func} is not defined for a QuantizedTensor, and nothing dequantizes silently; {remedy}"
    )


_DRAW = (
    "an initializer that looks at what it drew, as trunc_normal_ does, draws into a plain tensor: "
    "q.copy_(torch.nn.init.trunc_normal_(torch.empty(q.shape))); elsewhere call .dequantize() first"
)
_AVERAGE = (
    "call .dequantize() on it first; for torch.optim.ASGD pass foreach=True, and for "
    "AveragedModel a multi_avg_fn"
)
#: What to do instead, for operations that somebody else calls.
_REMEDIES: dict[Any, str] = {
    aten.lt.Scalar: _DRAW,
    aten.gt.Scalar: _DRAW,
    aten.gt.Tensor: _DRAW,
    aten.erfinv_.default: _DRAW,
    aten.pow_.Scalar: _DRAW,
    aten.log_.default: _DRAW,
    aten.sub.Tensor: _AVERAGE,
}


QuantizedTensor.run_operation = staticmethod(run_operation)


def operation(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what runs these operations; it is given the operation and its arguments."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATIONS.update(dict.fromkeys(funcs, run))
        return run

    return register


@operation(aten.detach.default, aten.alias.default)
def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    return args[0].like(args[0].buffers)


@operation(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    return _each_buffer(args[0], Tensor.clone)


@operation(aten._pin_memory.default)
def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    return _each_buffer(args[0], Tensor.pin_memory)


@operation(aten.is_pinned.default)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(buffer.is_pinned() for buffer in args[0].buffers.values())


@operation(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    source = args[0]
    dtype = kwargs.pop("dtype", None) or source.dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        raise DtypeError(
            f"a QuantizedTensor stands for values of a floating dtype, got {dtype}; "
            f"dequantize() it first"
        )
    kwargs.pop("memory_format", None)
    return _as_dtype(_each_buffer(source, lambda buffer: func(buffer, **kwargs)), dtype)


@operation(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    source, wanted = args[0], args[1]
    shape = torch.empty(source.shape, device="meta").view(wanted).shape
    if shape and shape[-1] == source.shape[-1]:
        return source.like(source.buffers, shape=shape)
    if not shape or not source.format.any_view or source.ends_G is not None:
        raise LayoutError(
            f"a {source.format.name} tensor of shape {tuple(source.shape)} has blocks or groups "
            f"of rows of {source.shape[-1]} and cannot be viewed as {tuple(shape)}; keep the last "
            f"dimension, or dequantize() first"
        )
    rows, columns = shape[:-1].numel(), shape[-1]
    with views_count_writes():
        matrices = {
            name: buffer.view(rows, columns) if buffer.ndim == 2 else buffer
            for name, buffer in source.buffers.items()
        }
    return source.like(matrices, shape=shape)


@operation(
    aten.slice.Tensor,
    aten.narrow.default,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _take_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    # What the operation makes of plain rows says which rows it takes, and refuses what it must.
    views = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs)
    if isinstance(views, Tensor):
        return part(source, views)
    return [part(source, view) for view in views]


@operation(aten.copy_.default)
def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target, source = args[0], args[1]
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize())
    if isinstance(source, QuantizedTensor):
        # Bytes are copied where the source has all that the target keeps: it may keep more.
        if _same_layout(target, source) and target.buffers.keys() <= source.buffers.keys():
            return target.write_(source.buffers)
        source = source.dequantize()
    return target.requantize_(source.expand(target.shape))


@operation(aten.equal.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = args
    return (
        isinstance(one, QuantizedTensor)
        and isinstance(other, QuantizedTensor)
        and one.dtype == other.dtype
        and one.usage == other.usage
        and _same_layout(one, other)
        and all(torch.equal(one.buffers[name], other.buffers[name]) for name in one.buffers)
    )


@operation(aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Buffers of the same kind: quantized memory waiting for a ``copy_``."""
    source, device = args[0], kwargs.get("device") or args[0].device
    dtype = kwargs.get("dtype") or source.dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        return func(torch.empty(source.shape, device="meta"), **{**kwargs, "device": device})
    buffers = {
        # A learnt scale and the ends of groups are not values: a later copy_ reads them.
        name: buffer.to(device, copy=True)
        if source.format.stateful
        else torch.empty_like(buffer, device=device)
        for name, buffer in source.buffers.items()
    }
    ends_G = None if source.ends_G is None else source.ends_G.to(device, copy=True)
    return _as_dtype(source.like(buffers, ends_G=ends_G, shared=()), dtype)


@operation(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_full.default,
    aten.new_ones.default,
)
def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fresh plain values: an optimizer's moments must not be quantized."""
    if func is aten.zeros_like.default and _is_staging():
        return _empty_like(aten.empty_like.default, args, kwargs)
    like = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return func(like, *args[1:], **kwargs)


@operation(aten.new_empty.default)
def _new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Plain, but for the memory of its own shape that a checkpoint is staged in."""
    source, shape, *rest = args
    if tuple(shape) == tuple(source.shape) and not rest and _is_staging():
        return _empty_like(aten.empty_like.default, (source,), kwargs)
    return _plain_like(func, args, kwargs)


#: Of torch: what allocates for each of the two ways to stage a checkpoint.
_STAGERS = (
    "torch.distributed._state_dict_utils",
    "torch.distributed.checkpoint._state_dict_stager",
)


def _is_staging() -> bool:
    """Is it torch that asks, for memory to stage a checkpoint in?

    ``torch.distributed.checkpoint.async_save`` copies a state dict into memory like its tensors,
    and writes the copy while the training goes on: it must hold the bytes, not their values.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("backstash"):
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _STAGERS


@operation(
    *(
        getattr(getattr(aten, name), overload)
        for name in ("add_", "sub_", "mul_", "div_")
        for overload in ("Tensor", "Scalar")
    ),
    aten.addcmul_.default,
    aten.addcdiv_.default,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.clamp_.default,
    aten.normal_.default,
    aten.uniform_.default,
)
def _write_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target = args[0]
    if func is aten.add_.Tensor and is_decay(args, kwargs):
        return func(target, args[1].dequantize(), **kwargs)
    if not isinstance(target, QuantizedTensor):
        raise UnsupportedOpError(
            f"{func} would mix a QuantizedTensor into a plain tensor; call .dequantize() on it"
        )
    wide = torch.promote_types(target.dtype, torch.float32)
    values = target.dequantize(dtype=wide)
    func(values, *(_widened(other, wide) for other in args[1:]), **kwargs)
    return target.requantize_(values)


@operation(aten.eye.m_out)
def _eye(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target = kwargs["out"]
    return target.requantize_(torch.eye(*args, dtype=target.dtype, device=target.device))


if distributed.is_available():

    @operation(torch.ops.c10d.broadcast_.default)
    def _broadcast_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The bytes of one rank's buffers into those of the others, whose layout is the same."""
        tensors, *rest = args
        works = [
            func([part], *rest, **kwargs)[1]
            for tensor in tensors
            for part in (_held(tensor) if isinstance(tensor, QuantizedTensor) else [tensor])
        ]
        for work in works[:-1]:
            work.wait()
        return tensors, works[-1]


def _held(tensor: QuantizedTensor) -> list[Tensor]:
    tensor.check_whole()
    ends = [] if tensor.ends_G is None else [tensor.ends_G]
    return [*tensor.buffers.values(), *ends]


def _each_buffer(tensor: QuantizedTensor, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    """The same kind around what ``change`` makes of each buffer, which is memory of its own."""
    buffers = {name: change(buffer) for name, buffer in tensor.buffers.items()}
    ends_G = None if tensor.ends_G is None else change(tensor.ends_G)
    return tensor.like(buffers, ends_G=ends_G, shared=())


def _as_dtype(tensor: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """The same tensor standing for ``dtype``; only plain values are kept in another one."""
    rows, columns = tensor.shape[:-1].numel(), tensor.shape[-1]
    groups = None if tensor.ends_G is None else tensor.ends_G.numel()
    specs = tensor.format.buffers(rows, columns, dtype, tensor.usage, groups)
    buffers = {name: buffer.to(specs[name].dtype) for name, buffer in tensor.buffers.items()}
    return tensor.like(buffers, dtype=dtype)


def is_decay(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is a multiple of a quantized tensor added to a plain one?"""
    one, other = args
    is_mixed = not isinstance(one, QuantizedTensor) and isinstance(other, QuantizedTensor)
    return is_mixed and kwargs.get("alpha", 1) != 1


def _widened(other: Any, wide: torch.dtype) -> Any:
    if isinstance(other, QuantizedTensor):
        return other.dequantize(dtype=wide)
    # lerp_ refuses a mixture of dtypes, though every narrower value is exact in the wide one.
    narrower = isinstance(other, Tensor) and torch.promote_types(other.dtype, wide) == wide
    return other.to(wide) if narrower else other


def _same_layout(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Do equal bytes mean equal values?  Groups must end at the same rows."""
    if (one.format, one.shape) != (other.format, other.shape):
        return False
    if one.ends_G is None or other.ends_G is None:
        return one.ends_G is other.ends_G
    # One object on a GPU is the common case, and comparing values there would ask the device.
    return one.ends_G is other.ends_G or torch.equal(one.ends_G, other.ends_G.to(one.device))


__all__ = ["is_decay", "not_defined", "operation", "run_operation"]
