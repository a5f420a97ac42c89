"""Scales of a gradient that nobody has written are those of the gradient."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.kernels import ActivationGradients, Scaling

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn
# Sums over so few columns have another order; their bits are not compared.
ANOTHER_ORDER = 64


@pytest.mark.parametrize("columns", [32, 512])
def test_scales_are_those_of_the_largest_magnitudes(columns: int) -> None:
    from backstash.kernels.activation_magnitudes import gradient_scales
    from backstash.kernels.float8_turned import prepare

    rows, ends = 400, [0, 129, 140, 400]
    new = {"device": "cuda", "dtype": torch.bfloat16}
    da, h = torch.randn(rows, columns, **new), torch.randn(rows, 2 * columns, **new)
    prob, dprob = torch.rand(2, rows, device="cuda")
    into = ActivationGradients(torch.empty_like(h), torch.empty_like(prob), torch.empty_like(da))
    kernels.activate_backward(da, h, prob, "swiglu", into)
    ends_G = torch.tensor(ends, device="cuda", dtype=torch.int32)
    groups = ends_G, prepare(ends_G, rows, 0)
    scaling = Scaling(E4M3)
    scales = gradient_scales(da, h, (prob, dprob), "swiglu", groups, (scaling, scaling))
    assert into.a_TI is not None
    for found, x in (
        (scales.rows, into.dh_TF.abs().amax(1)),
        (scales.dh, of_groups(into.dh_TF, ends)),
        (scales.a, of_groups(into.a_TI, ends)),
    ):
        wanted = kernels.scale_from_amax(x.float(), largest=448.0)
        assert torch.equal(found[0], wanted)
        assert torch.equal(found[1], torch.ones_like(wanted) / wanted)
    assert into.dprob_T is not None
    if columns > ANOTHER_ORDER:
        assert torch.equal(dprob, into.dprob_T)
    torch.testing.assert_close(dprob, into.dprob_T)


def of_groups(x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """The largest magnitudes of each group's columns, zeros for an empty group."""
    parts = [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return torch.stack([p.abs().amax(0) if len(p) else p.new_zeros(x.shape[1]) for p in parts])
