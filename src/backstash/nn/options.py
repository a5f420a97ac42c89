"""What a layer may be made with: its sizes, its switches, where its parameters are.

Checked when a layer is made, because torch would take a size of ``True``, find a wrong dtype
only when weights are drawn, and take ``"no"`` for a yes.
"""

from __future__ import annotations

import enum
import math
import numbers
from typing import Any

import torch

from backstash.errors import ConfigError, DeviceError, DtypeError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_sizes(*, least: int = 0, remedy: str = "pass an int", **sizes: Any) -> None:
    """Refuse what is no number of features, experts or choices.

    Raises:
        ConfigError: A size is no whole number, or less than ``least``.
    """
    for name, size in sizes.items():
        # To Python, True is a whole number too.
        is_whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if not is_whole or size < least:
            raise ConfigError(
                f"{name} must be a whole number of at least {least}, got {size!r}; {remedy}"
            )


def check_kind(kind: type, *, remedy: str | None = None, **values: Any) -> None:
    """Refuse what is no object of a class, or no member of an enum.

    Raises:
        ConfigError: It is not.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            if remedy is None:
                members = ", ".join(map(str, kind)) if issubclass(kind, enum.Enum) else "one"
                remedy = f"pass {members}"
            raise ConfigError(f"{name} must be of {kind.__name__}, got {value!r}; {remedy}")


def check_flags(**flags: Any) -> None:
    """Refuse a switch that is neither on nor off.

    Raises:
        ConfigError: It is not.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} must be True or False, got {flag!r}; pass one of the two")


def check_numbers(*, above: float | None = None, remedy: str, **values: Any) -> None:
    """Refuse what is no finite number of at least zero, or not more than ``above``.

    Raises:
        ConfigError: It is not.
    """
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        fits = is_number and math.isfinite(value)
        if not fits or (value < 0 if above is None else value <= above):
            least = "of at least 0" if above is None else f"above {above:g}"
            raise ConfigError(f"{name} must be a finite number {least}, got {value!r}; {remedy}")


def check_name(name: Any) -> None:
    """Refuse a name that no pattern of a recipe could match.

    Raises:
        ConfigError: It is no text.
    """
    if not isinstance(name, str | None):
        raise ConfigError(f"name must be a text, got {name!r}; leave it out for none")


def placement(device: torch.device | str | int | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """``device`` and ``dtype`` for new parameters.

    Raises:
        DeviceError: There is no such kind of device.
        DtypeError: ``dtype`` is no floating dtype that a layer runs in.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise DtypeError(
            f"the parameters of a layer are float32, bfloat16, float16 or float64, got {dtype!r}; "
            f"for weights in low precision make the layer inside quantized_model_init"
        )
    try:
        return {"device": None if device is None else torch.device(device), "dtype": dtype}
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"device must be one that torch knows, such as 'cpu' or 'cuda:0', got {device!r}"
        ) from error
