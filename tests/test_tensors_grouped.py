"""Rows of many groups in one buffer: how the groups are given, and what is refused."""

import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backstash.errors import BackstashError, DeviceError, DtypeError, LayoutError, ShapeError
from backstash.formats import HIGH_PRECISION, MXFP8, Usage
from backstash.tensors import GroupedTensor, as_ends, counts_to_ends
from format_cases import by_format, by_usage
from quantizer_cases import NAN, by_counts, grouped_values

WAYS = {
    "list": list,
    "tuple": tuple,
    "numpy-integers": lambda ends: [np.int64(end) for end in ends],
    "int64": torch.tensor,
    "int32": lambda ends: torch.tensor(ends, dtype=torch.int32),
    "uint8": lambda ends: torch.tensor(ends, dtype=torch.uint8),
    "strided": lambda ends: torch.tensor(ends).repeat_interleave(2)[::2],
}
by_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@by_way
@by_counts
def test_ends_may_be_given_in_any_way(way, counts):
    x, ends = grouped_values(counts, 3)
    for grouped in (
        GroupedTensor(x, way(ends.tolist())),
        GroupedTensor.from_counts(x, way(counts)),
        GroupedTensor(x, way(ends.tolist()), capacity=len(x)),
    ):
        assert grouped.data is x
        assert (grouped.ends_G.dtype, grouped.ends_G.tolist()) == (torch.int32, ends.tolist())
        assert (grouped.counts_G.dtype, grouped.counts_G.tolist()) == (torch.int32, counts)
        assert (grouped.num_groups, grouped.capacity) == (len(counts), len(x))
        assert grouped.overflow.tolist() == [False]


def test_what_a_grouped_tensor_says_of_itself_is_that_of_its_buffer():
    x = torch.zeros(7, 3, dtype=torch.bfloat16)
    grouped = GroupedTensor(x, [3, 5])
    assert (grouped.shape, grouped.dtype, grouped.device) == (x.shape, x.dtype, x.device)
    assert grouped.nbytes == 7 * 3 * 2
    assert MXFP8.quantize(grouped).nbytes == MXFP8.saved_bytes(7, 3, x.dtype, groups=2)


@pytest.mark.parametrize("ends", [[3, 9], [8, 8], [100, 200]], ids=str)
def test_more_rows_than_fit_are_cut_and_flagged(ends):
    grouped = GroupedTensor(torch.zeros(7, 3), ends)
    assert grouped.ends_G.tolist() == [min(end, 7) for end in ends]
    assert grouped.overflow.tolist() == [True]
    assert (grouped.overflow.dtype, grouped.overflow.shape) == (torch.bool, (1,))


def test_counts_past_32_bits_are_cut_and_not_wrapped():
    grouped = GroupedTensor.from_counts(torch.zeros(7, 3), [1 << 31, 1 << 40])
    assert grouped.ends_G.tolist() == [7, 7]
    assert grouped.overflow.item()


@by_format
def test_the_flag_and_the_ends_stay_through_quantization_and_back(format):
    grouped = GroupedTensor(torch.ones(7, 3), [3, 9])
    q = format.quantize(grouped)
    for other in (q, q.dequantize()):
        assert other.overflow.item()
        assert torch.equal(other.ends_G, grouped.ends_G)
    assert q.data.ends_G is grouped.ends_G
    assert not format.quantize(GroupedTensor(torch.ones(7, 3), [3, 7])).overflow.item()


@by_format
@by_counts
def test_a_round_trip_keeps_the_tolerance_and_never_reads_the_tail(format, counts):
    x, ends = grouped_values(counts, 9)
    x = x.clamp(-3, 3)
    got, rows = format.quantize(GroupedTensor(x, ends)).dequantize(), sum(counts)
    if not format.stateful:
        torch.testing.assert_close(got.data[:rows], x[:rows], rtol=format.rtol, atol=format.atol)
    assert not got.data[:rows].isnan().any()


def test_plain_values_are_their_own_dequantization():
    grouped = GroupedTensor(torch.ones(7, 3), [7])
    assert grouped.dequantize() is grouped


