"""Each operation of the table does what its name says; every other one raises."""

# pyright: reportPrivateImportUsage=false

import itertools

import pytest
import torch
from torch import Tensor

from backstash.errors import DtypeError, LayoutError, UnsupportedOpError
from backstash.formats import FLOAT8_CURRENT, HIGH_PRECISION, MXFP8, Usage
from backstash.tensors import GroupedTensor, QuantizedTensor
from format_cases import (
    FORMATS,
    USAGES,
    assert_identical,
    by_format,
    by_grouping,
    by_usage,
    parts,
    pointers,
    quantized,
)
from quantizer_cases import by_dtype

UNKNOWN = {
    "matmul": lambda q, x: x @ q.T,
    "mm": lambda q, x: torch.mm(q, x),
    "linear": lambda q, x: torch.nn.functional.linear(x, q),
    "add": lambda q, x: q + x,
    "add-to-plain": lambda q, x: x + q,
    "add-in-place-to-plain": lambda q, x: x.add_(q),
    "foreach-add-in-place-to-plain": lambda q, x: torch._foreach_add_([x], [q]),
    "add-once-to-plain": lambda q, x: x.add(q, alpha=1),
    "add-a-multiple": lambda q, x: q.add(x, alpha=2),
    "add-a-multiple-of-itself": lambda q, x: q.add(q, alpha=2),
    "foreach-add-to-plain": lambda q, x: torch._foreach_add([x], [q]),
    "norm-of-rows": lambda q, x: q.norm(dim=-1),
    "mul": lambda q, x: q * 2,
    "cat": lambda q, x: torch.cat([q, q]),
    "sum": lambda q, x: q.sum(),
    "abs": lambda q, x: q.abs(),
    "index": lambda q, x: q[[0, 1]],
    "transpose": lambda q, x: q.T,
    "item": lambda q, x: q.isnan().any().item(),
    "erfinv": lambda q, x: q.erfinv_(),
    "where": lambda q, x: torch.where(x > 0, q, x),
}


