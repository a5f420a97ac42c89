"""Activations of rows in slabs, forward and backward: every bit that of rows that lie together."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from backstash.kernels import ActivationGradients
from interpreter import by_device, interpreted, run_interpreted
from slab_cases import by_counts, ends_of, placed

pytest.importorskip("triton")
plain: Any = importlib.import_module("backstash.kernels.activation")
twins: Any = importlib.import_module("backstash.kernels.slab_activation")

NAN = float("nan")
#: Name, columns of the pre-activation, bytes of a page, whether rows have weights.
CASES = [
    pytest.param("swiglu", 1024, 65536, True, "cpu", marks=interpreted),
    pytest.param("swiglu", 1536, 65536, True, "cuda", marks=pytest.mark.gpu),
    pytest.param("relu", 512, 65536, True, "cuda", marks=pytest.mark.gpu),
    pytest.param("geglu", 2048, 131072, False, "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.slow
def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


@by_counts
@pytest.mark.parametrize(("activation", "columns", "page", "is_weighted", "device"), CASES)
def test_forward_and_backward_are_those_of_rows(
    counts: list[int], activation: str, columns: int, page: int, is_weighted: bool, device: str
) -> None:
    valid = sum(counts)
    rows, inner = valid + 5, columns // 2 if activation.endswith("glu") else columns
    h = torch.randn(rows, columns, device=device).bfloat16()
    da = torch.randn(rows, inner, device=device).bfloat16()
    prob = torch.rand(rows, device=device) if is_weighted else None
    for tail in (h, da, *([] if prob is None else [prob])):
        tail[valid:] = NAN
    ends = ends_of(counts, device)
    (slabs,) = placed(ends, [h], page)
    a = twins.activate_slabs(slabs, prob, activation)
    assert torch.equal(a[:valid], plain.activate(h, prob, activation, ends)[:valid])
    found = []
    for one in (h, slabs):
        dprob = None if prob is None else torch.full_like(prob, NAN)
        into = ActivationGradients(torch.full_like(h, NAN), dprob, torch.full_like(da, NAN))
        plain.activate_backward(da, one, prob, activation, into, ends)
        found.append(into)
    for ours, theirs in zip(*found, strict=True):
        if ours is not None:
            assert torch.equal(ours[:valid], theirs[:valid])
            # Of the tail the gradients of weights are zeros, and the rest is not written.
            assert not ours[valid:].any() if ours.ndim == 1 else ours[valid:].isnan().all()


@by_device
def test_rows_of_a_launch_without_room_are_zeros(device: str) -> None:
    h = torch.randn(90, 512, device=device).bfloat16()
    ends = ends_of([30, 50], device)
    (slabs,) = placed(ends, [h], 65536, has_room=False)
    assert not twins.activate_slabs(slabs, None, "swiglu")[:80].any()
