"""Rows to experts and back against a loop over tokens and their copies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from host_reads import no_host_reads

CHOICES = {
    "one-token": [[2, 0]],
    "one-expert-has-everything": [[1]] * 63,
    "an-expert-has-nothing": [[0, 3], [3, 0], [0, 1]],
    "every-expert": [[3, 1, 0, 2], [0, 1, 2, 3]],
    "nobody": [[7, -1], [0, 4], [-1, 9]],
    "no-tokens": torch.empty(0, 2, dtype=torch.int64).tolist(),
}
by_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
EXPERTS = 4


def make(choice, *, k=2):
    return torch.tensor(choice, dtype=torch.int64).reshape(len(choice), -1 if choice else k)


def define_sort(expert_TK, num_experts):
    """The copies in order of expert, then token, then k; nobody's copies last."""
    copies = [
        (e if 0 <= e < num_experts else num_experts, t, k)
        for t, row in enumerate(expert_TK.tolist())
        for k, e in enumerate(row)
    ]
    copies.sort()
    slots = torch.zeros_like(expert_TK, dtype=torch.int64)
    for r, (_, t, k) in enumerate(copies):
        slots[t, k] = r
    counts = [sum(e == g for e, _, _ in copies) for g in range(num_experts)]
    return [t for _, t, _ in copies], slots, counts


@by_choice
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_copies_are_sorted_by_expert_then_token_then_choice(choice, dtype):
    expert = make(choice).to(dtype)
    source, slots, counts = kernels.sort_by_expert(expert, EXPERTS)
    wanted = define_sort(expert, EXPERTS)
    assert source.tolist() == wanted[0]
    assert torch.equal(slots, wanted[1])
    assert counts.tolist() == wanted[2]
    assert (source.dtype, slots.dtype, counts.dtype) == (torch.int64, torch.int64, torch.int32)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tokens=st.integers(0, 70), k=st.integers(1, 6), experts=st.integers(1, 9))
def test_any_choice_is_sorted_and_comes_back(data, tokens, k, experts):
    size = tokens * k
    flat = data.draw(st.lists(st.integers(0, experts - 1), min_size=size, max_size=size))
    expert = torch.tensor(flat, dtype=torch.int64).reshape(tokens, k)
    source, slots, counts = kernels.sort_by_expert(expert, experts)
    wanted = define_sort(expert, experts)
    assert source.tolist() == wanted[0]
    assert torch.equal(slots, wanted[1])
    assert counts.tolist() == wanted[2]
    x = torch.arange(float(tokens)).unsqueeze(1)
    assert torch.equal(kernels.unpermute(kernels.permute(x, source), slots), x * k)


@by_choice
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_unpermute_sums_the_copies_in_order_and_rounds_once(choice, dtype):
    expert = make(choice)
    _, slots, _ = kernels.sort_by_expert(expert, EXPERTS)
    torch.manual_seed(0)
    y = torch.randn(expert.numel(), 17, dtype=torch.float64).to(dtype)
    wide = y if dtype is torch.float64 else y.float()
    wanted = torch.zeros(len(expert), 17, dtype=wide.dtype)
    for t, row in enumerate(slots.tolist()):
        for r in row:
            wanted[t] = wanted[t] + wide[r]
    got = kernels.unpermute(y, slots)
    assert got.dtype is dtype
    assert torch.equal(got, wanted.to(dtype))


@by_choice
def test_each_direction_is_the_gradient_of_the_other(choice):
    expert = make(choice)
    source, slots, _ = kernels.sort_by_expert(expert, EXPERTS)
    torch.manual_seed(0)
    x = torch.randn(len(expert), 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(expert.numel(), 3, dtype=torch.float64)
    (dx,) = torch.autograd.grad(kernels.permute(x, source), x, dy)
    torch.testing.assert_close(dx, kernels.unpermute(dy, slots))
    y = torch.randn(expert.numel(), 3, dtype=torch.float64, requires_grad=True)
    dx = torch.randn(len(expert), 3, dtype=torch.float64)
    (dy,) = torch.autograd.grad(kernels.unpermute(y, slots), y, dx)
    assert torch.equal(dy, kernels.permute(dx, source))


@pytest.mark.gpu
@by_choice
def test_on_a_gpu_nothing_is_read_on_the_host(choice):
    expert = make(choice).cuda()
    x = torch.randn(len(expert), 5, device="cuda")
    with no_host_reads():
        source, slots, counts = kernels.sort_by_expert(expert, EXPERTS)
        y = kernels.unpermute(kernels.permute(x, source), slots)
    wanted = kernels.sort_by_expert(expert.cpu(), EXPERTS)
    for got, want in zip((source, slots, counts), wanted, strict=True):
        assert torch.equal(got.cpu(), want)
    assert torch.equal(y.cpu(), kernels.unpermute(x.cpu()[wanted[0]], wanted[1]))


def test_sums_are_written_into_columns_of_a_larger_matrix():
    y, slots = torch.randn(6, 3), torch.randperm(6).view(3, 2)
    room = torch.full((3, 7), float("nan"))
    got = kernels.unpermute(y, slots, out=room[:, 2:5])
    assert torch.equal(room[:, 2:5], kernels.unpermute(y, slots))
    assert got.data_ptr() == room[:, 2:5].data_ptr()
    assert int(room.isnan().sum()) == 12


def test_what_does_not_fit_is_refused_with_a_remedy():
    with pytest.raises(ShapeError, match="row of expert numbers"):
        kernels.sort_by_expert(torch.zeros(4, dtype=torch.int64), 2)
    with pytest.raises(DtypeError, match="long"):
        kernels.sort_by_expert(torch.zeros(4, 1), 2)
    with pytest.raises(ShapeError, match="flatten"):
        kernels.permute(torch.zeros(4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ShapeError, match="sort_by_expert returned"):
        kernels.unpermute(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
