"""Transposed codes on a GPU are the reference's bytes."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (33, 65), (128, 256), (300, 1000), (0, 7), (3, 130, 70), (128, 63, 16), (2, 0, 4)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


@by_shape
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float8_e4m3fn, torch.float4_e2m1fn_x2], ids=str
)
def test_turned_codes_are_the_references(shape, dtype):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    with no_host_reads():
        turned = kernels.transpose_codes(codes.cuda(non_blocking=True).view(dtype))
    assert turned.dtype is dtype
    wanted = kernels.transpose_codes(codes.view(dtype))
    assert_twin_bytes(turned.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float4_e2m1fn_x2], ids=str)
def test_any_strides_give_the_same(dtype):
    codes = torch.randint(0, 256, (6, 80, 100), dtype=torch.uint8).cuda()
    for view in (codes[:, ::2], codes[:, :, ::3], codes.mT, codes[::2, 1:, 1:], codes[0].mT):
        got = kernels.transpose_codes(view.view(dtype))
        wanted = kernels.transpose_codes(view.cpu().view(dtype))
        assert_twin_bytes(got.view(torch.uint8), wanted.view(torch.uint8))
