"""Around a stash: other models and schedules, evaluation, recomputation of parts, a long skew."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import backstash as bs
from backstash.stash import PagePool, Sizing, Stash
from stash_cases import (
    BALANCED,
    CAPACITY,
    PAGE,
    WIDTH,
    Experts,
    assert_nothing_is_held,
    stash,
    step,
)


def test_a_hundred_steps_in_which_one_expert_gets_most_rows_spill_and_change_nothing() -> None:
    experts, kept = Experts(2), stash(30, 4096)
    parameters = list(experts.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-4)
    hot, spilled = (4, 28, 8, 7), 0
    for turn in range(100):
        # For some steps in the middle the load is light, and everything fits.
        counts = (1, 1, 1, 1) if 40 <= turn < 50 else hot
        step(experts, parameters, counts, kept).assert_equal(step(experts, parameters, counts))
        optimizer.step()
        now = kept.stats().pages_spilled
        assert (now > spilled) == (counts is hot)
        spilled = now
    assert kept.stats().kept == kept.stats().overflows == 0
    assert_nothing_is_held(kept)


def test_evaluation_may_come_before_the_first_step_and_with_the_stash_around_it() -> None:
    experts, kept = Experts(2), stash()
    parameters = list(experts.parameters())
    for microbatches in (1, 3, 2):
        for handlers in ((kept,), ()):
            with torch.no_grad(), bs.saving(*handlers):
                experts(torch.randn(CAPACITY, WIDTH))
        for _ in range(microbatches):
            step(experts, parameters, BALANCED, kept).assert_equal(step(experts, parameters))
    assert kept.stats().surprises == 0
    assert_nothing_is_held(kept)


def test_layers_and_models_of_any_capacity_and_width_share_a_pool() -> None:
    def losses(*handlers: Any) -> list[Tensor]:
        torch.manual_seed(3)
        found = []
        for width, rows in ((32, 90), (96, 17), (64, 400)):
            first, second = (bs.GroupedMLP(3, width, 32) for _ in range(2))
            x = torch.randn(rows, width, requires_grad=True)
            with bs.saving(*handlers):
                # The second has a smaller buffer than the first.
                y = first(x, [5, 0, 4])[: rows // 2]
                found.append(second(y, [1, 0, 3])[:4].sum())
        for loss in reversed(found):
            loss.backward()
        return [loss.detach() for loss in found] + [x.grad for x in [x] if x.grad is not None]

    kept = stash()
    for ours, theirs in zip(losses(kept), losses(), strict=True):
        assert torch.equal(ours, theirs)
    assert kept.stats().batches == 6
    assert_nothing_is_held(kept)


def test_a_pool_that_saw_no_row_at_first_is_large_enough_later() -> None:
    sizing = Sizing(margin=2.0)
    kept = Stash(PagePool.auto(device="cpu", page_bytes=PAGE, sizing=sizing))
    # The newest two are not stashed.
    experts = Experts(4)
    parameters = list(experts.parameters())
    for counts in [(0, 0, 0, 0)] * 3 + [BALANCED] * 12:
        step(experts, parameters, counts, kept).assert_equal(step(experts, parameters, counts))
    before = kept.stats()
    assert before.device_pages >= before.demand_high > 0
    step(experts, parameters, BALANCED, kept)
    assert kept.stats().kept == before.kept
    assert_nothing_is_held(kept)


def test_more_values_than_there_are_receipts_are_all_given_back() -> None:
    kept, x, rows = stash(20_000), torch.randn(9, WIDTH), torch.ones(1, dtype=torch.int32)
    handles = [kept.pack(x.clone(), rows) for _ in range(5000)]
    assert None not in handles
    assert kept.stats().device_used == 5000
    restored = kept.unpack(handles[4567])  # pyright: ignore[reportArgumentType]
    assert torch.equal(restored[:1], x[:1])
    handles.clear()
    assert_nothing_is_held(kept)


@pytest.mark.parametrize("kept_op", ["mm", "nothing"])
def test_selective_recomputation_inside_a_stash_changes_nothing(kept_op: str) -> None:
    must_save = {torch.ops.aten.mm.default} if kept_op == "mm" else set()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = operator in must_save
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    experts, kept = Experts(2), stash()
    parameters = list(experts.parameters())

    def selective(x: Tensor, counts: Any) -> Tensor:
        return checkpoint(experts, x, counts, use_reentrant=False, context_fn=contexts)

    expected = step(experts, parameters)
    step(selective, parameters, BALANCED, kept).assert_equal(expected)
    assert_nothing_is_held(kept)
