"""Codes are laid out with what a product adds up over last, in whole units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import backstash as bs
from backstash.kernels import FLOAT8_UNIT
from backstash.nn import operands, product
from backstash.nn.product import Path
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


def test_a_weight_is_turned_as_groups_of_as_many_rows_are() -> None:
    ends_G = torch.tensor([32, 64, 96], dtype=torch.int32)
    columns = operands.columns_of(bs.FLOAT8_ROWWISE, torch.randn(96, 48), ends_G)
    assert columns is not None
    weight = columns.view(torch.Size((3, 32, 48)))
    codes, scale_inv = operands.grouped_weight(weight, bs.Usage.COLUMNWISE)
    ready = dataclasses.replace(weight, ready=columns.turned())
    turned, wanted = operands.grouped_weight(ready, bs.Usage.COLUMNWISE)
    assert codes.shape == (3, 48, 32)
    assert torch.equal(codes.float(), turned.float())
    assert torch.equal(scale_inv, wanted)


def test_tiles_are_given_as_tiles_and_only_columns_are_rotated() -> None:
    x = torch.randn(32, 32)
    tiles = operands.blocks(bs.MXFP8.__class__(two_d=True).quantize(x), bs.Usage.ROWWISE)
    assert tiles.blocks is operands.Blocks.TILES
    format = bs.NVFP4.__class__(hadamard=True)
    for usage in bs.Usage:
        q = format.quantize(x, usage)
        assert operands.blocks(q, usage).is_rotated == (usage is bs.Usage.COLUMNWISE)


LAYERS: dict[str, Callable[..., Any]] = {
    "GroupedLinear": lambda **options: bs.GroupedLinear(len(COUNTS), 32, 48, **options),
    "GroupedMLP": lambda **options: bs.GroupedMLP(len(COUNTS), 32, 48, **options),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("delay", [False, True], ids=["at-once", "delayed"])
@pytest.mark.parametrize("frozen", ["nothing", "input"])
def test_a_layer_that_reads_turned_codes_has_the_gradients_of_one_that_decodes(
    layer: str, delay: bool, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes are the same, so only the order of sums differs."""
    found = []
    for path in (Path.VALUES, Path.FLOAT8):
        monkeypatch.setattr(product, "choose", lambda matmul, path=path: path)
        torch.manual_seed(1)
        module = LAYERS[layer](delay_wgrad_compute=delay)
        x = torch.randn(40, 32)
        x[sum(COUNTS) :] = float("nan")
        x.requires_grad_(frozen == "nothing")
        with bs.autocast(recipe="float8_rowwise"):
            y = module(x, COUNTS)
        y.backward(torch.randn(y.shape))
        if delay:
            module.backward_dw()
        weights = [parameter.grad for parameter in module.parameters()]
        found.append([y.detach(), *weights, *([x.grad] if x.requires_grad else [])])
    for one, other in zip(*found, strict=True):
        assert one is not None
        few_roundings = 32 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(one, other, rtol=few_roundings, atol=few_roundings)


def test_columns_wait_for_their_product_only_in_groups_of_rows() -> None:
    x, ends_G = torch.randn(37, 32), torch.tensor(COUNTS).cumsum(0).int()
    columns = operands.columns_of(bs.FLOAT8_ROWWISE, x, ends_G)
    assert columns is not None
    quantized = bs.FLOAT8_ROWWISE.quantize(bs.GroupedTensor(x, ends_G), bs.Usage.COLUMNWISE)
    assert torch.equal(columns.quantized(), quantized.data)
    assert operands.columns_of(bs.FLOAT8_ROWWISE, x, None) is None
    assert operands.columns_of(bs.FLOAT8_CURRENT, x, ends_G) is None
