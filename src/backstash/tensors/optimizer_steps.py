"""What the optimizers of torch do to a ``QuantizedTensor``.

Most of them write into their parameters with the in-place operations of
:mod:`backstash.tensors.dispatch`, one by one, as lists (``foreach``) or in one launch
(``fused``), and a step is rounded to the format as any such write is.  Three things they read,
and cannot be told to dequantize: the norm of a whole tensor (``Adafactor``),
``plain.add(quantized, alpha=...)``, the decay that is part of a gradient, and the list of
differences between parameters and their averages (``ASGD``).  The results are plain, and no
operator means any of them: ``plain + quantized`` has no ``alpha``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from backstash.tensors.dispatch import is_decay, not_defined, operation
from backstash.tensors.quantized import QuantizedTensor

aten = torch.ops.aten


@operation(
    *(
        getattr(packet, overload)
        for name in ("add", "sub", "mul", "div", "lerp", "copy", "zero")
        for packet in (getattr(aten, f"_foreach_{name}_"),)
        for overload in packet.overloads()
    ),
    aten._foreach_addcmul_.Scalar,
    aten._foreach_addcmul_.ScalarList,
    aten._foreach_addcdiv_.Scalar,
    aten._foreach_addcdiv_.ScalarList,
)
def _write_each_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The ``foreach`` form of an optimizer: each tensor of the list on its own."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    for index, target in enumerate(args[0]):
        others = [other[index] if isinstance(other, list) else other for other in args[1:]]
        scale = {"value": others.pop()} if name in ("addcmul_", "addcdiv_") and others[2:] else {}
        getattr(target, name)(*others, **scale, **kwargs)
    # In-place operations count as writes for autograd; of a list it leaves that to each tensor.
    increment_version([target for target in args[0] if not target.is_inference()])


@operation(
    *(
        getattr(packet, overload)
        for name in ("adam", "adamw", "sgd", "adagrad")
        for packet in (getattr(aten, f"_fused_{name}_"),)
        for overload in packet.overloads()
        if "out" not in overload
    ),
)
def _step_fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A whole step of an optimizer in one launch; of a quantized tensor on its values."""
    plain = [t for t in args[0] if not isinstance(t, QuantizedTensor) and not t.is_inference()]
    for index, target in enumerate(args[0]):
        values = target.dequantize() if isinstance(target, QuantizedTensor) else target
        # Not every list has an entry for each tensor: some are empty.
        others = (other[index : index + 1] for other in args[1:] if isinstance(other, list))
        rest = (other for other in args[1:] if not isinstance(other, list))
        func([values], *others, *rest, **kwargs)
        if values is not target:
            target.requantize_(values)
    increment_version(plain)


@operation(aten._foreach_sub.List)
def _each_difference(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What ``ASGD`` adds to its averages: how far the parameters are from them."""
    ones, others = args
    ones = [one.dequantize() if isinstance(one, QuantizedTensor) else one for one in ones]
    return [torch.sub(one, other, **kwargs) for one, other in zip(ones, others, strict=True)]


@operation(aten.add.Tensor)
def _decayed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if not is_decay(args, kwargs):
        raise not_defined(func)
    return func(args[0], args[1].dequantize(), **kwargs)


@operation(aten._foreach_add.List)
def _each_decayed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The ``foreach`` form of the same: each pair of the lists on its own."""
    return [torch.add(one, other, **kwargs) for one, other in zip(*args, strict=True)]


@operation(aten.linalg_vector_norm.default)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source, *rest = args
    if kwargs.get("dim", rest[1] if rest[1:] else None) is not None:
        raise not_defined(func)
    return func(source.dequantize(), *rest, **kwargs)
