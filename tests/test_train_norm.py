"""``RMSNorm`` agrees with torch's and keeps its input and one number a row."""

from __future__ import annotations

import pytest
import torch

from backstash.saving import Meter, saving
from backstash.train.norm import RMSNorm


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (1, 1, 8)], ids=str)
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    ours, theirs = RMSNorm(8, dtype=torch.float64), torch.nn.RMSNorm(8, 1e-5, dtype=torch.float64)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(8))
        theirs.weight.copy_(ours.weight)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    y, wanted = ours(x), theirs(z)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_what_is_kept_is_the_input_and_a_number_a_row() -> None:
    norm, meter = RMSNorm(8), Meter()
    x = torch.randn(2, 3, 8, requires_grad=True)
    with saving(meter):
        norm(x)
    assert meter.bytes == 2 * 3 * 8 * 4 + 2 * 3 * 4
