"""Activations of the feed-forward layers, with each row's routing weight multiplied in.

A gated activation reads two halves of its row, ``h = [gate | up]``, and gives
``act(gate) * up``: half as many columns as came in.  The routing weight of a row is
multiplied onto the activation, not onto the layer's output, so that the second matmul
already sums weighted rows and nothing of the output has to be kept for the weight's
gradient.

Letters: T rows, F columns of the pre-activation, I columns of the activation
(F = 2 I when gated, else F = I).
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from backstash.errors import ConfigError, ShapeError
from backstash.kernels.reference.paged_rows import InPages, PagedRows, page_values
from backstash.kernels.reference.slabs import Slabs, slab_values

#: Every activation by name, and whether it is gated.
ACTIVATIONS: Mapping[str, bool] = MappingProxyType(
    {
        "gelu": False,
        "relu": False,
        "silu": False,
        "swiglu": True,
        "geglu": True,
        "reglu": True,
    }
)
_CURVE_OF_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


class ActivationGradients(NamedTuple):
    """Where :func:`activate_backward` writes, rows side by side.

    With ``a_TI`` the activation itself is written as well: it is computed anyway, and the
    gradient of the matmul after it reads it.  ``dh_TF`` may be what ``h_TF`` is read from, and
    ``a_TI`` what ``da_TI`` is.
    """

    dh_TF: Tensor
    dprob_T: Tensor | None
    a_TI: Tensor | None


def activate(
    h_TF: Tensor, prob_T: Tensor | None, activation: str, ends_G: Tensor | None = None
) -> Tensor:
    """Apply ``activation`` to each row and multiply it by the row's weight, if there is one.

    With the ends of groups, rows of the tail are not read, and may be anything in the result.

    Returns:
        ``(T, I)`` in ``h_TF``'s dtype.

    Raises:
        ConfigError: the activation is not one of :data:`ACTIVATIONS`.
        ShapeError: a gated row does not have two halves, or there is not one weight a row.
    """
    check_activation(h_TF, prob_T, activation)
    gate, up = _halves(h_TF, activation)
    value, _ = _curve(gate, activation)
    if up is not None:
        value = value * up
    if prob_T is not None:
        value = value * prob_T.to(value.dtype).unsqueeze(1)
    return value.to(h_TF.dtype)


def activate_slabs(h: Slabs, prob_T: Tensor | None, activation: str) -> Tensor:
    """:func:`activate` of rows in slabs; rows of the tail may be anything in the result."""
    return activate(slab_values(h), prob_T, activation)


def activates_pages(paged: InPages, activation: str) -> bool:
    """Does :func:`activate_backward` read this pre-activation, or these weights, where they are?"""
    return len(paged.shape) in (1, 2)


def activate_backward(
    da_TI: Tensor,
    h_TF: Tensor | InPages,
    prob_T: Tensor | PagedRows | None,
    activation: str,
    into: ActivationGradients | None = None,
    ends_G: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Give the gradients of :func:`activate`, with the activation computed again from ``h_TF``.

    What lies in pages is read there, if :func:`activates_pages` says so.  With the ends of groups,
    rows of the tail are not read.  Their gradients, and those of rows that are in no page, may be
    anything, but those of their routing weights are zeros.

    Returns:
        ``dh_TF`` in ``h_TF``'s dtype, and ``dprob_T`` in ``prob_T``'s dtype or ``None``: those
        of ``into``, if it is given.

    Raises:
        ConfigError: the activation is not one of :data:`ACTIVATIONS`.
        ShapeError: the shapes do not fit each other.
    """
    h_TF = page_values(h_TF) if isinstance(h_TF, InPages) else h_TF
    prob_T = page_values(prob_T) if isinstance(prob_T, PagedRows) else prob_T
    check_activation(h_TF, prob_T, activation, da_TI)
    gate, up = _halves(h_TF, activation)
    value, slope = _curve(gate, activation)
    da = da_TI.to(gate.dtype)
    dprob_T = None
    if prob_T is not None:
        plain = value if up is None else value * up
        dprob_T = (da * plain).sum(1).to(prob_T.dtype)
        if ends_G is not None:
            row_T = torch.arange(dprob_T.shape[0], device=dprob_T.device)
            dprob_T = dprob_T.where(row_T < ends_G[-1], 0)
        da = da * prob_T.to(da.dtype).unsqueeze(1)
    dh = da * slope if up is None else torch.cat([da * up * slope, da * value], dim=1)
    if into is None:
        return dh.to(h_TF.dtype), dprob_T
    if into.a_TI is not None:
        into.a_TI.copy_(activate(h_TF, prob_T, activation))
    into.dh_TF.copy_(dh)
    if into.dprob_T is not None and dprob_T is not None:
        into.dprob_T.copy_(dprob_T)
    return into.dh_TF, into.dprob_T


def _halves(h_TF: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    wide = h_TF if h_TF.dtype is torch.float64 else h_TF.float()
    if not ACTIVATIONS[activation]:
        return wide, None
    gate, up = wide.chunk(2, dim=1)
    return gate, up


def curve_name(activation: str) -> str:
    """The ungated activation that ``activation`` applies to its gate, or is."""
    return _CURVE_OF_GATED.get(activation, activation)


def _curve(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Give the value and the slope of the curve behind ``activation``."""
    curve = curve_name(activation)
    if curve == "relu":
        return torch.relu(x), (x > 0).to(x.dtype)
    if curve == "silu":
        s = torch.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * below, below + x * density


def check_activation(
    h_TF: Tensor | InPages,
    prob_T: Tensor | PagedRows | None,
    activation: str,
    da_TI: Tensor | None = None,
) -> None:
    """Refuse an activation that there is none of, and shapes that do not fit each other."""
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"the activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}; "
            "pick one of these"
        )
    if len(h_TF.shape) != 2 or (ACTIVATIONS[activation] and h_TF.shape[1] % 2):
        columns = "an even number of columns" if ACTIVATIONS[activation] else "columns"
        raise ShapeError(
            f"{activation} needs rows and {columns} (T, F), got {tuple(h_TF.shape)}; "
            "a gated activation reads [gate | up] halves of each row"
        )
    if prob_T is not None and tuple(prob_T.shape) != (h_TF.shape[0],):
        raise ShapeError(
            f"{activation} needs one weight for each of {h_TF.shape[0]} rows, got "
            f"{tuple(prob_T.shape)}; flatten the weights to (T,)"
        )
    columns = h_TF.shape[1] // 2 if ACTIVATIONS[activation] else h_TF.shape[1]
    if da_TI is not None and tuple(da_TI.shape) != (h_TF.shape[0], columns):
        raise ShapeError(
            f"activate_backward needs a gradient of the activation's shape "
            f"{(h_TF.shape[0], columns)}, got {tuple(da_TI.shape)}; pass the gradient of what "
            "activate returned"
        )