def test_fields_can_be_put_together_unchecked():
    grouped = GroupedTensor(torch.ones(7, 3), [3, 9])
    again = GroupedTensor.from_parts(grouped.data, grouped.ends_G, grouped.overflow)
    assert again.ends_G is grouped.ends_G
    assert again.overflow is grouped.overflow


def test_ends_say_themselves_that_nothing_was_cut_off():
    again = GroupedTensor.from_parts(torch.ones(7, 3), torch.tensor([3, 7], dtype=torch.int32))
    assert again.noted_overflow is None
    assert again.overflow.tolist() == [False]
    assert again.overflow.dtype is torch.bool
    copied = pickle.loads(pickle.dumps(again))
    assert copied.overflow.tolist() == [False]
    assert "overflow=tensor([False])" in repr(copied)
    with pytest.raises(AttributeError, match="no attribute 'overflown'"):
        again.overflown  # noqa: B018


def test_groups_can_be_described_on_meta():
    x = torch.empty(7, 3, device="meta")
    for ends in ([3, 7], torch.empty(2, dtype=torch.int32, device="meta")):
        assert GroupedTensor(x, ends).ends_G.device.type == "meta"
    counts = torch.empty(2, dtype=torch.int64, device="meta")
    assert GroupedTensor.from_counts(x, counts).num_groups == 2


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=9), capacity=st.integers(0, 90))
def test_counts_and_ends_describe_the_same_groups(counts, capacity):
    x = torch.zeros(capacity, 2)
    grouped = GroupedTensor.from_counts(x, counts)
    ends = counts_to_ends(counts, x.device)
    assert torch.equal(grouped.ends_G, GroupedTensor(x, ends).ends_G)
    assert grouped.ends_G.tolist() == [min(end, capacity) for end in ends.tolist()]
    assert int(grouped.counts_G.sum()) == min(sum(counts), capacity)
    assert grouped.overflow.item() == (sum(counts) > capacity)


@by_format
@by_usage
@pytest.mark.parametrize("counts", [[31, 0, 33], [0, 0], [5]], ids=str)
def test_valid_bytes_are_a_prefix_and_what_follows_is_never_read(format, usage, counts):
    x, ends = grouped_values(counts, 40)
    grouped = format.quantize(GroupedTensor(x, ends), usage)
    wanted = {side: grouped.data.dequantize(side) for side in usage}
    bytes_of = grouped.valid_bytes()
    assert bytes_of.keys() == grouped.data.buffers.keys()
    for name, valid in bytes_of.items():
        assert (valid.shape, valid.dtype) == ((1,), torch.int64)
        buffer = grouped.data.buffers[name]
        assert 0 <= int(valid) <= buffer.nbytes
        buffer.view(torch.uint8).flatten()[int(valid) :].fill_(0x7F)
    for side in usage:
        got = grouped.data.dequantize(side)
        assert torch.equal(got[: sum(counts)], wanted[side][: sum(counts)])


def test_valid_bytes_are_those_of_the_formats():
    x, ends = grouped_values([31, 0, 33], 40)
    found = GroupedTensor(x, ends).valid_bytes()
    assert {name: int(valid) for name, valid in found.items()} == {"data": 64 * 40 * 4}
    found = MXFP8.quantize(GroupedTensor(x, ends), Usage.BOTH).valid_bytes()
    rows, columns = {"row_codes": 64 * 40, "row_scales": 64 * 2}, {"column_codes": 64 * 40}
    # The second group of rows has two blocks.
    wanted = {**rows, **columns, "column_scales": 3 * 40}
    assert {name: int(valid) for name, valid in found.items()} == wanted


# --- mistakes ----------------------------------------------------------------------------------

