"""What may be done with a ``QuantizedTensor``: a table, and a loud default.

An operation is here because it has an exact meaning on the buffers (move, copy, view,
compare), or because it says by its name that it writes (``copy_``, ``mul_`` and the other
in-place arithmetic of optimizers and initializers): then the values are decoded, changed in
float32 or wider, and quantized into the same buffers again.  Any other operation raises:
calling ``dequantize()`` is the caller's decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DtypeError, LayoutError, UnsupportedOpError
from backstash.formats import Usage
from backstash.formats.format import HIGH_PRECISION_DTYPES
from backstash.tensors.quantized import QuantizedTensor

aten = torch.ops.aten
_OPERATIONS: dict[Any, Callable[..., Any]] = {}


def run_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` as the table says.

    Raises:
        UnsupportedOpError: The table does not know ``func``.
    """
    operation = _OPERATIONS.get(func)
    if operation is None:
        raise UnsupportedOpError(
            f"{func} is not defined for a QuantizedTensor, and nothing dequantizes silently; "
            f"call .dequantize() on it first, or quantize the result yourself"
        )
    return operation(func, args, kwargs)


QuantizedTensor.run_operation = staticmethod(run_operation)


def _operation(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(operation: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATIONS.update(dict.fromkeys(funcs, operation))
        return operation

    return register


@_operation(aten.detach.default, aten.alias.default)
def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    return args[0].like(args[0].buffers)


@_operation(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    return _each_buffer(args[0], Tensor.clone)


@_operation(aten._pin_memory.default)
def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    return _each_buffer(args[0], Tensor.pin_memory)


@_operation(aten.is_pinned.default)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(buffer.is_pinned() for buffer in args[0].buffers.values())


@_operation(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    source = args[0]
    dtype = kwargs.pop("dtype", None) or source.dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        raise DtypeError(
            f"a QuantizedTensor stands for values of a floating dtype, got {dtype}; "
            f"dequantize() it first"
        )
    kwargs.pop("memory_format", None)
    moved = _each_buffer(source, lambda buffer: func(buffer, **kwargs))
    return moved.like(moved.buffers, dtype=dtype)


@_operation(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    source, wanted = args[0], args[1]
    shape = torch.empty(source.shape, device="meta").view(wanted).shape
    same_columns = len(shape) > 0 and shape[-1] == source.shape[-1]
    if not same_columns and not (source.format.any_view and source.ends_G is None):
        raise LayoutError(
            f"a {source.format.name} tensor of shape {tuple(source.shape)} has blocks along its "
            f"last dimension and cannot be viewed as {tuple(shape)}; keep the last dimension, "
            f"or dequantize() first"
        )
    if same_columns:
        return source.like(source.buffers, shape=shape)
    columns = shape[-1] if len(shape) else 1
    matrices = {
        name: buffer.view(-1, columns) if buffer.ndim == 2 else buffer
        for name, buffer in source.buffers.items()
    }
    return source.like(matrices, shape=shape)


@_operation(aten.copy_.default)
def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target, source = args[0], args[1]
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize())
    if isinstance(source, QuantizedTensor):
        if _same_layout(target, source):
            for name, buffer in target.buffers.items():
                buffer.copy_(source.buffers[name])
            return target
        source = source.dequantize()
    return target.requantize_(source.expand(target.shape))


@_operation(aten.equal.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = args
    return (
        isinstance(one, QuantizedTensor)
        and isinstance(other, QuantizedTensor)
        and one.dtype == other.dtype
        and _same_layout(one, other)
        and all(torch.equal(one.buffers[name], other.buffers[name]) for name in one.buffers)
    )


@_operation(aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Buffers of the same kind: quantized memory waiting for a ``copy_``."""
    kwargs = {key: kwargs[key] for key in ("device",) if kwargs.get(key) is not None}
    return _each_buffer(args[0], lambda buffer: torch.empty_like(buffer, **kwargs))


@_operation(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
)
def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fresh plain values: an optimizer's moments must not be quantized."""
    like = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return func(like, *args[1:], **kwargs)


@_operation(
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
    aten.erfinv_.default,
)
def _write_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target = args[0]
    if not isinstance(target, QuantizedTensor):
        raise UnsupportedOpError(
            f"{func} would mix a QuantizedTensor into a plain tensor; call .dequantize() on it"
        )
    wide = torch.promote_types(target.dtype, torch.float32)
    values = target.dequantize(dtype=wide)
    others = (a.dequantize() if isinstance(a, QuantizedTensor) else a for a in args[1:])
    func(values, *others, **kwargs)
    return target.requantize_(values)


def _each_buffer(tensor: QuantizedTensor, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    buffers = {name: change(buffer) for name, buffer in tensor.buffers.items()}
    ends_G = None if tensor.ends_G is None else change(tensor.ends_G)
    return tensor.like(buffers, ends_G=ends_G)


def _same_layout(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Do equal bytes mean equal values?  Groups must end at the same rows."""
    if (one.format, one.usage, one.shape) != (other.format, other.usage, other.shape):
        return False
    if one.ends_G is None or other.ends_G is None:
        return one.ends_G is other.ends_G
    # One object on a GPU is the common case, and comparing values there would ask the device.
    return one.ends_G is other.ends_G or torch.equal(one.ends_G, other.ends_G)


__all__ = ["Usage", "run_operation"]
