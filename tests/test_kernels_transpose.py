"""Codes the other way round are a transpose of bytes, in memory of their own."""

import pytest
import torch

from backstash import kernels
from backstash.errors import ShapeError

SHAPES = [(1, 1), (3, 5), (64, 96), (0, 7), (7, 0), (2, 3, 5), (4, 1, 33), (0, 3, 4), (3, 0, 4)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


@by_shape
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_each_code_is_where_row_and_column_have_changed_places(shape, dtype):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    turned = kernels.transpose_codes(codes.view(dtype))
    assert turned.dtype is dtype
    assert turned.is_contiguous()
    assert turned.data_ptr() != codes.data_ptr() or not codes.numel()
    for at in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        assert turned.view(torch.uint8)[(*at[:-2], at[-1], at[-2])] == codes[tuple(at)]


def test_any_strides_give_the_same():
    codes = torch.randint(0, 256, (6, 8, 10), dtype=torch.uint8)
    for view in (codes[:, ::2], codes[:, :, ::3], codes.mT, codes[::2, 1:, 1:]):
        assert torch.equal(kernels.transpose_codes(view), kernels.transpose_codes(view.clone()))


def nibbles(pairs):
    """The codes of pairs, one a value, the even column in the low half of its byte."""
    return torch.stack([pairs % 16, pairs // 16], dim=-1).flatten(-2)


@by_shape
def test_pairs_are_turned_code_by_code(shape):
    pairs = torch.randint(0, 256, shape, dtype=torch.uint8)
    turned = kernels.transpose_codes(pairs.view(torch.float4_e2m1fn_x2))
    assert turned.dtype is torch.float4_e2m1fn_x2
    assert turned.is_contiguous()
    rows = shape[-2]
    assert turned.shape == (*shape[:-2], 2 * shape[-1], (rows + 1) // 2)
    got = nibbles(turned.view(torch.uint8))
    assert torch.equal(got[..., :rows], nibbles(pairs).mT)
    assert not got[..., rows:].any()


def test_turned_tiles_of_nvfp4_are_those_of_the_turned_weight():
    w = torch.randn(32, 48)
    amax = kernels.amax(w)
    codes, scales = kernels.quantize_nvfp4_tiles(w, amax, None)
    turned, turned_scales = kernels.quantize_nvfp4_tiles(w.t().contiguous(), amax, None)
    got = kernels.transpose_codes(codes.view(torch.float4_e2m1fn_x2))
    assert torch.equal(got.view(torch.uint8), turned)
    assert torch.equal(scales.view(torch.uint8).t(), turned_scales.view(torch.uint8))


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(4, dtype=torch.uint8), torch.zeros(2, 2), torch.zeros(1, 1, 1, 1).char()],
    ids=["one-dimension", "float32", "four-dimensions"],
)
def test_what_is_no_matrix_of_codes_is_refused(wrong):
    with pytest.raises(ShapeError, match="one-byte codes"):
        kernels.transpose_codes(wrong)
