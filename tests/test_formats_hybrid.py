"""A hybrid is its two formats, each in its own direction."""

import dataclasses
import pickle

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
    Hybrid,
    Usage,
    from_spec,
)
from backstash.tensors import GroupedTensor
from quantizer_cases import by_counts, by_shape, grouped_values, values

PAIRS = {
    "mxfp8-nvfp4": (MXFP8, dataclasses.replace(NVFP4, hadamard=True)),
    "nvfp4-high-precision": (NVFP4, HIGH_PRECISION),
    "current-rowwise": (FLOAT8_CURRENT, dataclasses.replace(FLOAT8_ROWWISE, code=Code.E5M2)),
    "block-block": (dataclasses.replace(FLOAT8_BLOCK, two_d=True), FLOAT8_BLOCK),
}
by_pair = pytest.mark.parametrize(("rows", "columns"), PAIRS.values(), ids=PAIRS.keys())


@by_pair
@by_shape
def test_each_direction_is_that_of_its_format(rows, columns, shape):
    x, hybrid = values(shape), Hybrid(rows=rows, columns=columns)
    q = hybrid.quantize(x, Usage.BOTH)
    for usage, own in ((Usage.ROWWISE, rows), (Usage.COLUMNWISE, columns)):
        wanted = own.quantize(x, usage).dequantize(usage)
        assert torch.equal(q.dequantize(usage), wanted)
        assert torch.equal(q.only(usage).dequantize(), wanted)
        assert torch.equal(hybrid.quantize(x, usage).dequantize(), wanted)
    assert q.nbytes == hybrid.saved_bytes(q.shape[:-1].numel(), shape[-1], x.dtype, Usage.BOTH)


@by_pair
@by_counts
def test_groups_are_those_of_its_formats(rows, columns, counts):
    x, ends = grouped_values(counts, 33)
    q = Hybrid(rows=rows, columns=columns).quantize(GroupedTensor(x, ends), Usage.BOTH).data
    valid = slice(0, sum(counts))
    for usage, own in ((Usage.ROWWISE, rows), (Usage.COLUMNWISE, columns)):
        wanted = own.quantize(GroupedTensor(x, ends), usage).data
        assert torch.equal(q.dequantize(usage)[valid], wanted.dequantize(usage)[valid])
        prefix = "rows_" if usage is Usage.ROWWISE else "columns_"
        for name in wanted.buffers:
            found = q.format.valid_rows(prefix + name, q.ends_G, len(x))
            own_rows = own.valid_rows(name, q.ends_G, len(x))
            assert (found is None) == (own_rows is None)
            assert found is None or torch.equal(found, own_rows)


@by_pair
def test_it_is_a_value_that_files_can_hold(rows, columns):
    hybrid = Hybrid(rows=rows, columns=columns)
    assert from_spec(hybrid.spec()) == hybrid
    assert hash(hybrid) == hash(Hybrid(rows=rows, columns=columns))
    q = hybrid.quantize(values((33, 65)), Usage.BOTH)
    again = pickle.loads(pickle.dumps(q))
    assert torch.equal(again, q)


def test_its_tolerance_is_the_wider_one():
    assert Hybrid(rows=MXFP8, columns=NVFP4).tolerance == NVFP4.tolerance
    assert Hybrid(rows=NVFP4, columns=HIGH_PRECISION).tolerance == NVFP4.tolerance


@pytest.mark.parametrize("wrong", [FLOAT8_DELAYED, Hybrid(rows=MXFP8, columns=NVFP4), "mxfp8"])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_what_no_direction_can_have_is_refused(side, wrong):
    with pytest.raises(RecipeError, match=f"the {side} of a hybrid must be a format that is no"):
        Hybrid(**{"rows": MXFP8, "columns": MXFP8, side: wrong})
