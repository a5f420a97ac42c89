"""What the second matmul reads of an activation is what its values give, quantized."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.formats import FLOAT8_ROWWISE, Code
from backstash.nn.activated import activated_rows, gradient_codes, scaling_of
from backstash.nn.call import Call
from backstash.nn.operands import columns_of, rows_and_columns
from backstash.recipes import Operand, recipe
from backstash.tensors import QuantizedTensor


@pytest.mark.parametrize("name", ["high_precision", "float8_rowwise", "float8_current", "mxfp8"])
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_rows_are_those_of_the_values(name: str, grouped: bool) -> None:
    call = Call(recipe(name), "GroupedMLP", "fc2")
    h, prob = torch.randn(40, 64).bfloat16(), torch.rand(40)
    ends_G = torch.tensor([7, 7, 40], dtype=torch.int32) if grouped else None
    found = activated_rows(call, h, prob, "swiglu", ends_G)
    wanted = call.rows(Operand.INPUT, kernels.activate(h, prob, "swiglu", ends_G), ends_G)
    assert type(found) is type(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if isinstance(found, QuantizedTensor) and isinstance(wanted, QuantizedTensor):
        assert (found.format, found.usage) == (wanted.format, wanted.usage)
        assert found.ends_G is ends_G
        assert found.buffers.keys() == wanted.buffers.keys()
        assert all(torch.equal(b, wanted.buffers[name]) for name, b in found.buffers.items())
    else:
        assert torch.equal(found, wanted)


def test_a_scaling_says_what_the_format_does() -> None:
    format = type(FLOAT8_ROWWISE)(code=Code.E5M2, power_of_two=True, epsilon=0.25)
    assert scaling_of(format) == kernels.Scaling(torch.float8_e5m2, 0.25, True)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_codes_of_a_gradient_are_those_of_its_values(activation: str) -> None:
    columns = 32 * (1 + kernels.ACTIVATIONS[activation])
    da, h, prob = torch.randn(40, 32), torch.randn(40, columns), torch.rand(40)
    ends_G = torch.tensor([7, 7, 33], dtype=torch.int32)
    of_dh, of_a = type(FLOAT8_ROWWISE)(code=Code.E5M2), FLOAT8_ROWWISE
    found = gradient_codes(da, h, prob, activation, ends_G, (of_dh, of_a))
    into = kernels.ActivationGradients(torch.empty_like(h), torch.empty(40), torch.empty(40, 32))
    kernels.activate_backward(da, h, prob, activation, into, ends_G)
    rows, dh_columns = rows_and_columns(of_dh, into.dh_TF, ends_G)
    assert into.a_TI is not None
    a_columns = columns_of(of_a, into.a_TI, ends_G)
    assert a_columns is not None
    assert torch.equal(found.dh.rows.dequantize()[:33], rows.dequantize()[:33])
    for one, other in ((found.dh.columns, dh_columns), (found.a, a_columns)):
        assert (one.shape, one.format) == (other.shape, other.format)
        pairs = zip(one.turned(), other.turned(), strict=True)
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs)
        # A product that decodes reads them in the matrix's own order.
        assert torch.equal(one.quantized().dequantize()[:33], other.quantized().dequantize()[:33])
    assert found.dprob_T is not None
    assert into.dprob_T is not None
    assert torch.equal(found.dprob_T, into.dprob_T)