WRONG_ENDS = {
    "decreasing": ([3, 2], ShapeError, r"never decrease, got \[3, 2\].*from_counts"),
    "decreasing-tensor": (torch.tensor([5, 4]), ShapeError, "never decrease"),
    "negative": ([-1, 2], ShapeError, "start at zero or more"),
    "empty": ([], ShapeError, r"an entry for each group, got shape \(0,\)"),
    "empty-tensor": (torch.tensor([], dtype=torch.int32), ShapeError, "an entry for each group"),
    "two-dimensions": (torch.ones(2, 2, dtype=torch.int32), ShapeError, "one dimension.*flatten"),
    "no-dimension": (torch.tensor(3), ShapeError, "one dimension"),
    "float-list": ([1.0, 2.5], DtypeError, "whole numbers.*round them"),
    "float-tensor": (torch.tensor([1.0, 2.0]), DtypeError, "integers, got torch.float32; use"),
    "bool-tensor": (torch.tensor([False, True]), DtypeError, "integers, got torch.bool"),
    "bool-list": ([False, True], DtypeError, "whole numbers"),
    "text": (["1"], DtypeError, "whole numbers"),
    "none": (None, DtypeError, "whole numbers.*got None; give a list"),
    "number": (7, DtypeError, "whole numbers.*got 7; give a list"),
    "meta": (torch.empty(2, dtype=torch.int32, device="meta"), DeviceError, "got a tensor on meta"),
}
WRONG_COUNTS = {
    "negative": ([3, -2], ShapeError, r"not be negative, got \[3, -2\]; clamp"),
    "empty": ([], ShapeError, "counts must have one dimension"),
    "two-dimensions": (torch.ones(2, 2, dtype=torch.int32), ShapeError, "flatten"),
    "float-list": ([1.5], DtypeError, "counts must be whole numbers"),
    "float-tensor": (torch.tensor([NAN]), DtypeError, "counts must be integers"),
    "none": (None, DtypeError, "counts must be whole numbers"),
    "meta": (torch.empty(2, dtype=torch.int32, device="meta"), DeviceError, "got a tensor on meta"),
}


@pytest.mark.parametrize(("ends", "error", "message"), WRONG_ENDS.values(), ids=WRONG_ENDS.keys())
def test_wrong_ends_are_refused(ends, error, message):
    for make in (
        lambda: GroupedTensor(torch.zeros(7, 3), ends),
        lambda: as_ends(ends, torch.device("cpu")),
    ):
        with pytest.raises(error, match=message) as caught:
            make()
        assert isinstance(caught.value, BackstashError)


@pytest.mark.parametrize(
    ("counts", "error", "message"), WRONG_COUNTS.values(), ids=WRONG_COUNTS.keys()
)
def test_wrong_counts_are_refused(counts, error, message):
    with pytest.raises(error, match=message):
        GroupedTensor.from_counts(torch.zeros(7, 3), counts)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(7), torch.zeros(7, 3, 2), [[1.0]], None],
    ids=["1-D", "3-D", "list", "None"],
)
def test_data_that_is_no_matrix_is_refused(data):
    with pytest.raises(ShapeError, match=r"data of shape \(T, K\), got .*reshape it"):
        GroupedTensor(data, [1])


@pytest.mark.parametrize("capacity", [0, 6, 8])
def test_a_capacity_that_is_not_the_rows_of_the_buffer_is_refused(capacity):
    with pytest.raises(ShapeError, match=f"rows of data, 7, got {capacity}; give the whole buffer"):
        GroupedTensor(torch.zeros(7, 3), [7], capacity=capacity)


def test_a_matrix_quantized_without_its_groups_is_refused():
    with pytest.raises(LayoutError, match="quantize the GroupedTensor of the plain values"):
        GroupedTensor(HIGH_PRECISION.quantize(torch.zeros(7, 3)), [7])


def test_a_grouped_tensor_cannot_be_changed():
    grouped = GroupedTensor(torch.zeros(7, 3), [7])
    with pytest.raises(AttributeError):
        grouped.data = torch.ones(7, 3)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_grouped_tensor_comes_back_from_a_file_of_weights_only():
    file = io.BytesIO()
    grouped = MXFP8.quantize(GroupedTensor(torch.randn(7, 40), [2, 9]))
    torch.save({"kept": grouped}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["kept"]
    assert torch.equal(loaded.data, grouped.data)
    assert torch.equal(loaded.ends_G, grouped.ends_G)
    assert bool(loaded.overflow)
