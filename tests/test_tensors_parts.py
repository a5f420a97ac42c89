"""Rows of a quantized tensor: the same memory, exactly the same values, or a clear error."""

# pyright: reportPrivateImportUsage=false

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from backstash.errors import LayoutError, ModifiedError
from backstash.formats import (
    FLOAT8_CURRENT,
    FLOAT8_ROWWISE,
    HIGH_PRECISION,
    MXFP8,
    NVFP4,
    BufferSpec,
    Usage,
)
from backstash.saving import prepare_for_saving, restore_from_saved
from backstash.tensors import QuantizedTensor, from_plain, to_plain
from backstash.tensors.parts import part
from format_cases import (
    USAGES,
    assert_identical,
    by_format,
    by_usage,
    name_of,
    parts,
    pointers,
    quantized,
)

ROWS, COLUMNS = 300, 40
RANGES = {
    "first-blocks": slice(0, 128),
    "last-block-is-ragged": slice(256, 300),
    "a-block": slice(128, 256),
    "one-row": slice(7, 8),
    "inside-of-blocks": slice(3, 133),
    "no-rows": slice(5, 5),
}
by_range = pytest.mark.parametrize("rows", RANGES.values(), ids=RANGES.keys())
WHOLE_BLOCKS = ("first-blocks", "last-block-is-ragged", "a-block", "no-rows")


def whole(format, usage=Usage.BOTH, shape=(ROWS, COLUMNS)):
    return quantized(format, usage, shape=shape)


def is_kept(format, usage, rows) -> bool:
    """Whether a format can show these rows by themselves, from what the documentation says."""
    if format.name == "hybrid":
        return all(is_kept(format.along(side), side, rows) for side in usage)
    if format.name == "nvfp4" and not format.two_d and Usage.COLUMNWISE in usage:
        return False
    block = getattr(format, "block", 1)
    lines_only = usage is Usage.ROWWISE and not getattr(format, "two_d", False)
    aligned = rows.start % block == 0 and (rows.stop % block == 0 or rows.stop == ROWS)
    return lines_only or aligned or rows.start == rows.stop


@by_format
@by_usage
@by_range
def test_rows_are_the_same_memory_and_the_same_values_or_an_error(format, usage, rows):
    q = whole(format, usage)
    if not is_kept(format, usage, rows):
        with pytest.raises(LayoutError, match=r"dequantize\(\) first"):
            q[rows]
        return
    got = q[rows]
    assert isinstance(got, QuantizedTensor)
    assert got.shape == (rows.stop - rows.start, COLUMNS)
    assert (got.format, got.usage, got.dtype) == (format, usage, q.dtype)
    for name, buffer in got.buffers.items():
        assert buffer.untyped_storage().data_ptr() == q.buffers[name].untyped_storage().data_ptr()
    for side in usage:
        assert torch.equal(got.dequantize(side), q.dequantize(side)[rows])
    came = {name: BufferSpec(tuple(b.shape), b.dtype) for name, b in got.buffers.items()}
    assert came == format.buffers(len(got), COLUMNS, q.dtype, usage, None)
    # What is shared is there in full, all else is a part.
    assert set(got.shared) == {n for n, b in got.buffers.items() if b is q.buffers[n]}


@by_format
@by_usage
def test_rows_with_scales_of_their_own_are_what_quantizing_them_alone_gives(format, usage):
    x = torch.randn(ROWS, COLUMNS)
    q = format.quantize(x, usage)
    for rows in (RANGES[name] for name in WHOLE_BLOCKS):
        if is_kept(format, usage, rows) and not q[rows].shared:
            assert_identical(q[rows], format.quantize(x[rows], usage))


WAYS = {
    "slice": lambda t: [t[1:3], t[:1], t[-2:]],
    "select": lambda t: [t[2], t[-1], t[1, 2], t.select(0, 0)],
    "split": lambda t: t.split(2),
    "split-sizes": lambda t: t.split([1, 0, 3]),
    "chunk": lambda t: t.chunk(2),
    "tensor-split": lambda t: t.tensor_split(3),
    "narrow": lambda t: [t.narrow(0, 1, 2)],
    "unbind": lambda t: t.unbind(),
    "iteration": list,
    "everything": lambda t: [t[:], t[0:99], t[..., :], t[:, :, :]],
    "one-step": lambda t: [t[0:1:7], t[3::2]],
    "inner": lambda t: [t[2:3][:, 1:], t[2:3].select(1, 0)],
    "unsqueeze": lambda t: [t[None], t.unsqueeze(1), t[1:2].squeeze(), t[1:2].squeeze(0)],
}


