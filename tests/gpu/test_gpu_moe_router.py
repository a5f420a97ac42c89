"""The scores of a bfloat16 router on a GPU, and their gradients, are nearly those of float32."""

import pytest
import torch

from backstash.moe.router import _Logits
from host_reads import no_host_reads

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, EXPERTS = 700, 1024, 48
# Sums in a matrix unit have fewer bits than float32, and hundreds of times more than bfloat16.
LEAST = torch.finfo(torch.bfloat16).eps / 256


def assert_near(found: torch.Tensor, wanted: torch.Tensor, least: float) -> None:
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error <= least, f"{error:.1e}"


@pytest.mark.parametrize("frozen", ["nothing", "input", "weight"])
def test_scores_and_gradients_are_those_of_a_wide_matmul(frozen: str) -> None:
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16().requires_grad_(frozen != "input")
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16()
    weight.requires_grad_(frozen != "weight")
    _Logits.apply(x, weight)  # kernels are loaded
    with no_host_reads():
        logits = _Logits.apply(x, weight)
    wide_x, wide_weight = (
        one.detach().double().requires_grad_(one.requires_grad) for one in (x, weight)
    )
    wanted = wide_x @ wide_weight.t()
    dlogits = torch.randn_like(logits)
    assert logits.dtype is torch.float32
    assert_near(logits, wanted, LEAST)
    logits.backward(dlogits)
    wanted.backward(dlogits.double())
    for found, right in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            # Autograd rounds the gradient to the dtype of its leaf.
            assert_near(found, right, torch.finfo(torch.bfloat16).eps)
