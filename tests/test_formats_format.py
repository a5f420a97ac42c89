"""What every format promises: bytes by a formula, a description as plain values, its errors."""

import dataclasses

import pytest
import torch

from backstash.errors import CheckpointError, DtypeError, LayoutError, RecipeError, ShapeError
from backstash.formats import (
    FLOAT8_CURRENT,
    FLOAT8_DELAYED,
    HIGH_PRECISION,
    MXFP8,
    BufferSpec,
    Code,
    Usage,
    from_spec,
)
from backstash.tensors import GroupedTensor
from format_cases import by_format, by_usage, pointers, quantized
from quantizer_cases import by_counts, by_dtype, by_shape, grouped_values, values


def specs_of(q):
    return {name: BufferSpec(tuple(b.shape), b.dtype) for name, b in q.buffers.items()}


@by_format
@by_usage
@by_shape
@by_dtype
def test_buffers_and_bytes_are_what_the_format_says(format, usage, shape, dtype):
    q = format.quantize(values(shape, dtype), usage)
    rows, columns = q.shape[:-1].numel(), q.shape[-1]
    assert specs_of(q) == format.buffers(rows, columns, dtype, usage, None)
    assert q.nbytes == format.saved_bytes(rows, columns, dtype, usage)
    assert all(buffer.is_contiguous() for buffer in q.buffers.values())


@by_format
@by_usage
@by_counts
def test_buffers_and_bytes_of_groups_are_what_the_format_says(format, usage, counts):
    x, ends = grouped_values(counts, 33)
    q = format.quantize(GroupedTensor(x, ends), usage).data
    assert specs_of(q) == format.buffers(len(x), 33, x.dtype, usage, len(counts))
    assert q.nbytes == format.saved_bytes(len(x), 33, x.dtype, usage, len(counts))


@by_format
@pytest.mark.parametrize("ends", [None, [5, 5, 30]], ids=["one-matrix", "groups"])
@pytest.mark.parametrize("shape", [(33, 41), (64, 128)], ids=str)
def test_a_buffer_keeps_no_memory_but_its_own_bytes(format, ends, shape):
    for name, buffer in quantized(format, Usage.BOTH, ends, shape=shape).buffers.items():
        assert buffer.untyped_storage().nbytes() == buffer.nbytes, name


def test_bytes_of_an_element_are_those_published():
    rows, columns = 1024, 512
    elements = rows * columns
    assert MXFP8.saved_bytes(rows, columns, torch.bfloat16) == elements + elements // 32
    assert MXFP8.saved_bytes(rows, columns, torch.bfloat16, Usage.BOTH) == 2 * (
        elements + elements // 32
    )
    assert FLOAT8_CURRENT.saved_bytes(rows, columns, torch.bfloat16, Usage.BOTH) == elements + 4
    assert HIGH_PRECISION.saved_bytes(rows, columns, torch.bfloat16) == 2 * elements
    grouped = MXFP8.saved_bytes(rows, columns, torch.bfloat16, Usage.COLUMNWISE, groups=8)
    assert grouped == elements + elements // 32 + 8 * columns


@by_format
def test_the_description_of_a_format_gives_it_back(format):
    assert from_spec(format.spec()) == format


def test_the_description_keeps_every_option():
    for format in (
        dataclasses.replace(FLOAT8_CURRENT, code=Code.E5M2, power_of_two=True, epsilon=0.5),
        dataclasses.replace(FLOAT8_DELAYED, history=3, margin=1, most_recent=True),
    ):
        assert from_spec(format.spec()) == format


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"name": "float9"},
        {"name": ["mxfp8"]},
        {"name": "mxfp8", "block": 32},
        {"name": "float8_current", "code": "e3m4"},
        {"name": "float8_delayed", "history": 0},
        "mxfp8",
        None,
    ],
    ids=str,
)
def test_a_damaged_description_is_a_checkpoint_error(spec):
    with pytest.raises(CheckpointError, match=r"must be one of.*damaged or was written by a newer"):
        from_spec(spec)


@by_format
def test_values_must_be_floats_with_a_dimension(format):
    for wrong in (torch.ones(2, 3, dtype=torch.int32), [1.0], torch.ones(2, dtype=torch.bool)):
        with pytest.raises(DtypeError, match=f"{format.name}.quantize needs.*convert it first"):
            format.quantize(wrong)
    with pytest.raises(ShapeError, match="got a scalar; reshape it"):
        format.quantize(torch.tensor(1.0))


@by_format
def test_no_two_buffers_are_the_same_memory(format):
    q = quantized(format)
    assert len(pointers(q)) == len(q.buffers)


def test_a_usage_says_which_directions_it_has():
    for usage in (Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH):
        assert usage.sides == tuple(usage)
        assert usage.has_rows == (Usage.ROWWISE in usage)
        assert usage.has_columns == (Usage.COLUMNWISE in usage)


@by_format
@pytest.mark.parametrize("usage", [Usage(0), "rowwise", None], ids=str)
def test_a_usage_is_one_or_both_directions(format, usage):
    with pytest.raises(LayoutError, match="needs usage ROWWISE, COLUMNWISE or BOTH, got"):
        format.quantize(torch.ones(2, 3), usage)


@pytest.mark.parametrize("format", [FLOAT8_CURRENT, MXFP8, HIGH_PRECISION], ids=lambda f: f.name)
def test_only_a_format_that_learns_its_scale_is_given_one(format):
    with pytest.raises(LayoutError, match="takes none; leave `scale` out, or use FLOAT8_DELAYED"):
        format.quantize(torch.ones(2, 3), scale=torch.ones(1))


@by_format
def test_tolerances_are_a_pair_of_the_format(format):
    assert (format.rtol, format.atol) == format.tolerance


@by_format
def test_a_gradient_does_not_flow_through_quantization(format):
    q = format.quantize(torch.ones(2, 3, requires_grad=True))
    assert not q.requires_grad
    assert not q.dequantize().requires_grad


@by_format
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rows": -1}, ShapeError),
        ({"columns": 2.5}, ShapeError),
        ({"groups": -1}, ShapeError),
        ({"rows": True}, ShapeError),
        ({"dtype": "float32"}, DtypeError),
        ({"dtype": torch.int32}, DtypeError),
        ({"usage": Usage(0)}, LayoutError),
        ({"usage": 3}, LayoutError),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_matrix_that_can_be(format, wrong, error):
    right = {"rows": 3, "columns": 3, "dtype": torch.float32, "usage": Usage.BOTH, "groups": 2}
    with pytest.raises(error):
        format.saved_bytes(**(right | wrong))


@pytest.mark.parametrize(
    ("format", "wrong"),
    [
        (FLOAT8_CURRENT, {"epsilon": "small"}),
        (FLOAT8_CURRENT, {"epsilon": True}),
        (FLOAT8_DELAYED, {"history": 1.5}),
        (FLOAT8_DELAYED, {"history": True}),
        (FLOAT8_DELAYED, {"margin": "a"}),
        (FLOAT8_DELAYED, {"margin": 65}),
        (FLOAT8_DELAYED, {"most_recent": 1}),
    ],
    ids=str,
)
def test_an_option_of_a_format_that_means_nothing_is_refused(format, wrong):
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        dataclasses.replace(format, **wrong)