@pytest.mark.parametrize("take", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("format", [MXFP8, FLOAT8_CURRENT, HIGH_PRECISION], ids=name_of)
def test_every_way_of_taking_rows_takes_those_of_a_plain_tensor(format, take):
    q = whole(format, Usage.ROWWISE, (4, 3, COLUMNS))
    got, wanted = take(q), take(q.dequantize())
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert isinstance(mine, QuantizedTensor)
        assert torch.equal(mine.dequantize(), theirs)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    ranges=st.lists(st.tuples(st.integers(-7, 7), st.integers(-7, 7)), max_size=3),
    index=st.integers(-6, 5),
)
@pytest.mark.parametrize("format", [MXFP8, NVFP4, FLOAT8_CURRENT], ids=name_of)
def test_any_ranges_of_ranges_are_those_of_a_plain_tensor(format, shape, ranges, index):
    q = whole(format, Usage.ROWWISE, (*shape, COLUMNS))
    plain = q.dequantize()
    for start, end in ranges:
        q, plain = q[start:end], plain[start:end]
        assert torch.equal(q.dequantize(), plain)
    if -len(plain) <= index < len(plain):
        assert torch.equal(q[index].dequantize(), plain[index])


REFUSED = {
    "columns": lambda q: q[:, :, :20],
    "one-column": lambda q: q[:, :, 1],
    "inner-rows": lambda q: q[:, 1],
    "inner-range": lambda q: q[:, 0:2],
    "steps": lambda q: q[::2],
    "split-columns": lambda q: q.split(20, dim=-1),
    "split-inner": lambda q: q.chunk(3, dim=1),
    "unbind-columns": lambda q: q.unbind(2),
    "value": lambda q: q[0, 1, 2],
    "columns-come-last": lambda q: q.unsqueeze(-1),
}


@pytest.mark.parametrize("take", REFUSED.values(), ids=REFUSED.keys())
@by_format
def test_what_is_not_whole_rows_in_a_row_is_refused(format, take):
    # Tiles are refused for the cut of the first dimension already.
    with pytest.raises(LayoutError, match=r"take (a range of the first dimension|multiples of)"):
        take(whole(format, Usage.ROWWISE, (4, 3, COLUMNS)))


def test_places_that_are_not_there_are_torchs_errors():
    q = whole(MXFP8, Usage.ROWWISE, (4, 3, COLUMNS))
    with pytest.raises(IndexError):
        q[4]
    with pytest.raises(RuntimeError, match="sum exactly to 4"):
        q.split([3, 3])


@by_format
def test_groups_are_taken_as_members(format):
    q = quantized(format, ends=[31, 31, 33])
    with pytest.raises(LayoutError, match=r"take GroupedTensor.members\(\)"):
        q[:31]
    assert pointers(q[:]) == pointers(q.unsqueeze(0)) == pointers(q)


@by_format
@by_usage
def test_a_part_of_a_part_is_one_of_the_whole(format, usage):
    q = whole(format, usage)
    if is_kept(format, usage, slice(128, 256)):
        assert_identical(q[:256][128:256], q[128:256])
        assert q[:256][128:256].shared == q[128:256].shared


@by_format
def test_no_columns_still_have_rows(format):
    assert format.quantize(torch.ones(ROWS, 0))[128:256].shape == (128, 0)


# --- writing -----------------------------------------------------------------------------------

WRITES = {
    "copy": lambda t: t.copy_(torch.full_like(t, 3.0)),
    "mul": lambda t: t.mul_(2),
    "zero": lambda t: t.zero_(),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "bytes": lambda t: t.copy_(t.clone().fill_(7.0)),
}
by_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


@by_write
@by_format
@by_usage
def test_writing_rows_writes_those_of_the_whole_or_is_refused(format, usage, write):
    rows = slice(128, 256)
    if not is_kept(format, usage, rows):
        return
    q = whole(format, usage)
    before, one = q.clone(), q[rows]
    if one.shared:
        with pytest.raises(LayoutError, match=r"share .* clone\(\) the rows"):
            write(one)
        assert_identical(q, before)
        write(one.clone())
        assert_identical(q, before)
        return
    wanted = one.clone()
    write(wanted)
    versions = [buffer._version for buffer in q.buffers.values()], q._version
    write(one)
    assert_identical(one, wanted)
    for side in usage:
        values = q.dequantize(side)
        assert torch.equal(values[rows], wanted.dequantize(side))
        assert torch.equal(values[:128], before.dequantize(side)[:128])
        assert torch.equal(values[256:], before.dequantize(side)[256:])
    assert all(b._version > v for b, v in zip(q.buffers.values(), versions[0], strict=True))
    assert q._version > versions[1]


def test_writing_the_whole_is_seen_by_its_parts():
    q = whole(FLOAT8_CURRENT)
    one = q[3:9]
    x = 100 * torch.randn(ROWS, COLUMNS)
    q.copy_(x)
    assert torch.equal(one.dequantize(), FLOAT8_CURRENT.quantize(x).dequantize()[3:9])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="without torch.distributed")
def test_a_part_that_shares_a_scale_is_neither_sent_nor_received():
    one = whole(FLOAT8_CURRENT)[:7]
    with pytest.raises(LayoutError, match=r"share scale_inv with others"):
        QuantizedTensor.run_operation(torch.ops.c10d.broadcast_.default, ([one], None, 0), {})


