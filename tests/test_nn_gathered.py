"""Rows that are copies of tokens give the bits of copies, whole or in pieces."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.formats import FLOAT8_ROWWISE, Usage
from backstash.nn import GroupedMLP, RowMap, gathered
from backstash.nn.gathered import Gathered
from backstash.tensors import QuantizedTensor

T, K, G = 40, 2, 3


def whole(*shape: int) -> Tensor:
    """Small whole numbers: their sums are exact in any order, as a CPU's matmul needs it here."""
    return torch.randint(-4, 5, shape).float()


def row_map() -> tuple[RowMap, Tensor]:
    expert_TK = torch.stack([torch.randperm(G)[:K] for _ in range(T)])
    source_R, slots_TK, counts_G = kernels.sort_by_expert(expert_TK, G)
    return RowMap(source_R, slots_TK), counts_G


@pytest.fixture(params=[1, 6_000, 2**27], ids=["many", "some", "one"])
def pieces(request: Any, monkeypatch: Any) -> int:
    """The most bytes of a piece."""
    monkeypatch.setattr(gathered, "_PIECE_BYTES", request.param)
    monkeypatch.setattr(gathered, "_UNIT", 8)
    return request.param


def test_pieces_follow_one_another(pieces: int) -> None:
    found = list(gathered._pieces(30, 4 * T * K))
    assert [i for piece in found for i in range(30)[piece]] == list(range(30))
    assert len(found) == {1: 4, 6_000: 2, 2**27: 1}[pieces]
    assert list(gathered._pieces(0, 4)) == [slice(0, 0)]


def test_gathered_rows_are_copies_of_the_tokens() -> None:
    values, source = whole(T, 30), torch.arange(T * K) // K
    rows = Gathered(values, source)
    assert (rows.shape, rows.dtype) == ((T * K, 30), torch.float32)
    assert torch.equal(gathered.matrix(rows), values[source])
    assert gathered.matrix(values) is values


def test_gathered_codes_are_those_of_the_gathered_rows() -> None:
    values, source = torch.randn(T, 30), torch.randint(0, T, (T * K,))
    tokens = FLOAT8_ROWWISE.quantize(values, usage=Usage.ROWWISE)
    found = gathered.matrix(Gathered(tokens, source))
    wanted = FLOAT8_ROWWISE.quantize(values[source], usage=Usage.ROWWISE)
    assert isinstance(found, QuantizedTensor)
    assert found.shape == wanted.shape
    for name, buffer in wanted.buffers.items():
        assert torch.equal(found.buffers[name], buffer)


@pytest.mark.parametrize("side", ["gradient", "input"])
def test_a_weight_gradient_of_gathered_rows_is_that_of_copies(side: str) -> None:
    rows, counts_G = row_map()
    ends_G = counts_G.cumsum(0).int()
    tokens, other = Gathered(whole(T, 30), rows.source_R), whole(T * K, 20)
    one, two = (tokens, other) if side == "gradient" else (other, tokens)
    wanted = kernels.grouped_mm_dw(gathered.matrix(one), gathered.matrix(two), ends_G)
    assert torch.equal(gathered.weight_gradient(one, two, ends_G), wanted)


def test_a_token_gradient_in_pieces_is_the_whole_one(pieces: int) -> None:
    rows, counts_G = row_map()
    ends_G = counts_G.cumsum(0).int()
    dy, weight = whole(T * K, 20), whole(G, 20, 30)
    wanted = kernels.unpermute(kernels.grouped_mm_dx(dy, weight, ends_G), rows.slots_TK)
    assert torch.equal(gathered.token_gradient(dy, weight, ends_G, rows.slots_TK), wanted)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_an_expert_layer_in_pieces_is_the_whole_one(later: bool, monkeypatch: Any) -> None:
    rows, counts_G = row_map()
    x, dy, prob = whole(T, 24), whole(T, 24), whole(T * K)
    results = []
    monkeypatch.setattr(gathered, "_UNIT", 8)
    for piece_bytes in (2**27, 1):
        monkeypatch.setattr(gathered, "_PIECE_BYTES", piece_bytes)
        torch.manual_seed(3)
        module = GroupedMLP(G, 24, 16, activation="reglu", delay_wgrad_compute=later)
        for weight in module.parameters():
            weight.data.copy_(whole(*weight.shape))
        leaves = x.clone().requires_grad_(), prob.clone().requires_grad_()
        y = module(leaves[0], counts_G, leaves[1], rows=rows, combined=True)
        y.backward(dy)
        if later:
            module.backward_dw()
        results.append([y.detach(), *(leaf.grad for leaf in (*leaves, *module.parameters()))])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("retain", [False, True], ids=["freed", "retained"])
def test_the_preactivation_goes_before_the_first_weights_gradient_is_made(
    retain: bool, monkeypatch: Any
) -> None:
    rows, counts_G = row_map()
    module, kept, alive = GroupedMLP(G, 24, 16), [], []

    def watch(name: str) -> None:
        multiply = getattr(kernels, name)
        look = lambda *args: alive.append(kept[0]() is not None) or multiply(*args)  # noqa: E731
        monkeypatch.setattr(kernels, name, look)

    watch("gathered_mm_dw_of_input")
    watch("gathered_mm_dw_of_output")

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (T * K, 32):
            kept.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(whole(T, 24), counts_G, rows=rows, combined=True)
    first, *again = (
        torch.autograd.grad(y.sum(), module.fc1_weight, retain_graph=retain)[0]
        for _ in range(1 + retain)
    )
    # Once for each of the two weights, in each backward.
    assert alive == [retain] * 2 * (1 + retain)
    assert all(torch.equal(first, other) for other in again)


@pytest.mark.parametrize("way", ["freed", "retained", "hooked"])
def test_gradients_take_the_place_of_what_nobody_else_can_read(way: str, monkeypatch: Any) -> None:
    rows, counts_G = row_map()
    module, in_place = GroupedMLP(G, 24, 16), []
    differentiate = kernels.activate_backward

    def watch(da: Tensor, h: Tensor, prob: Any, name: str, into: Any, ends_G: Tensor) -> Any:
        in_place.append((into.dh_TF is h, into.a_TI is da))
        return differentiate(da, h, prob, name, into, ends_G)

    monkeypatch.setattr(kernels, "activate_backward", watch)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with hooks if way == "hooked" else contextlib.nullcontext():
        y = module(whole(T, 24), counts_G, rows=rows, combined=True)
    y.sum().backward(retain_graph=way == "retained")
    assert in_place == [(way == "freed", True)]
