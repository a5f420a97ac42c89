"""Which bytes a saved tensor needs: a run of whole rows, or nothing at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash.stash.region import region_of

X = torch.arange(96.0).view(12, 8)


def restored(tensor: Tensor, *, marked: bool) -> Tensor | None:
    region = region_of(tensor, marked=marked)
    return None if region is None else region.view.of(region.bytes_of(tensor).clone())


WHOLE = {
    "a matrix": X,
    "rows of a larger buffer": X[3:7],
    "bf16": X.bfloat16()[2:],
    "complex": torch.randn(4, 3, dtype=torch.complex64),
    "bool": X > 40,
    "one number": torch.tensor(3.0),
    "bytes at an odd address": torch.arange(40, dtype=torch.uint8)[3:],
}


@pytest.mark.parametrize("tensor", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("marked", [False, True], ids=["whole", "marked"])
def test_a_contiguous_tensor_is_its_own_bytes(tensor: Tensor, marked: bool) -> None:
    if marked and tensor.ndim == 0:
        return
    region = region_of(tensor, marked=marked)
    assert region is not None
    assert region.place.nbytes == tensor.nbytes
    assert region.row_bytes == (tensor[0].nbytes if marked else tensor.nbytes)
    back = restored(tensor, marked=marked)
    assert back is not None
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


DENSE = {
    "transposed": X.t(),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed part": X[4:].t(),
}


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE)
def test_a_dense_tensor_keeps_its_strides_as_a_whole(tensor: Tensor) -> None:
    back = restored(tensor, marked=False)
    assert back is not None
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


def test_marked_columns_are_no_rows_and_refused() -> None:
    assert region_of(X.t(), marked=True) is None


def test_rows_within_rows_are_taken_with_what_lies_between() -> None:
    for tensor in (X[::2], DENSE["channels last"]):
        back = restored(tensor, marked=True)
        assert back is not None
        assert torch.equal(back, tensor)


def test_columns_of_a_marked_buffer_share_its_bytes() -> None:
    gate, up = X.clone().chunk(2, dim=1)
    regions = [region_of(half, marked=True) for half in (gate, up)]
    assert regions[0] is not None
    assert regions[1] is not None
    assert regions[0].place == regions[1].place
    assert regions[0].row_bytes == 8 * 4
    for half in (gate, up):
        back = restored(half, marked=True)
        assert back is not None
        assert torch.equal(back, half)


REFUSED = {
    "columns, unmarked": (X[:, :4], False),
    "columns of a part of a buffer": (X[:6, :4], True),
    "every fifth row": (X[::5], True),
    "rows that overlap": (X.as_strided((4, 8), (4, 1)), True),
    "expanded": (X[:1].expand(4, 8), False),
    "no elements": (X[:0], True),
    "sparse": (X.to_sparse(), False),
    "conjugated": (torch.randn(3, dtype=torch.complex64).conj(), False),
    "a subclass": (torch.nn.Parameter(X), False),
}


@pytest.mark.parametrize(("tensor", "marked"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_run_of_bytes_is_refused(tensor: Tensor, marked: bool) -> None:
    assert region_of(tensor, marked=marked) is None


def test_a_change_in_place_makes_another_version_of_the_same_place() -> None:
    x = X.clone()
    before = region_of(x, marked=True)
    x.add_(1)
    after = region_of(x, marked=True)
    assert before is not None
    assert after is not None
    assert before.place == after.place
    assert before.version != after.version
