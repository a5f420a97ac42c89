"""New values in the same buffers, and a flag on the device that says there are none."""

import pytest
import torch

from backstash.errors import LayoutError
from format_cases import assert_identical, by_format, by_grouping, by_usage, pointers, quantized


@by_format
@by_usage
@by_grouping
def test_the_same_buffers_hold_what_quantizing_anew_gives(format, usage, ends):
    q, wanted = quantized(format, usage, ends), quantized(format, usage, ends)
    if format.stateful:
        wanted.scale_inv.copy_(q.scale_inv)
    before, version, values = pointers(q), q._version, torch.randn(q.shape)
    wanted.copy_(values)
    assert q.requantize_(values) is q
    assert_identical(q, wanted)
    assert pointers(q) == before
    assert q._version > version


@by_format
@by_usage
@by_grouping
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_a_flag_that_is_set_leaves_the_tensor_as_it_is(format, usage, ends, dtype):
    q, values, noop = quantized(format, usage, ends), torch.randn(33, 40), torch.ones(1).to(dtype)
    before, wanted = q.clone(), q.clone().requantize_(values)
    q.requantize_(values, noop=noop)
    assert_identical(q, before)
    noop.zero_()
    q.requantize_(values, noop=noop)
    assert_identical(q, wanted)


@by_format
def test_a_flag_that_is_none_is_refused_before_anything_is_written(format):
    q = quantized(format)
    before = q.clone()
    for noop in (torch.zeros(3), torch.zeros(1, dtype=torch.int64)):
        with pytest.raises(LayoutError, match="noop"):
            q.requantize_(torch.randn(q.shape), noop=noop)
    assert_identical(q, before)
