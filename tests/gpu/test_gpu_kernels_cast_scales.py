"""Scales that kernels compute are those of the reference's division, around every power of two."""

import pytest
import torch

from backstash import kernels
from definitions import FLOAT32_MAX
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu


def magnitudes():
    """Bits on and next to each power of two and each 1.75 of one, and a million at random."""
    exponents = torch.arange(255, dtype=torch.int32) << 23
    near = torch.arange(-2, 3, dtype=torch.int32)
    edges = [(exponents + offset)[:, None] + near for offset in (0, 0x600000, 0x7FFFFF)]
    bits = torch.cat([*(edge.flatten() for edge in edges), torch.randint(0, 0x7F800000, (10**6,))])
    return bits.clamp(min=0).int().view(torch.float32)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power-of-two"])
@pytest.mark.parametrize("largest", [448.0, 57344.0, 6.0])
def test_every_scale_is_the_references(largest, power_of_two):
    amax = magnitudes()
    for value_for_inf in (FLOAT32_MAX, torch.finfo(torch.bfloat16).max, 65504.0):
        for epsilon in (0.0, 1e-3):
            options = {"largest": largest, "power_of_two": power_of_two, "epsilon": epsilon}
            wanted = kernels.scale_from_amax(amax, value_for_inf=value_for_inf, **options)
            got = kernels.scale_from_amax(amax.cuda(), value_for_inf=value_for_inf, **options)
            assert_twin_bytes(got, wanted)


def test_inverses_are_those_of_the_division():
    x = magnitudes()[:, None].expand(-1, 2).contiguous()
    for power_of_two in (False, True):
        wanted = kernels.quantize_block_rows(x, torch.float8_e4m3fn, power_of_two=power_of_two)
        got = kernels.quantize_block_rows(x.cuda(), torch.float8_e4m3fn, power_of_two=power_of_two)
        assert_twin_bytes(got[1], wanted[1])
