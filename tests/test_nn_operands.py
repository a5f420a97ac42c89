"""Codes are laid out with what a product adds up over last, in whole units."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from backstash.kernels import FLOAT8_UNIT
from backstash.nn import operands
from product_cases import COUNTS
from product_cases import operands as operands_of

SCALED = [bs.FLOAT8_CURRENT, bs.FLOAT8_DELAYED, bs.FLOAT8_ROWWISE]
by_scaled = pytest.mark.parametrize("format", SCALED, ids=lambda format: format.name)


@by_scaled
@pytest.mark.parametrize("rows", [16, 37])
def test_columns_become_rows_of_whole_units(format: bs.Format, rows: int) -> None:
    x = torch.randn(rows, 32)
    q = format.quantize(x, bs.Usage.COLUMNWISE)
    codes, scale_inv = operands.turned(q)
    assert codes.shape == (32, -(-rows // FLOAT8_UNIT) * FLOAT8_UNIT)
    values = codes.float() * scale_inv
    assert torch.equal(values[:, :rows], q.dequantize().t())
    assert not values[:, rows:].any()


@by_scaled
def test_each_row_of_a_group_has_a_scale(format: bs.Format) -> None:
    ops = operands_of(format, torch.float32, COUNTS)
    assert ops.ends_G is not None
    codes, scale_T = operands.grouped_rows(ops.quantized[0], ops.ends_G)
    rows = sum(COUNTS)
    assert scale_T.shape == codes.shape[:1]
    values = codes[:rows].float() * scale_T[:rows].unsqueeze(1)
    assert torch.equal(values, ops.quantized[0].dequantize()[:rows])


@by_scaled
def test_each_row_of_a_weight_has_a_scale(format: bs.Format) -> None:
    ops = operands_of(format, torch.float32, COUNTS)
    for q, usage in ((ops.quantized[1], bs.Usage.ROWWISE), (ops.quantized[3], bs.Usage.COLUMNWISE)):
        codes, scale_inv = operands.grouped_weight(q, usage)
        assert codes.is_contiguous()
        assert scale_inv.is_contiguous()
        values = codes.float() * scale_inv.unsqueeze(2)
        wanted = q.dequantize()
        assert torch.equal(values, wanted if usage is bs.Usage.ROWWISE else wanted.mT)


def test_tiles_are_given_as_tiles_and_only_columns_are_rotated() -> None:
    x = torch.randn(32, 32)
    tiles = operands.blocks(bs.MXFP8.__class__(two_d=True).quantize(x), bs.Usage.ROWWISE)
    assert tiles.blocks is operands.Blocks.TILES
    format = bs.NVFP4.__class__(hadamard=True)
    for usage in bs.Usage:
        q = format.quantize(x, usage)
        assert operands.blocks(q, usage).is_rotated == (usage is bs.Usage.COLUMNWISE)
