"""Activations whose readers take float8 codes: the codes are written, never the values.

The matmul after an activation reads its rows, and the weight gradient its columns; both matmuls
before it read its gradient the same two ways.  Where all of them are quantized with a scale for
each row or column, the values between are nobody's: these are the operations of
:mod:`backstash.kernels.reference.activation` and the quantizers one after another, bit for bit.

Letters: T rows, F columns of the pre-activation, I columns of the activation (F = 2 I when
gated, else F = I), G groups, P columns with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstash.kernels.reference.activation import (
    ActivationGradients,
    activate,
    activate_backward,
)
from backstash.kernels.reference.float8_rowwise import quantize_float8_rows
from backstash.kernels.reference.float8_turned import (
    Turned,
    quantize_float8_rows_and_turned,
    quantize_float8_turned,
)


class Scaling(NamedTuple):
    """The dtype of codes, the least magnitude taken for the largest, and which scales there are."""

    code_dtype: torch.dtype
    epsilon: float = 0.0
    power_of_two: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As the quantizers take them."""
        return {"epsilon": self.epsilon, "power_of_two": self.power_of_two}


class ActivationCodes(NamedTuple):
    """What :func:`activate_backward_float8` gives.

    Attributes:
        dh_rows: Codes ``(T, F)`` as bytes and inverse scales ``(T, 1)`` of the gradient's rows.
        dh_turned: The gradient's columns.
        a_turned: The activation's columns.
        dprob_T: The gradient of the routing weights, if there are any.
    """

    dh_rows: tuple[Tensor, Tensor]
    dh_turned: Turned
    a_turned: Turned
    dprob_T: Tensor | None


def activate_float8(
    h_TF: Tensor,
    prob_T: Tensor | None,
    activation: str,
    scaling: Scaling,
    ends_G: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows of the activation: codes ``(T, I)`` as bytes and inverse scales ``(T, 1)``.

    With the ends of groups, rows of the tail may hold anything.
    """
    a_TI = activate(h_TF, prob_T, activation, ends_G)
    return quantize_float8_rows(a_TI, scaling.code_dtype, **scaling.options)


def activate_backward_float8(
    da_TI: Tensor,
    h_TF: Tensor,
    prob_T: Tensor | None,
    activation: str,
    ends_G: Tensor,
    scalings: tuple[Scaling, Scaling],
) -> ActivationCodes:
    """The gradient of :func:`~backstash.kernels.activate` both ways, and the columns of it again.

    ``scalings`` are those of the gradient and of the activation.  Codes and scales of rows in
    the tail may be anything; their routing weights' gradients are zeros.
    """
    given = da_TI, h_TF, prob_T
    steps = activate_backward, quantize_float8_rows_and_turned, quantize_float8_turned
    return backward_in_steps(given, activation, ends_G, scalings, steps)


def backward_in_steps(
    given: tuple[Tensor, Tensor, Tensor | None],
    activation: str,
    ends_G: Tensor,
    scalings: tuple[Scaling, Scaling],
    steps: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]],
) -> ActivationCodes:
    """One operation after the other, through memory.

    ``given`` are the first three arguments of :func:`activate_backward_float8`, ``steps`` the
    three operations that it is made of.
    """
    (da_TI, h_TF, prob_T), (of_dh, of_a) = given, scalings
    backward, rows_and_turned, turned = steps
    a_TI = torch.empty_like(da_TI)
    into = ActivationGradients(
        torch.empty_like(h_TF), None if prob_T is None else torch.empty_like(prob_T), a_TI
    )
    dh_TF, dprob_T = backward(da_TI, h_TF, prob_T, activation, into, ends_G)
    dh_rows, dh_turned = rows_and_turned(dh_TF, of_dh.code_dtype, ends_G, **of_dh.options)
    a_turned = turned(a_TI, of_a.code_dtype, ends_G, **of_a.options)
    return ActivationCodes(dh_rows, dh_turned, a_turned, dprob_T)
