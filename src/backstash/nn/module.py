"""The base of our layers: how a layer captures the recipe, and makes its parameters.

Delayed scaling is the one recipe with a state.  Its scales live beside the parameters; they
are saved under ``delayed_scaling.`` where there are any, and never missed where there are
none, so the state dicts of plain modules load and save with ``strict=True``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backstash.errors import ConfigError
from backstash.formats import FLOAT8_CURRENT, Float8Delayed, Format, HighPrecisionFormat, Usage
from backstash.nn.call import Call
from backstash.nn.options import check_name
from backstash.recipes import (
    DelayedScaling,
    Gradient,
    Operand,
    Phase,
    Role,
    in_force,
    weight_recipe,
)
from backstash.recompute import in_checkpoint, is_recomputing, remember
from backstash.tensors import QuantizedTensor, equal_groups

_SCALING = "delayed_scaling."
_PARTS = ("history", "scale")
# The matmul whose format decides how the scale of an operand is learnt.
_LEARNT_IN = {
    Operand.INPUT: Phase.FORWARD,
    Operand.WEIGHT: Phase.FORWARD,
    Operand.GRADIENT: Phase.BACKWARD,
}


class QuantizedModule(nn.Module):
    """A layer whose matmuls run under the recipe in force.

    Args:
        name: By which recipes know the layer; see :func:`name_modules` for a whole model.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__()
        check_name(name)
        self.name = name or ""
        self._scalings: dict[str, DelayedScaling] = {}
        self._loaded_scalings: dict[str, Tensor] = {}

    @property
    def num_groups(self) -> int:
        """How many groups of rows, each with a weight of its own, the matmuls have."""
        return 1

    def capture(self, linear: str = "") -> Call:
        """The recipe in force for the matmul ``linear`` of this module.

        In the recomputation of a checkpointed region this is the recipe of its forward.

        Raises:
            RecipeError: A custom recipe gave something that is no format.
        """
        call = remember(lambda: self._new_call(linear))
        # A recomputation has noted its magnitudes already, in forward.
        return dataclasses.replace(call, step=None) if call.step and is_recomputing() else call

    def _new_call(self, linear: str) -> Call:
        force = in_force()
        name = self._name_of(linear)
        call = Call(force.recipe, type(self).__name__, name)
        if force.recipe.choose is not None:
            force.recipe.check_products(call.module, name)
        learnt = {
            op: format
            for op, phase in _LEARNT_IN.items()
            if isinstance(format := call.format(op, phase), Float8Delayed)
        }
        return self._learning(call, linear, learnt) if learnt else call

    def _name_of(self, linear: str) -> str:
        """The name by which recipes know a matmul of this module."""
        return ".".join(part for part in (self.name, linear) if part)

    def _learning(self, call: Call, linear: str, formats: Mapping[Operand, Float8Delayed]) -> Call:
        """The call, with the scales that these operands have learnt and will learn."""
        scalings = {op: self._scaling(linear, op, format) for op, format in formats.items()}
        of_gradient = scalings.pop(Operand.GRADIENT, None)
        step = in_force().step if torch.is_grad_enabled() or in_checkpoint() else None
        gradient = None
        if of_gradient is not None:
            gradient = step.expect_backward(of_gradient) if step else Gradient(None, of_gradient)
        scales = {operand: scaling.scale_G for operand, scaling in scalings.items()}
        return dataclasses.replace(
            call, scalings=scalings, scales=scales, step=step, gradient=gradient
        )

    def _scaling(self, linear: str, operand: Operand, format: Float8Delayed) -> DelayedScaling:
        key = f"{linear}.{operand.value}" if linear else operand.value
        device = next(self.parameters()).device
        scaling = self._scalings.get(key)
        if scaling is None:
            scaling = DelayedScaling(format, self.num_groups, device)
            loaded = [self._loaded_scalings.get(f"{key}.{part}") for part in _PARTS]
            if loaded[0] is not None and loaded[1] is not None:
                scaling.load(loaded[0], loaded[1])
            self._scalings[key] = scaling
            for part in _PARTS:
                self._loaded_scalings.pop(f"{key}.{part}", None)
        scaling.follow(format)
        scaling.to(device)
        return scaling

    def make_parameter(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        linear: str = "",
    ) -> nn.Parameter:
        """An uninitialized parameter; a weight is in low precision under ``quantized_model_init``.

        Shapes: ``(N,)`` for a bias, ``(N, K)`` for a weight, ``(G, N, K)`` for G weights.
        ``linear`` names the matmul that reads it, as in :meth:`capture`.
        """
        plain = torch.empty(*shape, device=device, dtype=dtype)
        if len(shape) < 2 or (recipe := weight_recipe()) is None:
            return nn.Parameter(plain)
        role = Role(Operand.WEIGHT, Phase.FORWARD, type(self).__name__, self._name_of(linear))
        format = _storage_format(recipe.format(role))
        return nn.Parameter(plain if format is None else _empty_weight(format, plain))

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> QuantizedModule:
        """Scales go where the parameters go; on ``meta`` they would be lost."""
        super()._apply(fn, *args, **kwargs)
        first = next(self.parameters(), None)
        if first is not None and not first.is_meta:
            for scaling in self._scalings.values():
                scaling.to(first.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._save_to_state_dict(destination, prefix, *rest)
        start = prefix + _SCALING
        # What was loaded is not used before the first call, and must not be lost until then.
        destination.update((start + key, tensor) for key, tensor in self._loaded_scalings.items())
        for key, scaling in self._scalings.items():
            for part, tensor in zip(_PARTS, scaling.settled(), strict=True):
                destination[f"{start}{key}.{part}"] = tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        start = prefix + _SCALING
        own = [key for key in state_dict if key.startswith(start)]
        if own:
            self._scalings = {}
            self._loaded_scalings = {key[len(start) :]: state_dict.pop(key) for key in own}
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)


