"""Weights of copies find their rows, and those of rows their copies, wherever a buffer ends."""

from __future__ import annotations

import importlib

import pytest
import torch

from backstash import kernels
from backstash.errors import ShapeError
from interpreter import by_device, run_interpreted

NAN = float("nan")
by_size = pytest.mark.parametrize("size", [(1, 1), (63, 5), (700, 3), (0, 2)], ids=str)
by_room = pytest.mark.parametrize("room", [0.0, 0.3, 1.0, 1.7], ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.mark.slow
def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def make(size, room, dtype):
    copies = size[0] * size[1]
    weight_TK = torch.randn(size, dtype=dtype)
    return weight_TK, torch.randperm(copies).view(size), int(room * copies) + (room > 1)


def define_rows(weight_TK, slots_TK, rows):
    weight_R = torch.zeros(rows, dtype=weight_TK.dtype)
    for weight, slot in zip(weight_TK.flatten(), slots_TK.flatten().tolist(), strict=True):
        if slot < rows:
            weight_R[slot] = weight
    return weight_R


def define_copies(weight_R, slots_TK, valid):
    there = min(valid, len(weight_R))
    slots = slots_TK.flatten().tolist()
    weights = [weight_R[slot].item() if slot < there else 0 for slot in slots]
    return torch.tensor(weights, dtype=weight_R.dtype).view(slots_TK.shape)


@by_size
@by_room
@by_dtype
def test_a_weight_goes_to_its_row_if_there_is_room(size, room, dtype):
    weight, slots, rows = make(size, room, dtype)
    wanted = define_rows(weight, slots, rows)
    assert torch.equal(kernels.weights_to_rows(weight, slots, rows), wanted)


@by_size
@by_room
@pytest.mark.parametrize("share", [None, 0.0, 0.6, 1.0])
def test_a_copy_gets_the_weight_of_its_row_if_that_is_there(size, room, share):
    _, slots, rows = make(size, room, torch.float32)
    weight = torch.randn(rows)
    valid = rows if share is None else int(share * rows)
    weight[valid:] = NAN
    there = None if share is None else torch.tensor([valid], dtype=torch.int32)
    wanted = define_copies(weight, slots, valid)
    assert torch.equal(kernels.weights_to_copies(weight, slots, there), wanted)


@by_device
@by_size
@by_room
@by_dtype
def test_the_twins_move_the_same_numbers(size, room, dtype, device):
    twin = importlib.import_module("backstash.kernels.row_weights")
    weight, slots, rows = make(size, room, dtype)
    wanted_R = kernels.weights_to_rows(weight, slots, rows)
    got = twin.weights_to_rows(weight.to(device), slots.to(device), rows)
    assert torch.equal(got.cpu(), wanted_R)
    for valid in (None, torch.tensor([rows // 2], dtype=torch.int32), torch.tensor([rows + 5])):
        wanted = kernels.weights_to_copies(wanted_R, slots, valid)
        on = None if valid is None else valid.to(device)
        got = twin.weights_to_copies(wanted_R.to(device), slots.to(device), on)
        assert torch.equal(got.cpu(), wanted)


@by_device
def test_strides_are_followed(device):
    twin = importlib.import_module("backstash.kernels.row_weights")
    weight, slots = torch.randn(5, 7, device=device).t(), torch.randperm(35, device=device)
    slots = slots.view(5, 7).t()
    wanted = define_rows(weight.cpu(), slots.cpu(), 35)
    assert torch.equal(twin.weights_to_rows(weight, slots, 35).cpu(), wanted)
    one = torch.ones((), device=device).expand(35)
    assert twin.weights_to_copies(one, slots).eq(1).all()


def test_what_does_not_fit_is_refused_with_a_remedy():
    weight, slots = torch.ones(3, 2), torch.arange(6).view(3, 2)
    with pytest.raises(ShapeError, match="sort_by_expert returned"):
        kernels.weights_to_rows(weight, slots.view(2, 3), 6)
    with pytest.raises(ShapeError, match="sort_by_expert returned"):
        kernels.weights_to_copies(weight, slots)
