"""What arrives is, bit for bit, the whole weight as the format keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstash.errors import RecipeError
from backstash.formats import (
    FLOAT8_BLOCK,
    FLOAT8_CURRENT,
    FLOAT8_DELAYED,
    FLOAT8_ROWWISE,
    HIGH_PRECISION,
    MXFP8,
    NVFP4,
    Code,
    Format,
    Hybrid,
    Usage,
)
from backstash.tensors import GroupedTensor, QuantizedTensor
from backstash.weights.layout import Layout, Split
from backstash.weights.travel import Travel
from weight_channels import buffers_of, gathered

FORMATS = {
    "high_precision": HIGH_PRECISION,
    "float8_current": FLOAT8_CURRENT,
    "float8_current exact": replace(FLOAT8_CURRENT, power_of_two=True, epsilon=0.5),
    "float8_rowwise": replace(FLOAT8_ROWWISE, code=Code.E5M2),
    "float8_block lines": FLOAT8_BLOCK,
    "float8_block tiles": replace(FLOAT8_BLOCK, two_d=True, power_of_two=False),
    "mxfp8": MXFP8,
    "mxfp8 tiles": replace(MXFP8, two_d=True),
    "nvfp4": NVFP4,
    "nvfp4 tiles": replace(NVFP4, two_d=True, four_over_six=True),
    "nvfp4 hadamard": replace(NVFP4, hadamard=True),
    "nvfp4 row-scaled": replace(NVFP4, row_scaled=True),
    "nvfp4 both": replace(NVFP4, row_scaled=True, hadamard=True),
    "hybrid": Hybrid(rows=NVFP4, columns=MXFP8),
}
SHAPES = [(5, 40), (300, 6), (130, 33), (3, 40, 7), (4, 64, 5), (2, 1, 3), (2, 261, 2)]
USAGES = [Usage.ROWWISE, Usage.COLUMNWISE]


def quantized_whole(format: Format, full: torch.Tensor, usage: Usage) -> torch.Tensor:
    if format is HIGH_PRECISION:
        return full
    if full.ndim == 2:
        return format.quantize(full, usage)
    G, N, K = full.shape
    grouped = GroupedTensor.from_counts(full.reshape(G * N, K), [N] * G)
    return format.quantize(grouped, usage).data


@pytest.mark.parametrize("usage", USAGES, ids=lambda usage: usage.name)
@pytest.mark.parametrize("split", [Split.EXPERTS, Split.ROWS], ids=lambda split: split.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_the_gathered_weight_has_the_bytes_of_the_quantized_weight(
    format: Format, shape: tuple[int, ...], split: Split, usage: Usage
) -> None:
    full = torch.randn(shape, dtype=torch.bfloat16) * 3
    full[0, :1] = 1000
    way = Travel(format, usage)
    wanted = quantized_whole(way.format, full, usage)
    for ranks in (1, 2, 3, 4):
        layout = Layout.even(full.shape, ranks, split=split, block=way.block)
        came = gathered(way, full, layout, ranks)
        assert (came.shape, came.dtype) == (full.shape, full.dtype)
        assert buffers_of(came).keys() == buffers_of(wanted).keys()
        for name, buffer in buffers_of(came).items():
            assert torch.equal(buffer, buffers_of(wanted)[name]), name
        if isinstance(came, QuantizedTensor):
            assert isinstance(wanted, QuantizedTensor)
            assert torch.equal(came.dequantize(usage), wanted.dequantize(usage).view(full.shape))


@pytest.mark.parametrize("usage", USAGES, ids=lambda usage: usage.name)
def test_only_the_direction_that_is_read_travels(usage: Usage) -> None:
    full = torch.randn(64, 32)
    layout = Layout.even(full.shape, 2, block=32)
    came = gathered(Travel(MXFP8, usage), full, layout, 2)
    assert came.usage is usage
    assert came.nbytes == 64 * 32 + 64 * 32 // 32


def test_a_block_that_is_cut_in_two_would_be_quantized_wrong() -> None:
    # What the cuts on multiples of a block are for: without them these bytes differ.
    full = torch.randn(64, 4)
    full[40] = 1000
    even = Layout.even(full.shape, 4, block=1)
    assert even.counts == (16, 16, 16, 16)
    way = Travel(MXFP8, Usage.COLUMNWISE)
    came = gathered(way, full, Layout.even(full.shape, 4, block=way.block), 4)
    assert torch.equal(came.column_codes, MXFP8.quantize(full, USAGES[1]).column_codes)
    cut = torch.cat([MXFP8.quantize(part, USAGES[1]).column_codes for part in full.chunk(4)])
    assert not torch.equal(cut, came.column_codes)


def test_rows_that_share_no_scale_may_be_cut_anywhere() -> None:
    blocks = {name: Travel(f, Usage.ROWWISE).block for name, f in FORMATS.items()}
    assert {name for name, block in blocks.items() if block > 1} == {
        "float8_block tiles",
        "mxfp8 tiles",
        "nvfp4 tiles",
    }


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        (FLOAT8_DELAYED, "its scale belongs to the layer"),
        (replace(NVFP4, stochastic_rounding=True), "round at random"),
    ],
    ids=["learnt scale", "random rounding"],
)
def test_what_ranks_cannot_make_each_on_its_own_is_refused(format: Format, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Travel(format, Usage.ROWWISE)
