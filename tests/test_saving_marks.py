"""A buffer's valid length is found wherever autograd saves the buffer, and goes with it."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.saving import marks, saving, valid_rows
from saving_cases import Carrier, Declining, leaf

ROWS = 70


def rows(count: int = 40, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([count], dtype=dtype)


def marked(count: int = 40, shape: tuple[int, ...] = (ROWS, 6)) -> Tensor:
    h = torch.randn(shape, requires_grad=True) * 1
    bs.mark_grouped_tensor(h, rows(count))
    return h


def told(run: Callable[[], Any]) -> list[int | None]:
    handler = Declining()
    with saving(handler):
        run()
    return [None if r is None else int(r) for r in handler.rows]


def test_a_handler_is_told_the_rows_of_what_a_native_operation_saves() -> None:
    h = marked()
    assert told(lambda: F.silu(h)) == [40]
    assert told(lambda: F.gelu(h)) == [40]
    assert told(lambda: h * h) == [40, 40]
    assert told(lambda: F.silu(torch.randn(ROWS, 6, requires_grad=True))) == [None]


def test_a_handler_is_told_the_rows_of_what_a_function_saves() -> None:
    h = marked()
    assert told(lambda: Carrier(h, torch.ones(ROWS, 6))(leaf())) == [40, None]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "without_reentry"])
def test_a_handler_is_told_the_rows_of_the_input_of_a_checkpoint(reentrant: bool) -> None:
    h = marked()
    assert told(lambda: checkpoint(F.silu, h, use_reentrant=reentrant)).count(40) == 1


SAME_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda h: h,
    "detached": lambda h: h.detach(),
    "viewed": lambda h: h.view(ROWS, 3, 2),
    "data": lambda h: h.data,
    "first_columns": lambda h: h[:, :3],
    "last_columns": lambda h: h[:, 3:],
    "unsqueezed": lambda h: h.unsqueeze(1),
    "as_bytes": lambda h: h.detach().view(torch.uint8),
}
OTHER_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda h: h.view(-1),
    "first_rows": lambda h: h[:50],
    "later_rows": lambda h: h[10:],
    "every_other_row": lambda h: h[::2],
    "transposed": lambda h: h.t(),
    "folded": lambda h: h.view(ROWS // 2, 12),
    "one_element": lambda h: h[0, 0],
    "a_copy": lambda h: h.clone(),
}


@pytest.mark.parametrize("view", SAME_ROWS.values(), ids=SAME_ROWS)
def test_a_view_of_the_same_rows_has_their_length(view: Callable[[Tensor], Tensor]) -> None:
    found = valid_rows(view(marked()))
    assert found is not None
    assert found.tolist() == [40]


@pytest.mark.parametrize("view", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_a_view_of_other_rows_has_no_length(view: Callable[[Tensor], Tensor]) -> None:
    assert valid_rows(view(marked())) is None


def test_a_square_buffer_is_not_taken_for_its_transpose() -> None:
    h = marked(shape=(9, 9), count=4)
    assert valid_rows(h) is not None
    assert valid_rows(h.t()) is None


def test_a_marked_part_of_a_larger_buffer_is_found_by_its_place() -> None:
    buffer = torch.zeros(2 * ROWS, 6)
    bs.mark_grouped_tensor(buffer[ROWS:], rows())
    assert valid_rows(buffer[ROWS:]) is not None
    assert valid_rows(buffer[:ROWS]) is None
    assert valid_rows(buffer) is None


def test_a_second_mark_replaces_the_first() -> None:
    h = marked(40)
    bs.mark_grouped_tensor(h, rows(7))
    assert int(valid_rows(h)) == 7  # pyright: ignore[reportArgumentType]


def test_the_length_is_the_tensor_itself_and_can_still_change() -> None:
    length = rows(3)
    h = torch.zeros(ROWS, 6)
    bs.mark_grouped_tensor(h, length)
    length.fill_(5)
    assert int(valid_rows(h)) == 5  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_any_integer_of_one_element_is_a_length(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    h = torch.zeros(ROWS, 6)
    bs.mark_grouped_tensor(h, torch.full(shape, 9, dtype=dtype))
    found = valid_rows(h)
    assert found is not None
    assert (found.shape, int(found)) == ((1,), 9)


def test_the_mark_and_its_length_go_with_the_storage() -> None:
    gc.disable()
    try:
        h, length = torch.zeros(ROWS, 6), rows()
        bs.mark_grouped_tensor(h, length)
        storages = [weakref.ref(t.untyped_storage()) for t in (h, length)]
        view = h[:, 1:]
        del h, length
        assert [s() is None for s in storages] == [False, False]
        del view
        assert [s() is None for s in storages] == [True, True]
    finally:
        gc.enable()


def test_new_buffers_never_have_the_mark_of_an_old_one() -> None:
    for _ in range(200):
        bs.mark_grouped_tensor(torch.zeros(ROWS, 6), rows())
        assert valid_rows(torch.zeros(ROWS, 6)) is None


def test_marking_sticks_nothing_on_the_tensor() -> None:
    assert vars(marked()) == {}


NO_PREFIX: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.zeros(6, ROWS).t(),
    "columns": lambda: torch.zeros(ROWS, 6)[:, :3],
    "every_other_row": lambda: torch.zeros(ROWS, 6)[::2],
    "expanded": lambda: torch.zeros(1, 6).expand(ROWS, 6),
    "scalar": lambda: torch.tensor(1.0),
    "sparse": lambda: torch.eye(ROWS).to_sparse(),
    "compressed": lambda: torch.eye(ROWS).to_sparse_csr(),
    "quantized": lambda: bs.MXFP8.quantize(torch.zeros(ROWS, 6)),
    "foreign_wrapper": lambda: TwoTensor(torch.zeros(ROWS, 6), torch.zeros(ROWS, 6)),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("make", NO_PREFIX.values(), ids=NO_PREFIX)
def test_a_buffer_without_a_valid_prefix_is_refused(make: Callable[[], Tensor]) -> None:
    with pytest.raises(bs.LayoutError):
        bs.mark_grouped_tensor(make(), rows())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_tensor_has_no_length(layout: str) -> None:
    keep = marked()
    assert valid_rows(getattr(torch.eye(ROWS), layout)()) is None
    assert valid_rows(keep) is not None


@pytest.mark.parametrize(
    "length",
    [
        None,
        3,
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([1j]),
        torch.tensor([1, 2]),
        torch.tensor([], dtype=torch.int32),
    ],
    ids=["none", "int", "float", "bool", "complex", "two", "empty"],
)
def test_a_length_that_is_no_integer_of_one_element_is_refused(length: Any) -> None:
    with pytest.raises(bs.DtypeError, match="integer tensor of one element"):
        bs.mark_grouped_tensor(torch.zeros(ROWS, 6), length)


def test_a_negative_length_is_refused_where_the_host_sees_it() -> None:
    with pytest.raises(bs.ShapeError, match="zero or more, got -1"):
        bs.mark_grouped_tensor(torch.zeros(ROWS, 6), rows(-1))


def test_a_length_on_another_device_is_refused() -> None:
    with pytest.raises(bs.DeviceError, match="device of the buffer"):
        bs.mark_grouped_tensor(torch.zeros(ROWS, 6, device="meta"), rows())


def test_a_grouped_tensor_knows_its_rows() -> None:
    grouped = bs.GroupedTensor.from_counts(torch.zeros(ROWS, 6), [3, 0, 38])
    with pytest.raises(bs.LayoutError, match="knows its own rows"):
        bs.mark_grouped_tensor(grouped, rows())
    bs.mark_grouped_tensor(grouped)
    assert int(valid_rows(grouped.data)) == 41  # pyright: ignore[reportArgumentType]


COUNTS = {
    "ragged": [3, 0, 33, 1],
    "all_empty": [0, 0, 0, 0],
    "one_has_everything": [0, ROWS, 0, 0],
    "one_row_each": [1, 1, 1, 1],
    "whole_blocks": [32, 0, 32, 0],
    "more_than_fit": [60, 60, 1, 1],
}


def _clamped(counts: list[int]) -> list[int]:
    ends = [min(end, ROWS) for end in itertools.accumulate(counts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("how", ["marked", "saved"])
def test_every_buffer_of_a_grouped_mxfp8_tensor_has_its_own_length(
    counts: list[int], how: str
) -> None:
    grouped = bs.MXFP8.quantize(
        bs.GroupedTensor.from_counts(torch.randn(ROWS, 6), counts), usage=bs.Usage.BOTH
    )
    data = grouped.data
    assert isinstance(data, bs.QuantizedTensor)
    if how == "marked":
        bs.mark_grouped_tensor(grouped)
    else:
        told(lambda: Carrier(grouped)(leaf()))
    valid = sum(_clamped(counts))
    blocks = sum(-(-m // 32) for m in _clamped(counts))
    assert {name: int(valid_rows(buffer)) for name, buffer in data.buffers.items()} == {  # pyright: ignore[reportArgumentType]
        "row_codes": valid,
        "row_scales": valid,
        "column_codes": valid,
        "column_scales": blocks,
    }


@pytest.mark.parametrize("format", [bs.FLOAT8_CURRENT, bs.FLOAT8_DELAYED], ids=lambda f: f.name)
def test_the_scales_of_a_grouped_float8_tensor_are_all_real(format: bs.Format) -> None:
    grouped = format.quantize(bs.GroupedTensor.from_counts(torch.randn(ROWS, 6), [3, 0, 38]))
    assert sorted(told(lambda: Carrier(grouped)(leaf())), key=str) == [41, None, None, None]


def test_no_length_past_the_valid_rows_is_needed() -> None:
    """Bytes past a buffer's valid rows may be anything: nothing that comes back changes."""

    class Poison(Declining):
        def pack(self, tensor: Tensor, rows: Tensor | None) -> Any:
            kept = tensor.clone()
            if rows is not None:
                kept[int(rows) :] = 255 if kept.dtype is torch.uint8 else float("nan")
            return [kept]

        def unpack(self, handle: Any) -> Tensor:
            return handle[0]

    for format in (None, bs.MXFP8, bs.FLOAT8_CURRENT, bs.FLOAT8_DELAYED):
        grouped = bs.GroupedTensor.from_counts(torch.randn(ROWS, 6), [3, 0, 38])
        if format is not None:
            grouped = format.quantize(grouped, usage=bs.Usage.COLUMNWISE)
        carrier = Carrier(grouped)
        with saving(Poison()):
            y = carrier(leaf()).sum()
        y.backward()
        carrier.check()


def test_a_mark_is_not_that_of_a_storage_which_got_the_id_of_a_freed_one() -> None:
    old, new = marked(), torch.randn(ROWS, 6)
    key = id(new.untyped_storage())
    # As if the new storage had been given the id of the old one before the old mark went.
    entry = marks._MARKS[id(old.untyped_storage())]
    marks._MARKS[key] = entry
    assert valid_rows(new) is None
    bs.mark_grouped_tensor(new, rows(7))
    # The news that the old one has gone comes late: the new mark stays.
    marks._forget(marks._MARKS, key, entry[0])
    found = valid_rows(new)
    assert found is not None
    assert int(found) == 7
