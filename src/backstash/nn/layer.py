"""What all layers with matmuls share: their options, the dtype they run in, the door check.

A layer runs in the dtype of its parameters, which its input must have too; inside
``torch.autocast`` it runs in autocast's dtype instead and both are cast.  The input is cast
outside the layer's autograd function, where autograd undoes it; the weight is cast inside,
because the function saves it by reference and must see the parameter itself.

Letters: T rows (all leading dimensions flattened), K features.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from backstash.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    LayoutError,
    RecipeError,
    ShapeError,
    UnsupportedOpError,
)
from backstash.nn.call import Call
from backstash.nn.module import QuantizedModule
from backstash.nn.options import check_flags
from backstash.nn.projection import Projection
from backstash.nn.weight_grad import Delivery, GradientQueue, WeightGradient
from backstash.opaque import opaque
from backstash.recipes import Operand, Phase

#: Decorates the forward of a layer.  What a layer does depends on what a tracer does not see: the
#: recipe in force, scales that are learnt, weights that gather themselves.
uncompiled = opaque(
    reason="a layer of backstash runs as it is between what is compiled before and after it; "
    "leave out fullgraph=True"
)


class Keep(enum.Enum):
    """What forward keeps of a layer's input for the weight gradient."""

    NOTHING = "nothing"  # nobody will call backward
    COLUMNS = "columns"  # its columns in the recipe's format
    ORIGINAL = "original"  # the input tensor itself; its columns are quantized in backward


class Layer(QuantizedModule):
    """Base of the layers; it knows where their weight gradients go, and when."""

    #: Parameters that a layer asks for with ``materialize_weight_for_*``: they may be shards.
    materialized_parameters: ClassVar[tuple[str, ...]] = ("weight", "fc1_weight", "fc2_weight")

    def __init__(self, *, name: str | None, delivery: Delivery, delayed: bool) -> None:
        super().__init__(name=name)
        check_flags(delay_wgrad_compute=delayed)
        self.weight_gradient = WeightGradient(delivery, GradientQueue() if delayed else None)

    def backward_dw(self) -> None:
        """Compute the weight gradients that backward left for later, and add each once.

        Adds to ``weight.grad``, or to ``weight.main_grad``; does nothing where nothing waits.

        Raises:
            ConfigError: the layer computes its weight gradients in backward.
        """
        if self.weight_gradient.queue is None:
            raise ConfigError(
                f"backward_dw of {type(self).__name__} has nothing to do: its weight gradients "
                "are computed in backward; construct it with delay_wgrad_compute=True"
            )
        self.weight_gradient.queue.run()

    def projection(self, weight: Tensor, dtype: torch.dtype, linear: str = "") -> Projection:
        """The matmul with ``weight``, under the recipe in force now."""
        self.weight_gradient.check(weight)
        return Projection(self.capture(linear), self.weight_gradient, dtype)

    def keep(self, call: Call, *, original: bool = False) -> Keep:
        """What to keep of an input under ``call``'s recipe.

        Raises:
            RecipeError: the original is wanted and the recipe's scale is learnt over time.
        """
        if original and _learns_input_scale(call):
            raise RecipeError(
                f"save_original_input quantizes the input again in backward, when the recipe "
                f"{call.recipe.name!r} may have learnt another scale; leave the option out, or "
                "take a recipe that computes its scales from the tensor"
            )
        if not torch.is_grad_enabled():
            return Keep.NOTHING
        return Keep.ORIGINAL if original else Keep.COLUMNS

    def compute_dtype(self, x: Tensor, features: int, weight: Tensor) -> torch.dtype:
        """The dtype the matmuls run in, after checking ``x`` at the door.

        Raises:
            ShapeError, DtypeError, DeviceError: ``x`` does not fit ``weight``.
            LayoutError: ``x`` is sparse or nested.
            UnsupportedOpError: a transform of ``torch.func`` or a forward derivative is asked.
        """
        layer = type(self).__name__
        _refuse_transforms(self, x)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DtypeError(
                f"{layer} needs a floating-point tensor, got {came}; convert the input first"
            )
        if x.layout is not torch.strided or x.is_nested:
            raise LayoutError(
                f"{layer} needs a dense tensor, got a {'nested' if x.is_nested else x.layout} "
                "one; make it dense, or give rows of many lengths to a grouped layer"
            )
        if x.ndim == 0 or x.shape[-1] != features:
            raise ShapeError(
                f"{layer} needs {features} features in the last dimension, got "
                f"{tuple(x.shape)}; check the layer before, or reshape"
            )
        if x.device != weight.device:
            raise DeviceError(
                f"{layer} has its parameters on {weight.device}, got an input on {x.device}; "
                "move one of them"
            )
        # Autocast leaves float64 alone, and so does a layer.
        if _autocasts(x.device) and x.dtype is not torch.float64:
            return torch.get_autocast_dtype(x.device.type)
        if x.dtype != weight.dtype:
            raise DtypeError(
                f"{layer} has parameters in {weight.dtype}, got an input in {x.dtype}; cast one "
                "of them, or run inside torch.autocast"
            )
        return x.dtype


def _refuse_transforms(layer: Layer, x: Any) -> None:
    """A layer has one derivative: that of one call, backwards."""
    asked = None
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportAttributeAccessIssue]
        asked = "a transform of torch.func such as vmap, grad or jvp"
    elif forward_ad._current_level >= 0:
        given = (x, *layer.parameters(recurse=False))
        tangents = [forward_ad.unpack_dual(t).tangent for t in given if isinstance(t, Tensor)]
        asked = "a forward derivative" if any(t is not None for t in tangents) else None
    if asked is not None:
        raise UnsupportedOpError(
            f"{type(layer).__name__} can be called and differentiated backwards once, and was "
            f"called under {asked}; take the gradient with backward() or torch.autograd.grad, or "
            "use a layer of torch.nn here"
        )


def _learns_input_scale(call: Call) -> bool:
    return any(call.format(Operand.INPUT, phase).stateful for phase in Phase)


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def as_rows(x: Tensor) -> Tensor:
    """Flatten the leading dimensions: ``(T, K)``; also for no rows at all, and for one."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def in_shape_of(y_TN: Tensor, x: Tensor) -> Tensor:
    """Give rows the leading dimensions of ``x`` again: what a layer returns, ``(*, N)``.

    Not by ``view``: a view that an autograd function returns may not be changed in place, and
    people write ``y += x`` and ``relu_``.
    """
    if x.ndim == 2:
        return y_TN
    return torch.ops.aten._unsafe_view(y_TN, (*x.shape[:-1], y_TN.shape[1]))


def outside_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a Function's forward or backward in the dtypes it is given.

    Inside autocast every matmul would round its operands again: float32 sums and values
    that a recipe has just quantized among them.
    """

    @functools.wraps(method)
    def run(ctx: Any, first: Tensor, *rest: Any) -> Any:
        if not _autocasts(first.device):
            return method(ctx, first, *rest)
        with torch.autocast(first.device.type, enabled=False):
            return method(ctx, first, *rest)

    return run
