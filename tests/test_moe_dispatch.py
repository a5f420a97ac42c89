"""Rows to the experts of one rank and back, against a loop over tokens and their copies."""

import pytest
import torch

from backstash.moe import Local, Losses, Routing, combine_rows
from backstash.nn import RowMap
from backstash.saving import Meter, saving

H, E = 5, 4
CHOICES = {
    "random": [[2, 0], [1, 3], [3, 2], [0, 1], [1, 0]],
    "one-expert-has-everything": [[1]] * 63,
    "an-expert-has-nothing": [[0, 3], [3, 0], [0, 1]],
    "every-expert": [[3, 1, 0, 2]],
    "no-tokens": [],
}
by_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())


def make(choice):
    expert = torch.tensor(choice, dtype=torch.int64).reshape(len(choice), -1 if choice else 2)
    counts = torch.bincount(expert.flatten(), minlength=E).int()
    prob = torch.rand(expert.shape, requires_grad=True)
    x = torch.randn(len(choice), H, dtype=torch.float64, requires_grad=True)
    return x, Routing(expert, prob, counts, Losses())


@by_choice
def test_tokens_go_as_they_are_with_a_map_and_a_weight_for_each_row(choice):
    x, routing = make(choice)
    sent = Local().dispatch(x, routing)
    assert sent.x is x
    assert sent.rows is not None
    assert torch.equal(sent.counts_E, routing.counts_E)
    assert torch.equal(sent.prob_R[sent.rows.slots_TK], routing.prob_TK)
    experts = [e for e, count in enumerate(sent.counts_E.tolist()) for _ in range(count)]
    assert [
        experts[r] for r in sent.rows.slots_TK.flatten()
    ] == routing.expert_TK.flatten().tolist()


@by_choice
def test_the_gradient_of_a_weight_is_that_of_its_row(choice):
    x, routing = make(choice)
    sent = Local().dispatch(x, routing)
    assert sent.rows is not None
    dprob = torch.randn(sent.prob_R.shape)
    (got,) = torch.autograd.grad(sent.prob_R, routing.prob_TK, dprob)
    assert torch.equal(got, dprob[sent.rows.slots_TK])


@by_choice
def test_combining_adds_up_each_tokens_rows_and_gives_each_row_its_tokens_gradient(choice):
    x, routing = make(choice)
    sent = Local().dispatch(x, routing)
    assert sent.rows is not None
    y_RH = torch.randn(sent.rows.rows, H, dtype=torch.float64, requires_grad=True)
    y_TH = combine_rows(y_RH, sent.rows)
    wanted = torch.zeros_like(x)
    for t, slots in enumerate(sent.rows.slots_TK.tolist()):
        for r in slots:
            wanted[t] = wanted[t] + y_RH[r]
    assert torch.equal(y_TH, wanted)
    dy = torch.randn_like(y_TH)
    (got,) = torch.autograd.grad(y_TH, y_RH, dy)
    assert torch.equal(got, dy[sent.rows.source_R])


def test_combining_keeps_nothing_but_row_numbers():
    source, slots = torch.arange(63) // 3, torch.arange(63).reshape(21, 3)
    y = torch.randn(63, H, requires_grad=True)
    meter = Meter()
    with saving(meter):
        combine_rows(y, RowMap(source, slots))
    assert meter.bytes == source.nbytes


def test_what_the_experts_have_added_up_passes_unchanged():
    x, routing = make(CHOICES["random"])
    y = torch.randn(len(x), H)
    assert Local().combine(y, Local().dispatch(x, routing)) is y
