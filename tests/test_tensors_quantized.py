"""One quantized tensor: reading it, describing it, and coming back from every way of keeping it."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from backstash.errors import DtypeError, LayoutError, UnsupportedOpError
from backstash.formats import FLOAT8_CURRENT, FLOAT8_DELAYED, MXFP8, Code, Usage
from backstash.tensors import QuantizedTensor, equal_groups
from format_cases import (
    FORMATS,
    assert_identical,
    by_format,
    by_grouping,
    by_usage,
    parts,
    pointers,
    quantized,
)


def save_and_load(value):
    """Through ``torch.save``, as strictly as a stranger's file is read."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS = {
    "torch-save": save_and_load,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}
by_way = pytest.mark.parametrize("keep", WAYS.values(), ids=WAYS.keys())


# --- reading -----------------------------------------------------------------------------------


@by_format
def test_the_rows_are_read_where_nothing_is_said(format):
    q = quantized(format, Usage.BOTH)
    assert torch.equal(q.dequantize(), q.dequantize(Usage.ROWWISE))
    columns = q.only(Usage.COLUMNWISE)
    assert torch.equal(columns.dequantize(), q.dequantize(Usage.COLUMNWISE))


@by_format
def test_values_are_new_memory_in_the_dtype_asked_for(format):
    q = quantized(format)
    values = q.dequantize()
    assert type(values) is torch.Tensor
    values.zero_()
    assert q.dequantize().any()
    assert q.dequantize(dtype=torch.bfloat16).dtype is torch.bfloat16
    assert torch.equal(q.dequantize(dtype=torch.float64), q.dequantize().double())


@by_format
@pytest.mark.parametrize(
    ("kept", "asked"),
    [
        (Usage.ROWWISE, Usage.COLUMNWISE),
        (Usage.COLUMNWISE, Usage.ROWWISE),
        (Usage.ROWWISE, Usage.BOTH),
        (Usage.BOTH, Usage.BOTH),
        (Usage.BOTH, Usage(0)),
        (Usage.BOTH, "rowwise"),
    ],
    ids=str,
)
def test_a_direction_that_is_not_there_cannot_be_read(format, kept, asked):
    with pytest.raises(LayoutError, match=r"reads one direction of .*quantize with the usage"):
        quantized(format, kept).dequantize(asked)


@by_format
@by_grouping
@by_usage
def test_one_direction_can_be_kept_alone(format, ends, usage):
    q = quantized(format, Usage.BOTH, ends)
    kept = q.only(usage)
    assert kept.usage is usage
    assert pointers(kept) <= pointers(q)
    assert kept.nbytes == format.saved_bytes(33, 40, q.dtype, usage, ends and len(ends))
    for direction in usage:
        assert torch.equal(kept.dequantize(direction), q.dequantize(direction))


@by_format
def test_a_direction_that_is_not_there_cannot_be_kept_alone(format):
    for usage in (Usage.COLUMNWISE, Usage.BOTH, Usage(0), 3):
        with pytest.raises(LayoutError, match="quantize with the usage you need"):
            quantized(format, Usage.ROWWISE).only(usage)


@by_format
def test_a_quantized_tensor_is_not_quantized_again(format):
    with pytest.raises(UnsupportedOpError, match=r"already mxfp8; call .dequantize\(\)"):
        format.quantize(quantized(MXFP8))


def test_the_text_of_a_tensor_says_what_it_is():
    q = quantized(MXFP8, Usage.ROWWISE, dtype=torch.bfloat16)
    for text in (repr(q), str(q), f"{q}"):
        assert text == (
            "QuantizedTensor(format=mxfp8, usage=ROWWISE, shape=(33, 40), "
            f"dtype=torch.bfloat16, device=cpu, nbytes={33 * 40 + 33 * 2})"
        )


@by_format
def test_it_is_a_tensor_of_the_values_it_stands_for(format):
    q = quantized(format, shape=(3, 11, 40), dtype=torch.bfloat16)
    assert isinstance(q, torch.Tensor)
    assert (q.shape, q.dtype, q.device.type) == ((3, 11, 40), torch.bfloat16, "cpu")
    assert q.stride() == (440, 40, 1)
    assert (q.numel(), q.ndim, q.is_leaf, q.requires_grad) == (1320, 3, True, False)


