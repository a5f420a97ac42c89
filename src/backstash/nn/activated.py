"""An activation as the products after it read it, without its values where nobody reads those.

Under a recipe with a float8 scale for each row or column the second matmul reads codes of the
activation's rows.  They are made in the pass that computes the activation, bit for bit those of
its values, which stay in registers.

Letters: T rows, F columns of the pre-activation, I columns of the activation, G groups.
"""

from __future__ import annotations

from torch import Tensor

from backstash import kernels
from backstash.formats import Float8Rowwise, Usage
from backstash.nn.call import Call
from backstash.recipes import Operand, Phase
from backstash.tensors import QuantizedTensor


def activated_rows(
    call: Call, h_TF: Tensor, prob_T: Tensor | None, activation: str, ends_G: Tensor | None
) -> Tensor:
    """The activation ``(T, I)`` as the matmul over its columns, ``call``, reads it."""
    format = call.format(Operand.INPUT, Phase.FORWARD)
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
