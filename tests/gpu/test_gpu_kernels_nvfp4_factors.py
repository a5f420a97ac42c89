"""NVFP4's factors over all blocks on a GPU, bit for bit what a division gives."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from backstash.kernels.nvfp4_factors import factors_of_two
from backstash.kernels.reference.cast import FLOAT32_MAX

pytestmark = pytest.mark.gpu


@triton.jit
def _kernel(p_amax, p_found, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    factors, inverses = factors_of_two(tl.load(p_amax + i), tl.load(p_amax + (i ^ 1)))
    tl.store(p_found + i * 4, factors[0])
    tl.store(p_found + i * 4 + 1, inverses[0])
    tl.store(p_found + i * 4 + 2, factors[1])
    tl.store(p_found + i * 4 + 3, inverses[1])


def check(amax_N):
    """Each magnitude beside its neighbour."""
    assert len(amax_N) % 1024 == 0
    found_N4 = torch.full((len(amax_N), 4), float("nan"), device="cuda")
    _kernel[(len(amax_N) // 1024,)](amax_N.cuda(), found_N4, N=1024)  # pyright: ignore[reportArgumentType]
    factor_N = (torch.full_like(amax_N, 448.0 * 6.0) / amax_N).clamp(max=FLOAT32_MAX)
    factor_N = torch.where((amax_N == 0) | (factor_N == 0), 1.0, factor_N)
    wanted_N2 = torch.stack([factor_N, torch.ones_like(factor_N) / factor_N], dim=1)
    beside_N2 = wanted_N2.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    wanted_N4 = torch.cat([wanted_N2, beside_N2], dim=1)
    assert torch.equal(found_N4.cpu().view(torch.int32), wanted_N4.view(torch.int32))


def test_every_bfloat16_has_the_factor_of_a_division():
    check(
        (torch.arange(0x7F80 + 0x80, dtype=torch.int32).clamp(max=0x7F80) << 16).view(torch.float32)
    )


def test_any_float_has_the_factor_of_a_division():
    check(torch.randint(0, 0x7F800000, (2**22,), dtype=torch.int32).view(torch.float32))
    check((0x3F800000 + torch.arange(2**23, dtype=torch.int32)).view(torch.float32))
