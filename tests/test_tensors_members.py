"""The groups of a grouped tensor as tensors of their own: the bytes of each quantized alone."""

import pytest
import torch

from backstash.formats import Usage
from backstash.tensors import GroupedTensor
from format_cases import assert_identical, by_format, by_usage
from quantizer_cases import by_counts, grouped_values


@by_format
@by_usage
@by_counts
def test_a_member_is_its_rows_quantized_alone(format, usage, counts):
    x, ends = grouped_values(counts, 33)
    scale = torch.arange(1.0, len(counts) + 1) if format.stateful else None
    members = format.quantize(GroupedTensor(x, ends), usage, scale=scale).members()
    assert len(members) == len(counts)
    end = 0
    for group, (member, count) in enumerate(zip(members, counts, strict=True)):
        rows, end = x[end : end + count], end + count
        own = None if scale is None else scale[group : group + 1]
        assert_identical(member, format.quantize(rows, usage, scale=own))


@by_format
def test_writing_into_a_member_changes_its_group_and_no_other(format):
    x, ends = grouped_values([31, 0, 33, 2], 40)
    grouped = format.quantize(GroupedTensor(x, ends), Usage.BOTH)
    before = grouped.dequantize().data.clone()
    written = torch.randn(33, 40)
    member = grouped.members()[2].copy_(written)
    after = grouped.dequantize().data
    assert torch.equal(after[31:64], member.dequantize())
    assert torch.equal(after[:31], before[:31])
    assert torch.equal(after[64:66], before[64:66])


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0]], ids=str)
def test_members_of_plain_rows_are_views(counts):
    x, ends = grouped_values(counts, 4)
    members = GroupedTensor(x, ends).members()
    assert [len(member) for member in members] == counts
    for member in members:
        assert member.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