VIEWS = {
    "rows": (MXFP8, lambda q: q[32:64]),
    "split": (FLOAT8_ROWWISE, lambda q: q.only(Usage.ROWWISE).split(10)[2]),
    "leading": (MXFP8, lambda q: q.view(10, 30, COLUMNS)),
    "other-columns": (FLOAT8_CURRENT, lambda q: q.view(-1, 20)),
}


@pytest.mark.parametrize(("format", "view"), VIEWS.values(), ids=VIEWS.keys())
def test_a_write_through_a_view_is_noticed_by_what_saved_the_whole(format, view):
    q = whole(format)
    taken = view(q)

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved, ctx.plan = prepare_for_saving(q)
            ctx.save_for_backward(*saved)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            restore_from_saved(ctx.plan, ctx.saved_tensors)
            return dy

    x = torch.ones(3, requires_grad=True)
    y = Keep.apply(x)
    taken.zero_()
    with pytest.raises((ModifiedError, RuntimeError), match=r"modified by an inplace|in place"):
        y.sum().backward()


# --- keeping -----------------------------------------------------------------------------------


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


KEEP = {
    "torch-save": through_torch_save,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
    "to": lambda value: value.to(torch.float32, copy=True),
}


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP.keys())
@by_format
@pytest.mark.parametrize("usage", [USAGES[0]], ids=lambda usage: usage.name)
def test_a_part_that_is_kept_is_a_tensor_of_its_own(format, usage, keep):
    q = whole(format, usage)
    again = keep(q[128:256])
    assert_identical(again, q[128:256])
    assert not pointers(again) & pointers(q)
    assert again.shared == ()
    again.zero_()
    assert q.dequantize().any()


def test_a_part_goes_into_a_file_alone(tmp_path):
    state = {"part": whole(NVFP4, Usage.ROWWISE)[16:48], "plain": torch.ones(2)}
    plain, metadata = to_plain(state)
    save_file(plain, tmp_path / "x", metadata=metadata)
    again = from_plain(load_file(tmp_path / "x"), metadata)["part"]
    assert_identical(again, state["part"])
    assert sum(buffer.nbytes for buffer in parts(again).values()) == state["part"].nbytes


def test_parts_of_one_tensor_go_into_one_file(tmp_path):
    first, second = whole(MXFP8).split([128, 172])
    plain, metadata = to_plain({"first": first, "second": second})
    save_file(plain, tmp_path / "x", metadata=metadata)
    again = from_plain(load_file(tmp_path / "x"), metadata)
    assert_identical(again["first"], first)
    assert_identical(again["second"], second)


def test_memory_like_a_part_is_ready_for_its_values():
    one = whole(FLOAT8_CURRENT)[:7]
    assert_identical(torch.empty_like(one).copy_(one), one.clone())
    assert one.detach().shared == one.view(7, 1, COLUMNS).shared == ("scale_inv",)
    assert whole(FLOAT8_ROWWISE)[:7].only(Usage.ROWWISE).shared == ()


# --- gradients ---------------------------------------------------------------------------------


class Read(torch.autograd.Function):
    """The values of a tensor, with a gradient of ones."""

    @staticmethod
    def forward(ctx, t):
        return t.dequantize()

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.parametrize("format", [MXFP8, FLOAT8_CURRENT], ids=name_of)
def test_the_gradient_of_rows_goes_to_those_of_the_parameter(format):
    parameter = nn.Parameter(whole(format))
    one, other = parameter[32:64], parameter.split([64, 224, 12])[2]
    assert one._is_view()
    assert one.requires_grad
    (Read.apply(one).sum() + 2 * Read.apply(other).sum()).backward()
    wanted = torch.zeros(ROWS, COLUMNS)
    wanted[32:64], wanted[288:] = 1, 2
    assert type(parameter.grad) is torch.Tensor
    assert torch.equal(parameter.grad, wanted)


def test_a_part_of_a_parameter_is_written_as_one_of_a_plain_parameter():
    parameter = nn.Parameter(whole(MXFP8))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        parameter[:32].zero_()
    with torch.no_grad():
        parameter[:32].zero_()
    assert not parameter.dequantize()[:32].any()


def test_rows_can_be_taken_in_a_graph():
    def step(x):
        return [rows.dequantize() for rows in MXFP8.quantize(x).split(2)]

    x = torch.randn(5, COLUMNS)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert all(map(torch.equal, got, step(x)))


def test_in_inference_nothing_is_counted_and_rows_are_taken_and_written():
    with torch.inference_mode():
        q = whole(MXFP8)
        q[:32].zero_()
        assert not q.dequantize()[:32].any()


def test_a_view_of_all_rows_is_no_part():
    q = whole(NVFP4)
    assert part(q, torch.empty(10, 30, COLUMNS, device="meta")).shared == ()
