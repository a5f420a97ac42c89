"""Compression is asked for, is lossy as its format says, and leaves codes alone."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from backstash.errors import ConfigError
from backstash.stash import PagePool, Stash
from backstash.stash.packing import packed_as
from stash_cases import (
    BALANCED,
    CAPACITY,
    PAGE,
    WIDTH,
    Experts,
    assert_nothing_is_held,
    pool,
    scale,
    stash,
    step,
)


def test_what_backward_gets_is_the_value_in_mxfp8() -> None:
    kept = stash(compress=bs.MXFP8)
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(kept):
        y = scale(x, 9, 0.0)
    assert kept.stats().bytes_stashed == 9 * WIDTH * 4
    # 32 codes and an exponent a row, seven of them to a page of 256 bytes, four at a time.
    assert kept.stats().device_used == 3
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:9], bs.MXFP8.quantize(x.detach()[:9]).dequantize())
    assert (x.grad[9:] == 0).all()
    del y
    assert_nothing_is_held(kept)


def test_it_does_not_matter_whether_the_original_is_still_there() -> None:
    kept = stash(compress=bs.MXFP8)
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(kept):
        y = scale(x, 9, 0.0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert kept.stats().untouched == 0
    assert torch.equal(gradient[:9], bs.MXFP8.quantize(x.detach()[:9]).dequantize())


def test_gradients_of_experts_are_close_and_pages_few() -> None:
    experts, exact, lossy = Experts(3), stash(), stash(compress=bs.MXFP8)
    parameters = list(experts.parameters())
    expected = step(experts, parameters, BALANCED, exact)
    found = step(experts, parameters, BALANCED, lossy)
    assert torch.equal(found.loss, expected.loss)
    rtol, _ = bs.MXFP8.tolerance
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert (one - other).norm() <= 2 * rtol * other.norm()
    assert lossy.stats().device_high <= exact.stats().device_high / 2
    assert_nothing_is_held(lossy)


def test_codes_are_never_compressed_again() -> None:
    experts = Experts(2)
    parameters = list(experts.parameters())

    def quantized(x: torch.Tensor, counts: object) -> torch.Tensor:
        with bs.autocast(recipe=bs.recipe("mxfp8", preactivation=bs.MXFP8)):
            return experts(x)

    lossy = stash(compress=bs.MXFP8)
    step(quantized, parameters, BALANCED, lossy).assert_equal(step(quantized, parameters))
    assert_nothing_is_held(lossy)


def test_only_floating_values_of_up_to_four_bytes_are_compressed() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert packed_as(dtype, bs.MXFP8) is dtype
        assert packed_as(dtype, None) is torch.uint8
    for dtype in (torch.uint8, torch.int64, torch.float64, torch.bool, torch.complex64):
        assert packed_as(dtype, bs.MXFP8) is torch.uint8


def test_other_formats_and_pages_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match="MXFP8 or not at all, got float8_current"):
        Stash(pool(), compress=bs.FLOAT8_CURRENT)
    with pytest.raises(ConfigError, match="pages of 64 bytes or more, got 32"):
        Stash(PagePool(0, device="cpu", page_bytes=32), compress=bs.MXFP8)
    assert PAGE >= 64