@by_format
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, "bf16"], ids=str)
def test_values_are_not_given_in_a_dtype_that_cannot_hold_them(format, dtype):
    with pytest.raises(DtypeError, match="dequantize gives float32"):
        quantized(format).dequantize(dtype=dtype)


@by_format
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize(
    "make",
    [lambda: torch.eye(3).to_sparse(), lambda: torch.nested.nested_tensor([torch.ones(2, 3)])],
    ids=["sparse", "nested"],
)
def test_only_a_dense_matrix_is_quantized(format, make):
    with pytest.raises(LayoutError, match="needs a dense matrix"):
        format.quantize(make())


@by_format
@by_grouping
def test_assigned_data_are_the_values(format, ends):
    q, other = quantized(format, ends=ends), quantized(format, Usage.COLUMNWISE, ends)
    q.data = other
    assert_identical(q, other)
    assert torch.equal(q.dequantize(), other.dequantize())
    with pytest.raises(UnsupportedOpError, match=r"copy_\(\)"):
        q.data = torch.zeros(33, 40)
    assert_identical(q, other)


@by_format
@by_grouping
def test_buffers_can_be_shared_between_processes(format, ends):
    q = quantized(format, ends=ends)
    wanted = q.clone()
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()
    assert_identical(q, wanted)


@by_format
@pytest.mark.parametrize("take", [torch.from_dlpack, np.from_dlpack], ids=["torch", "numpy"])
def test_no_other_library_reads_memory_that_is_not_there(format, take):
    with pytest.raises(UnsupportedOpError, match=r"no memory of its own.*dequantize\(\)"):
        take(quantized(format))


def test_equal_groups_end_at_multiples():
    ends = equal_groups(3, 5, torch.device("cpu"))
    assert (ends.tolist(), ends.dtype) == ([5, 10, 15], torch.int32)


# --- the protocol of wrapper subclasses --------------------------------------------------------


@by_format
@by_usage
@by_grouping
def test_a_tensor_can_be_taken_apart_and_put_together(format, usage, ends):
    q = quantized(format, usage, ends).requires_grad_()
    names, kind = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    assert inner.keys() == parts(q).keys()
    assert hash(kind) == hash(q.clone().requires_grad_().__tensor_flatten__()[1])
    again = QuantizedTensor.__tensor_unflatten__(inner, kind, q.shape, q.stride())
    assert_identical(again, q)
    assert pointers(again) == pointers(q)


def test_torch_knows_it_as_a_traceable_subclass():
    assert is_traceable_wrapper_subclass(quantized(MXFP8))


# --- keeping -----------------------------------------------------------------------------------


@by_way
@by_format
@by_usage
@by_grouping
def test_a_tensor_comes_back(keep, format, usage, ends):
    for dtype in (torch.float32, torch.bfloat16):
        q = quantized(format, usage, ends, dtype=dtype)
        again = keep(q)
        assert_identical(again, q)
        assert not isinstance(again, nn.Parameter)
        assert not pointers(again) & pointers(q)


@by_way
@by_format
@pytest.mark.parametrize("trained", [{}, {"requires_grad": False}], ids=["trained", "frozen"])
def test_a_parameter_comes_back_as_one(keep, format, trained):
    parameter = nn.Parameter(quantized(format), **trained)
    again = keep(parameter)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(again, nn.Parameter)
    assert_identical(again, parameter)


@by_way
@pytest.mark.parametrize(
    "format",
    [
        dataclasses.replace(FLOAT8_CURRENT, code=Code.E5M2, power_of_two=True, epsilon=0.5),
        dataclasses.replace(FLOAT8_DELAYED, history=3, margin=1, most_recent=True),
    ],
    ids=lambda format: format.name,
)
def test_the_options_of_a_format_come_back(keep, format):
    q = quantized(format)
    assert q.format == format
    assert_identical(keep(q), q)


def test_a_tensor_copied_twice_in_one_value_stays_one():
    q = nn.Parameter(quantized(MXFP8))
    one, two = copy.deepcopy([q, q])
    assert one is two


def test_a_file_can_be_loaded_to_another_device():
    file = io.BytesIO()
    torch.save(quantized(MXFP8, ends=[3, 33]), file)
    file.seek(0)
    q = torch.load(file, weights_only=True, map_location="meta")
    assert {buffer.device.type for buffer in parts(q).values()} == {q.device.type} == {"meta"}


