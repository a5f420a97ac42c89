"""Values go into pages as MXFP8 and come back as that format says, and no page is lost."""

from __future__ import annotations

import pytest
import torch

from backstash.formats import MXFP8
from backstash.kernels.reference import mx_pages as reference
from backstash.kernels.reference.pages import PoolState
from pages_cases import Pool

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("page", [64, 256, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 11, 12, 13, -1])
def test_the_valid_values_come_back_as_the_format_rounds_them(
    rows: int, dtype: torch.dtype, page: int
) -> None:
    pool = Pool(200, 0, page)
    x = (torch.randn(12, 64) * torch.randn(12, 1).exp()).to(dtype)
    held = pool.stash([x.view(-1)], [torch.tensor([rows])], [64])
    valid = min(max(rows, 0), 12)
    expected = MXFP8.quantize(x[:valid]).dequantize() if valid else x[:0]
    (restored,) = pool.restore(held)
    assert torch.equal(restored[: valid * 64].view(-1, 64), expected)
    assert (restored[valid * 64 :] == 0xAB).all()
    assert pool.counter(PoolState.BYTES_STASHED) == valid * 64 * x.itemsize
    pages = -(-valid * 64 // reference.mx_page_values(page))
    assert int(held.table[0]) == pages
    pool.release(held)
    assert sorted(pool.free_pages()[0]) == list(range(200))


def test_a_page_holds_whole_blocks_with_their_exponents() -> None:
    for page in (64, 128, 4096, 65536):
        blocks, at_once = reference.mx_page_blocks(page)
        assert blocks % at_once == 0
        assert blocks * 33 <= page
    assert reference.mx_page_values(32) == 0
    assert reference.mx_page_values(65536) == 1984 * 32


def test_values_lie_on_both_tiers_and_a_shortage_leaves_zeros() -> None:
    pool = Pool(1, 5, 64)
    x = torch.randn(6 * 32)
    held = pool.stash([x], [torch.tensor([5])], [32])
    assert held.table[:3].tolist() == [1, 4, 0]
    (restored,) = pool.restore(held)
    expected = MXFP8.quantize(x.view(6, 32)[:5]).dequantize()
    assert torch.equal(restored[: 5 * 32].view(5, 32), expected)
    short = pool.stash([x], [torch.tensor([2])], [32])
    assert short.table[:3].tolist() == [0, 0, 2]
    assert (pool.restore(short)[0][:64] == 0).all()
    assert pool.counter(PoolState.SHORTAGE) == 1


def test_nothing_but_the_valid_values_is_read() -> None:
    x = torch.randn(4 * 48)
    x[2 * 48 :] = torch.nan
    pool = Pool(20, 0, 64)
    (restored,) = pool.restore(pool.stash([x], [torch.tensor([2])], [48]))
    assert restored[: 2 * 48].isfinite().all()


def test_the_launch_takes_several_buffers_of_several_dtypes() -> None:
    pool = Pool(100, 0, 128)
    xs = [torch.randn(7 * 33).to(dtype) for dtype in DTYPES]
    held = pool.stash(xs, [torch.tensor([3 + i]) for i in range(3)], [33] * 3)
    for i, restored in zip((2, 0), pool.restore(held, [2, 0]), strict=True):
        count = (3 + i) * 33
        padded = torch.zeros(-(-count // 32) * 32, dtype=xs[i].dtype)
        padded[:count] = xs[i][:count]
        expected = MXFP8.quantize(padded.view(-1, 32)).dequantize().view(-1)[:count]
        assert torch.equal(restored[:count], expected)
