"""Steps as CUDA graphs on a GPU: bit-equal, whatever overflows, and no trace of a failed try."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backstash.kernels import PoolState
from backstash.stash import CapturedStep, PagePool, Patience, Sizing, Stash, StepState
from backstash.stash.launch import Launch
from host_reads import no_host_reads
from stash_cases import assert_nothing_is_held
from stash_gpu_cases import GPU, LAYERS, Step, assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("plain_memory")]

PAGE = 16384
# The newest two stay where they are once a step has been seen.
STASHED = LAYERS - 2


@pytest.mark.parametrize("recipe", ["high_precision", "float8_delayed"])
def test_a_captured_step_is_bit_equal_and_survives_every_overflow(recipe: str) -> None:
    stash = Stash(PagePool(6 * 2**20, device=GPU, page_bytes=16384))
    plain, ours = Step(recipe=recipe), Step(stash, recipe=recipe)
    captured = CapturedStep(ours, stash, [ours.model])
    totals = [300, 300, 300, 4000, 310, 900, 4096, 0, 17, 3000]
    for total in totals:
        assert_equal(ours.gradients(captured, total), plain.gradients(plain, total))
        assert stash.is_idle
    assert captured.reruns >= 1
    assert captured.captures == captured.reruns + 1
    assert captured.state is StepState.CAPTURED
    assert stash.pool.counters()[PoolState.OVERFLOWS] == 0
    assert_nothing_is_held(stash)


def test_a_thousand_replays_with_changing_counts_are_bit_equal() -> None:
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=16384))
    plain, ours = Step(), Step(stash)
    captured = CapturedStep(ours, stash, [ours.model])
    wanted = {total: plain.gradients(plain, total) for total in range(0, 4097, 97)}
    for turn in range(1000):
        total = turn * 997 % len(wanted) * 97
        assert_equal(ours.gradients(captured, total), wanted[total])
    assert (captured.reruns, captured.captures) == (0, 1)
    assert_nothing_is_held(stash)


def pages_of(total: int) -> list[int]:
    """Pages that each launch of a step with ``total`` valid rows takes, in order."""
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=PAGE))
    taken: list[int] = []
    launch = stash.pool.stash

    def counted(*operands: Any, **options: Any) -> Launch:
        launched = launch(*operands, **options)
        torch.cuda.synchronize()
        taken.append(int(launched.table[0]))
        return launched

    stash.pool.stash = counted  # pyright: ignore[reportAttributeAccessIssue]
    step = Step(stash)
    step.gradients(step, total)
    taken.clear()
    step.gradients(step, total)
    return taken


@pytest.mark.parametrize("layer", range(STASHED))
def test_an_overflow_at_any_layer_is_run_again_without_a_trace(layer: int) -> None:
    taken = pages_of(3000)
    assert len(taken) >= STASHED
    first = len(taken) * layer // STASHED
    stash = Stash(
        PagePool((sum(taken[:first]) + taken[first] // 2) * PAGE, device=GPU, page_bytes=PAGE)
    )
    plain, ours = Step(), Step(stash)
    captured = CapturedStep(ours, stash, [ours.model], state=[ours.calls])
    totals = [8, 8, 8, 3000, 8, 3000]
    for total in totals:
        assert_equal(ours.gradients(captured, total), plain.gradients(plain, total))
    assert captured.reruns == 1
    # Neither a failed try nor a capture counts as a step.
    assert int(ours.calls) == int(plain.calls) == len(totals)
    assert_nothing_is_held(stash)


def test_a_skew_that_stays_does_not_run_every_step_twice() -> None:
    sizing = Sizing(most_bytes=4 * 2**20)
    stash = Stash(PagePool(4 * 2**20, device=GPU, page_bytes=PAGE, sizing=sizing))
    plain, ours = Step(), Step(stash)
    captured = CapturedStep(ours, stash, [ours.model], patience=Patience(calm=8, longest=16))
    for total in [8, 8, 8, *[4000] * 24]:
        assert_equal(ours.gradients(captured, total), plain.gradients(plain, total))
    assert 1 <= captured.reruns <= 5
    assert_nothing_is_held(stash)


def test_the_kernels_of_an_overflow_leave_zeros_and_a_flag() -> None:
    stash = Stash(PagePool(2**20, device=GPU, page_bytes=PAGE))
    step = Step(stash)
    with stash.unattended():
        step.gradients(step, 4000)
    counters = stash.pool.counters()
    assert counters[PoolState.OVERFLOWS] > 0
    assert counters[PoolState.SHORTAGE] > 0
    assert 0 < counters[PoolState.FIRST_OVERFLOW] <= 2 * LAYERS
    assert all(bool(p.grad.isfinite().all()) for p in step.model.parameters() if p.grad is not None)
    stash.pool.clear_overflow()
    assert_nothing_is_held(stash)


def test_a_replayed_step_reads_one_counter_and_nothing_else_on_the_host() -> None:
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=PAGE))
    step = Step(stash)
    captured = CapturedStep(step, stash, [step.model])
    for _ in range(3):
        step.gradients(captured, 900)
    assert captured.state is StepState.CAPTURED
    reads = 0
    wait = stash.pool.streams.host_wait

    def counted(event: object) -> None:
        nonlocal reads
        reads += 1
        wait(event)

    stash.pool.streams.host_wait = counted  # pyright: ignore[reportAttributeAccessIssue]
    with no_host_reads():
        captured()
    assert reads == 1
