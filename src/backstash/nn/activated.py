"""An activation and its gradient as products read them, without values where nobody reads those.

Under a recipe with a float8 scale for each row or column the second matmul reads codes of the
activation's rows, and in backward three products read codes of the activation's columns and of
the gradient both ways.  They are made where the activation is computed, bit for bit those of
its values, which stay in registers.

Letters: T rows, F columns of the pre-activation, I columns of the activation, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from backstash import kernels
from backstash.formats import Float8Rowwise, Usage
from backstash.kernels import Slabs
from backstash.nn.call import Call
from backstash.nn.operands import Columns
from backstash.recipes import Operand, Phase
from backstash.tensors import QuantizedTensor


def activated_rows(
    call: Call, h_TF: Tensor | Slabs, prob_T: Tensor | None, activation: str, ends_G: Tensor | None
) -> Tensor:
    """The activation ``(T, I)`` as the matmul over its columns, ``call``, reads it."""
    format = call.format(Operand.INPUT, Phase.FORWARD)
    if isinstance(h_TF, Slabs):
        a_TI = kernels.activate_slabs(h_TF, prob_T, activation)
        return call.rows(Operand.INPUT, a_TI, ends_G)
    if not isinstance(format, Float8Rowwise):
        a_TI = kernels.activate(h_TF, prob_T, activation, ends_G)
        return call.rows(Operand.INPUT, a_TI, ends_G)
    given = h_TF, prob_T, activation
    codes, scale_inv = kernels.activate_float8(*given, scaling_of(format), ends_G)
    return QuantizedTensor(
        {"row_codes": codes, "row_scale_inv": scale_inv},
        format=format,
        usage=Usage.ROWWISE,
        shape=codes.shape,
        dtype=h_TF.dtype,
        ends_G=ends_G,
    )


def scaling_of(format: Float8Rowwise) -> kernels.Scaling:
    """What the kernels need to know of a format."""
    return kernels.Scaling(format.code.dtype, format.epsilon, format.power_of_two)


class BothWays(NamedTuple):
    """A gradient as both products of a projection read it, and no values of it."""

    rows: QuantizedTensor
    columns: Columns


class ActivatedCodes(NamedTuple):
    """What backward through an activation gives where only codes are read.

    Attributes:
        dh: The gradient of the pre-activation.
        dprob_T: That of the routing weights, if there are any.
        a: The columns of the activation.
    """

    dh: BothWays
    dprob_T: Tensor | None
    a: Columns


def gradient_codes(
    da_TI: Tensor,
    h_TF: Tensor,
    prob_T: Tensor | None,
    activation: str,
    ends_G: Tensor,
    formats: tuple[Float8Rowwise, Float8Rowwise],
) -> ActivatedCodes:
    """Codes of the pre-activation's gradient and of the activation's columns, turned.

    ``formats`` are those of the gradient and of the activation.
    """
    of_dh, of_a = formats
    scalings = scaling_of(of_dh), scaling_of(of_a)
    codes = kernels.activate_backward_float8(da_TI, h_TF, prob_T, activation, ends_G, scalings)
    row_codes, row_scale_inv = codes.dh_rows
    rows = QuantizedTensor(
        {"row_codes": row_codes, "row_scale_inv": row_scale_inv},
        format=of_dh,
        usage=Usage.ROWWISE,
        shape=h_TF.shape,
        dtype=h_TF.dtype,
        ends_G=ends_G,
    )
    columns = Columns(None, of_dh, ends_G, h_TF.shape, ready=codes.dh_turned)
    a = Columns(None, of_a, ends_G, da_TI.shape, ready=codes.a_turned)
    return ActivatedCodes(BothWays(rows, columns), codes.dprob_T, a)
