"""Choosing and weighing experts: the reference, and its twins beside it.

The twins run in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from host_reads import no_host_reads
from interpreter import by_device, run_interpreted
from twin_cases import assert_twin_bytes

SIZES = [(1, 1, 1), (63, 2, 5), (70, 3, 30), (30, 8, 128), (20, 6, 300)]
by_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
NAN, INFINITY = float("nan"), float("inf")


def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def twin(name):
    return getattr(importlib.import_module("backstash.kernels.routing"), name)


def scores_with_ties(tokens, experts):
    scores = torch.rand(tokens, experts)
    scores[:, -1] = scores[:, 0]
    scores[0] = 0.25
    for row, value in enumerate([NAN, INFINITY, -INFINITY, -0.0], start=1):
        if row < tokens:
            scores[row, row % experts] = value
    if tokens > 5:
        scores[5] = -scores[5]
    return scores


@by_device
@by_size
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_a_choice_is_the_references(size, biased, device):
    tokens, top_k, experts = size
    scores = scores_with_ties(tokens, experts)
    bias = torch.randn(experts).round(decimals=1) if biased else None
    wanted = kernels.top_experts(scores, bias, top_k)
    scores, bias = scores.to(device), None if bias is None else bias.to(device)
    got = twin("top_experts")(scores, bias, top_k)
    with no_host_reads(device):
        again = twin("top_experts")(scores, bias, top_k)
    assert_twin_bytes(got, wanted)
    assert_twin_bytes(again, wanted)


@by_device
@by_size
def test_weights_and_their_gradient_are_the_references(size, device):
    tokens, top_k, experts = size
    logits, dprob = 9 * torch.randn(tokens, experts), torch.randn(tokens, top_k)
    expert_TK = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    wide = kernels.weigh_experts(logits.double(), expert_TK)
    wide_back = kernels.weigh_experts_backward(dprob.double(), wide, expert_TK, experts)
    logits, dprob, expert_TK = (v.to(device) for v in (logits, dprob, expert_TK))
    prob = twin("weigh_experts")(logits, expert_TK)
    dlogits = twin("weigh_experts_backward")(dprob, prob, expert_TK, experts)
    few_roundings = 8 * torch.finfo(torch.float32).eps
    close = functools.partial(torch.testing.assert_close, rtol=few_roundings, atol=few_roundings)
    close(prob.cpu().double(), wide)
    close(dlogits.cpu().double(), wide_back)


# The interpreter cuts a bfloat16 off instead of rounding it.
@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 1), (63, 5), (40, 128), (3, 3000)], ids=str)
def test_parts_are_the_references(size):
    x = torch.randn(size) * torch.exp(5 * torch.randn(size))
    assert_twin_bytes(kernels.bfloat16_parts(x.cuda()), kernels.bfloat16_parts(x))


@by_device
def test_without_tokens_nobody_has_rows(device):
    none = torch.empty(0, 2, dtype=torch.int64, device=device)
    logits = torch.empty(0, 3, device=device)
    assert twin("top_experts")(logits, None, 2).shape == (0, 2)
    assert twin("weigh_experts")(logits, none).shape == (0, 2)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_weights_are_each_score_divided_by_the_sum_of_the_chosen(size):
    tokens, top_k, experts = size
    logits = torch.randn(tokens, experts, dtype=torch.float64, requires_grad=True)
    expert_TK = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    scores = logits.softmax(1).gather(1, expert_TK)
    wanted = scores / scores.sum(1, keepdim=True)
    dprob = torch.randn(tokens, top_k, dtype=torch.float64)
    (dlogits,) = torch.autograd.grad(wanted, logits, dprob)
    prob = kernels.weigh_experts(logits.detach(), expert_TK)
    torch.testing.assert_close(prob, wanted)
    back = kernels.weigh_experts_backward(dprob, prob, expert_TK, experts)
    torch.testing.assert_close(back, dlogits)


def test_three_parts_add_up_to_all_bits_of_a_float32():
    x = torch.randn(50, 7)
    parts = kernels.bfloat16_parts(x).unflatten(1, (3, 7)).double().sum(1)
    assert torch.equal(parts, x.double())


def test_what_does_not_fit_is_refused():
    whole = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="at least 3 experts"):
        kernels.top_experts(torch.zeros(4, 2), None, 3)
    with pytest.raises(ShapeError, match="a row for each token"):
        kernels.weigh_experts(torch.zeros(3, 2), whole)
    with pytest.raises(DtypeError, match="needs float32"):
        kernels.bfloat16_parts(torch.zeros(2, 2, dtype=torch.float64))