@pytest.mark.parametrize("operation", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_operation_raises_and_says_what_to_do(operation):
    q, x = quantized(MXFP8, shape=(32, 32)), torch.ones(32, 32)
    with pytest.raises(UnsupportedOpError, match=r"aten.*call \.dequantize\(\)"):
        operation(q, x)
    with pytest.raises(NotImplementedError):
        operation(q, x)
    assert torch.equal(x, torch.ones(32, 32))


# --- sharing, copying, moving ------------------------------------------------------------------


@by_format
@by_usage
@by_grouping
def test_detach_shares_every_buffer(format, usage, ends):
    q = quantized(format, usage, ends)
    assert_identical(q.detach(), q)
    assert pointers(q.detach()) == pointers(q.data) == pointers(q)
    assert not q.detach().requires_grad_().detach().requires_grad


@by_format
@by_usage
@by_grouping
def test_a_clone_has_every_buffer_in_memory_of_its_own(format, usage, ends):
    q = quantized(format, usage, ends)
    assert_identical(q.clone(), q)
    assert not pointers(q.clone()) & pointers(q)


@by_format
@by_grouping
@by_dtype
def test_another_dtype_changes_what_the_tensor_stands_for(format, ends, dtype):
    q = quantized(format, Usage.BOTH, ends)
    other = q.to(dtype)
    assert (other.dtype, other.dequantize().dtype) == (dtype, dtype)
    assert other.nbytes == format.saved_bytes(33, 40, dtype, Usage.BOTH, ends and len(ends))
    for name, buffer in q.buffers.items():
        assert name == "values" or torch.equal(parts(other)[name], buffer)


@by_format
@by_grouping
def test_a_tensor_moves_to_meta_with_every_buffer(format, ends):
    q = quantized(format, Usage.BOTH, ends)
    moved = q.to("meta")
    assert moved.device.type == "meta"
    assert {buffer.device.type for buffer in parts(moved).values()} == {"meta"}
    assert moved.nbytes == q.nbytes
    assert q.cpu() is q
    assert not pointers(q.to("cpu", copy=True)) & pointers(q)


def test_no_dtype_but_a_floating_one_can_be_stood_for():
    for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(DtypeError, match=r"floating dtype, got .*dequantize\(\) it first"):
            quantized(MXFP8).to(dtype)


@by_format
@by_grouping
def test_pinning_pins_every_buffer(format, ends, monkeypatch):
    q = quantized(format, Usage.BOTH, ends)
    assert not q.is_pinned()
    pinned = []
    # This machine may have nothing to pin memory for: the buffers are noted instead.
    monkeypatch.setattr(Tensor, "pin_memory", lambda buffer: pinned.append(buffer) or buffer)
    got = QuantizedTensor.run_operation(torch.ops.aten._pin_memory.default, (q,), {})
    assert_identical(got, q)
    assert {buffer.data_ptr() for buffer in pinned} == pointers(q)


# --- views -------------------------------------------------------------------------------------

SAME_COLUMNS = {
    "view": lambda q: q.view(3, 11, 40),
    "inferred": lambda q: q.view(-1, 40),
    "reshape": lambda q: q.reshape(11, 3, 40),
    "unflatten": lambda q: q.unflatten(0, (3, 11)),
    "view-as": lambda q: q.view_as(torch.empty(1, 33, 40)),
    "flatten": lambda q: q.view(3, 11, 40).flatten(0, 1),
}
OTHER_COLUMNS = {
    "flatten": lambda q: q.flatten(),
    "view": lambda q: q.view(-1, 20),
    "reshape": lambda q: q.reshape(40, 33),
    "heads": lambda q: q.view(33, 4, 10),
}


@by_format
@by_usage
@by_grouping
@pytest.mark.parametrize("view", SAME_COLUMNS.values(), ids=SAME_COLUMNS.keys())
def test_leading_dimensions_can_be_viewed_anew(format, usage, ends, view):
    q = quantized(format, usage, ends)
    plain = q.dequantize()
    assert pointers(view(q)) == pointers(q)
    assert view(q).shape == view(plain).shape
    assert torch.equal(view(q).dequantize(), view(plain))


@pytest.mark.parametrize("view", OTHER_COLUMNS.values(), ids=OTHER_COLUMNS.keys())
@pytest.mark.parametrize("format", [f for f in FORMATS if f.any_view], ids=lambda f: f.name)
def test_a_format_without_blocks_takes_any_view(format, view):
    for x in (torch.randn(33, 40), torch.randn(40, 33).T):
        q = format.quantize(x)
        plain = q.dequantize()
        assert pointers(view(q)) == pointers(q)
        assert torch.equal(view(q).dequantize(), view(plain))
        assert torch.equal(view(q).view(33, 40).dequantize(), plain)


@pytest.mark.parametrize("view", OTHER_COLUMNS.values(), ids=OTHER_COLUMNS.keys())
def test_a_view_that_would_split_blocks_or_groups_is_refused(view):
    message = r"blocks or groups.*keep the last dimension, or dequantize"
    with pytest.raises(LayoutError, match=message):
        view(quantized(MXFP8))
    for format in FORMATS:
        with pytest.raises(LayoutError, match=message):
            view(quantized(format, ends=[3, 33]))


def test_a_scalar_cannot_be_kept_by_rows():
    with pytest.raises(LayoutError, match=r"cannot be viewed as \(\)"):
        FLOAT8_CURRENT.quantize(torch.ones(1)).view(())


# --- copy_ -------------------------------------------------------------------------------------

KINDS = list(itertools.product(FORMATS, USAGES))
by_kind = pytest.mark.parametrize(
    ("format", "usage"), KINDS, ids=[f"{f.name}-{u.name}" for f, u in KINDS]
)


@by_kind
@by_dtype
def test_a_copy_from_plain_values_is_their_quantization(format, usage, dtype):
    q, x = quantized(format, usage), torch.randn(33, 40).to(dtype)
    before = pointers(q)
    assert q.copy_(x) is q
    assert pointers(q) == before
    scale = torch.tensor([0.7]) if format.stateful else None
    assert_identical(q, format.quantize(x.float(), usage, scale=scale))


@by_kind
@by_dtype
def test_a_copy_into_plain_memory_is_the_values(format, usage, dtype):
    q, x = quantized(format, usage), torch.empty(33, 40, dtype=dtype)
    assert x.copy_(q) is x
    assert torch.equal(x, q.dequantize().to(dtype))


@by_kind
@pytest.mark.parametrize(
    ("source_format", "source_usage"), KINDS, ids=[f"from-{f.name}-{u.name}" for f, u in KINDS]
)
def test_a_copy_between_kinds(format, usage, source_format, source_usage):
    q, source = quantized(format, usage), quantized(source_format, source_usage)
    kept = source.clone()
    q.copy_(source)
    assert_identical(source, kept)
    if format == source_format and q.buffers.keys() <= source.buffers.keys():
        wanted = source.like({name: source.buffers[name] for name in q.buffers}, usage=usage)
    else:
        scale = torch.tensor([0.7]) if format.stateful else None
        wanted = format.quantize(source.dequantize(), usage, scale=scale)
    assert_identical(q, wanted)


@by_format
@by_usage
def test_a_copy_between_equal_groups_copies_bytes(format, usage):
    q, source = quantized(format, usage, [3, 33]), quantized(format, usage, [3, 33])
    assert_identical(q.copy_(source), source)


@by_format
@by_usage
@pytest.mark.parametrize("ends", [None, [7, 33], [3, 10, 33]], ids=["none", "others", "more"])
def test_a_copy_between_other_groups_keeps_the_targets(format, usage, ends):
    q, source = quantized(format, usage, [3, 33]), quantized(format, usage, ends)
    scale = format.scale_of(q.buffers)
    q.copy_(source)
    x = GroupedTensor(source.dequantize(), [3, 33])
    assert_identical(q, format.quantize(x, usage, scale=scale).data)


@by_format
def test_a_copy_of_one_row_is_every_row(format):
    q, row = quantized(format), torch.randn(1, 40)
    assert torch.equal(
        q.copy_(row).dequantize(), quantized(format).copy_(row.expand(33, 40)).dequantize()
    )


@by_format
@by_usage
def test_copying_its_own_values_back_changes_no_value(format, usage):
    q = quantized(format, usage)
    values = q.dequantize()
    # The largest value times its inverse scale may be off by the rounding of that product.
    torch.testing.assert_close(q.copy_(values).dequantize(), values, rtol=2**-22, atol=0)


# --- comparing and making ----------------------------------------------------------------------


@by_format
@by_grouping
def test_equal_means_the_same_kind_and_bytes(format, ends):
    q = quantized(format, Usage.BOTH, ends)
    assert torch.equal(q, q.clone())
    assert not torch.equal(q, quantized(format, Usage.BOTH, ends))
    assert not torch.equal(q, q.dequantize())
    assert not torch.equal(q.dequantize(), q)
    assert not torch.equal(q, q.only(Usage.ROWWISE))
    assert not torch.equal(q, q.to(torch.float64))
    assert not torch.equal(q, q.view(3, 11, 40))
    other = next(other for other in FORMATS if other != format)
    assert not torch.equal(q, quantized(other, Usage.BOTH, ends))


def test_equal_bytes_in_other_groups_are_not_equal():
    x = torch.ones(4, 3)
    one, two = (HIGH_PRECISION.quantize(GroupedTensor(x, [end, 4])).data for end in (1, 2))
    assert not torch.equal(one, two)
    assert not torch.equal(one, HIGH_PRECISION.quantize(x))


@by_format
@by_usage
@by_grouping
def test_empty_like_is_quantized_memory_ready_for_a_copy(format, usage, ends):
    q = quantized(format, usage, ends)
    empty = torch.empty_like(q)
    assert not pointers(empty) & pointers(q)
    assert_identical(empty.copy_(q), q)
    plain = q.dequantize()
    wanted = q.clone().copy_(plain)
    assert_identical(torch.empty_like(q).copy_(plain), wanted)


@by_format
@by_usage
def test_empty_like_takes_another_device_or_dtype(format, usage):
    q = quantized(format, usage)
    there = torch.empty_like(q, device="meta")
    assert (type(there), there.device.type) == (QuantizedTensor, "meta")
    narrow = torch.empty_like(q, dtype=torch.bfloat16)
    assert (type(narrow), narrow.dtype) == (QuantizedTensor, torch.bfloat16)
    assert narrow.nbytes == format.saved_bytes(33, 40, torch.bfloat16, usage)
    assert_identical(narrow.copy_(q.to(torch.bfloat16)), q.to(torch.bfloat16))
    for dtype in (torch.int32, torch.uint8, torch.bool):
        for make in (torch.empty_like, torch.zeros_like, torch.ones_like):
            whole = make(q, dtype=dtype)
            assert (type(whole), whole.dtype, whole.shape) == (Tensor, dtype, q.shape)


PLAIN = {
    "zeros_like": (torch.zeros_like, 0.0),
    "ones_like": (torch.ones_like, 1.0),
    "full_like": (lambda q: torch.full_like(q, 2.0), 2.0),
    "new_zeros": (lambda q: q.new_zeros(33, 40), 0.0),
    "new_full": (lambda q: q.new_full((33, 40), 3.0), 3.0),
    "zeros_like-preserve": (
        lambda q: torch.zeros_like(q, memory_format=torch.preserve_format),
        0.0,
    ),
}


@pytest.mark.parametrize(("make", "value"), PLAIN.values(), ids=PLAIN.keys())
@by_format
def test_fresh_values_like_a_quantized_tensor_are_plain(format, make, value):
    fresh = make(quantized(format, dtype=torch.bfloat16))
    assert type(fresh) is Tensor
    assert torch.equal(fresh, torch.full((33, 40), value, dtype=torch.bfloat16))


@by_format
def test_fresh_values_take_another_dtype_and_device(format):
    q = quantized(format)
    assert torch.zeros_like(q, dtype=torch.float64).dtype is torch.float64
    assert torch.zeros_like(q, device="meta").device.type == "meta"
    assert torch.randn_like(q).shape == torch.rand_like(q).shape == (33, 40)


@by_format
def test_new_memory_is_plain(format):
    q = quantized(format)
    for plain in (
        q.new_empty(q.shape),
        q.new_empty(40, 33),
        q.new_empty(q.shape, dtype=torch.int32),
    ):
        assert type(plain) is Tensor


# --- what an optimizer reads -------------------------------------------------------------------


@by_format
@by_grouping
@by_dtype
def test_a_multiple_is_added_to_plain_values_as_its_values_are(format, ends, dtype):
    q, x = quantized(format, ends=ends, dtype=dtype), torch.randn(33, 40).to(dtype)
    kept, wanted = q.clone(), x.add(q.dequantize(), alpha=0.1)
    for got in (x.add(q, alpha=0.1), torch._foreach_add([x], [q], alpha=0.1)[0]):
        assert type(got) is Tensor
        assert got.dtype is dtype
        assert torch.equal(got, wanted)
    assert torch.equal(x.clone().add_(q, alpha=0.1), wanted)
    assert_identical(q, kept)


@by_format
def test_the_norm_of_a_tensor_is_that_of_its_values(format):
    q = quantized(format)
    for order in (1, 2, float("inf")):
        assert torch.equal(q.norm(order), q.dequantize().norm(order))
    assert torch.equal(torch.linalg.vector_norm(q), q.dequantize().norm())