# --- modules -----------------------------------------------------------------------------------


class Layer(nn.Module):
    """A module with a quantized weight and a plain bias."""

    def __init__(self, format, usage=Usage.BOTH, **kind):
        super().__init__()
        self.weight = nn.Parameter(quantized(format, usage, **kind))
        self.bias = nn.Parameter(torch.randn(33))


@by_format
@by_grouping
@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@pytest.mark.parametrize("keep", [lambda state: state, save_and_load], ids=["memory", "file"])
def test_a_state_dict_goes_into_a_like_module(format, ends, assign, keep):
    one, two = Layer(format, ends=ends), Layer(format, ends=ends)
    state = keep(one.state_dict())
    assert type(state["weight"]) is QuantizedTensor
    assert two.load_state_dict(state, assign=assign).missing_keys == []
    assert isinstance(two.weight, nn.Parameter)
    assert_identical(two.weight, one.weight)


@by_format
@pytest.mark.parametrize("source", FORMATS, ids=lambda format: f"from-{format.name}")
def test_a_state_dict_of_another_format_is_quantized_anew(format, source):
    one, two = Layer(source, Usage.ROWWISE), Layer(format)
    two.load_state_dict(one.state_dict())
    wanted = Layer(format)
    with torch.no_grad():
        wanted.weight.copy_(one.weight)
    assert_identical(two.weight, wanted.weight)


@by_format
def test_plain_values_go_into_a_quantized_module_and_out_of_one(format):
    linear, layer = nn.Linear(40, 33), Layer(format)
    layer.load_state_dict(linear.state_dict())
    scale = torch.tensor([0.7]) if format.stateful else None
    wanted = format.quantize(linear.weight, Usage.BOTH, scale=scale).requires_grad_()
    assert_identical(layer.weight, wanted)
    linear.load_state_dict(layer.state_dict())
    assert type(linear.weight) is nn.Parameter
    assert torch.equal(linear.weight, layer.weight.dequantize())


@by_format
def test_a_module_is_converted_copied_and_frozen_as_any_other(format):
    layer = Layer(format)
    again = copy.deepcopy(layer)
    assert_identical(again.weight, layer.weight)
    again.to(torch.bfloat16)
    assert isinstance(again.weight, nn.Parameter)
    assert (again.weight.dtype, again.bias.dtype) == (torch.bfloat16, torch.bfloat16)
    again.requires_grad_(False)
    assert not again.weight.requires_grad
    again.to("meta")
    assert again.weight.device.type == "meta"
    assert layer.weight.requires_grad


def test_a_module_on_meta_takes_a_state_dict_by_assignment():
    one, two = Layer(MXFP8), Layer(MXFP8).to("meta")
    two.load_state_dict(one.state_dict(), assign=True)
    assert_identical(two.weight, one.weight)


def test_a_gradient_is_plain_and_adds_up():
    weight = nn.Parameter(quantized(FLOAT8_CURRENT))
    weight.grad = torch.ones(33, 40)
    weight.grad += 1
    assert torch.equal(weight.grad, torch.full((33, 40), 2.0))
    nn.utils.clip_grad_norm_([weight], 1.0)
    torch.testing.assert_close(weight.grad.norm(), torch.tensor(1.0))


def test_a_part_in_the_same_file_as_the_whole_is_a_tensor_of_its_own():
    q = quantized(FLOAT8_CURRENT, Usage.ROWWISE, shape=(8, 16))
    part = q[2:4]
    assert part.shared
    again = save_and_load({"whole": q, "part": part})
    before = again["whole"].dequantize()
    assert torch.equal(again["part"].dequantize(), before[2:4])
    # It brought its scale along, so it may be written, and the whole does not see it.
    again["part"].copy_(torch.full((2, 16), 100.0))
    assert torch.equal(again["whole"].dequantize(), before)


def test_data_of_another_tensor_leave_no_buffer_behind():
    q, rows = quantized(MXFP8, Usage.BOTH), quantized(MXFP8, Usage.ROWWISE)
    gone = set(q.buffers) - set(rows.buffers)
    assert gone
    q.data = rows
    assert_identical(q, rows)
    assert not any(hasattr(q, name) for name in gone)
