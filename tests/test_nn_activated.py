"""What the second matmul reads of an activation is what its values give, quantized."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.formats import FLOAT8_ROWWISE, Code
from backstash.nn.activated import activated_rows, scaling_of
from backstash.nn.call import Call
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
