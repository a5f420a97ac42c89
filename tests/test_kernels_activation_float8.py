"""Codes of an activation are those of its values, quantized one operation after another."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.kernels import ActivationGradients, Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
by_activation = pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
by_weight = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


@by_activation
@by_weight
def test_rows_of_the_activation_are_its_values_quantized(activation: str, weighted: bool) -> None:
    h = torch.randn(9, 24).bfloat16()
    prob = torch.rand(9) if weighted else None
    scaling = Scaling(E4M3, epsilon=1.0, power_of_two=True)
    codes, scale_inv = kernels.activate_float8(h, prob, activation, scaling)
    a = kernels.activate(h, prob, activation)
    wanted = kernels.quantize_float8_rows(a, E4M3, epsilon=1.0, power_of_two=True)
    assert torch.equal(codes, wanted[0])
    assert torch.equal(scale_inv, wanted[1])


@by_activation
@by_weight
def test_the_gradients_codes_are_its_values_quantized(activation: str, weighted: bool) -> None:
    gated = kernels.ACTIVATIONS[activation]
    h, da = torch.randn(40, 16 * (1 + gated)).bfloat16(), torch.randn(40, 16).bfloat16()
    prob = torch.rand(40) if weighted else None
    ends_G = torch.tensor([5, 5, 36])
    scalings = Scaling(E5M2, power_of_two=True), Scaling(E4M3, epsilon=1.0)
    found = kernels.activate_backward_float8(da, h, prob, activation, ends_G, scalings)
    into = ActivationGradients(
        torch.empty_like(h), torch.empty(40) if weighted else None, torch.empty_like(da)
    )
    kernels.activate_backward(da, h, prob, activation, into, ends_G)
    rows, turned = kernels.quantize_float8_rows_and_turned(
        into.dh_TF, E5M2, ends_G, power_of_two=True
    )
    assert into.a_TI is not None
    a_turned = kernels.quantize_float8_turned(into.a_TI, E4M3, ends_G, epsilon=1.0)
    pairs = zip(
        (*valid(found.dh_rows), *found.dh_turned, *found.a_turned),
        (*valid(rows), *turned, *a_turned),
        strict=True,
    )
    assert all(torch.equal(one.float(), other.float()) for one, other in pairs)
    assert (found.dprob_T is None) == (not weighted)
    if found.dprob_T is not None and into.dprob_T is not None:
        assert torch.equal(found.dprob_T, into.dprob_T)


def valid(rows: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [part[:36] for part in rows]