def draw_linear_(weight: Tensor, bias: Tensor | None) -> None:
    """Draw a weight ``(..., N, K)`` and its bias as ``torch.nn.Linear`` does, in this order."""
    bound = weight.shape[-1] ** -0.5 if weight.shape[-1] else 0.0
    for parameter in (weight, bias):
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)


def name_modules(model: nn.Module) -> nn.Module:
    """Give each of our layers its name in ``model``, for recipes that go by names.

    Returns:
        The model itself.

    Raises:
        ConfigError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"name_modules needs a torch.nn.Module, got {type(model).__name__}; give the model"
        )
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            module.name = name
    return model


def scaling_state(model: nn.Module) -> Mapping[str, DelayedScaling]:
    """All that delayed scaling has learnt in ``model``, by module and operand."""
    return {
        f"{name}.{key}" if name else key: scaling
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule)
        for key, scaling in module._scalings.items()
    }


def _storage_format(format: Format) -> Format | None:
    """How a weight is stored; a learnt scale cannot be, before anything was learnt."""
    if isinstance(format, HighPrecisionFormat):
        return None
    if isinstance(format, Float8Delayed):
        return dataclasses.replace(FLOAT8_CURRENT, code=format.code)
    return format


def _empty_weight(format: Format, plain: Tensor) -> QuantizedTensor:
    groups = plain.shape[0] if plain.ndim == 3 else None
    rows, columns = plain.shape[:-1].numel(), plain.shape[-1]
    specs = format.buffers(rows, columns, plain.dtype, Usage.BOTH, groups)
    return QuantizedTensor(
        {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=plain.device)
            for name, spec in specs.items()
        },
        format=format,
        usage=Usage.BOTH,
        shape=plain.shape,
        dtype=plain.dtype,
        ends_G=None if groups is None else equal_groups(groups, plain.shape[1], plain.device),
    )
