"""What a step must not cost on a GPU: pinned memory, what is left of a model, rows that are not."""

from __future__ import annotations

import gc

import pytest
import torch

import backstash as bs
from backstash.stash import PagePool, Policy, Stash
from stash_cases import assert_nothing_is_held
from stash_gpu_cases import GPU, Step, assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("plain_memory")]

PAGE = 16384


def test_steps_that_spill_allocate_no_pinned_memory() -> None:
    pool = PagePool(2**20, host_bytes=2**26, device=GPU, page_bytes=PAGE)
    stash = Stash(pool, policy=Policy.SPILL)
    plain, ours = Step(), Step(stash)
    for total in (3000, 4096):
        assert_equal(ours.gradients(ours, total), plain.gradients(plain, total))
    spilled = stash.stats().pages_spilled
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    for total in (3000, 17, 4096, 2000, 0, 4000):
        assert_equal(ours.gradients(ours, total), plain.gradients(plain, total))
    assert stash.stats().pages_spilled > spilled
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert_nothing_is_held(stash)


@pytest.mark.parametrize("recipe", ["mxfp8", "float8_delayed", "nvfp4"])
def test_a_model_that_leaves_the_gpu_leaves_nothing_there(recipe: str) -> None:
    def step(model: torch.nn.Module) -> None:
        with bs.autocast(recipe=recipe):
            y = model(torch.randn(512, 1024, device=GPU, dtype=torch.bfloat16))
        y.float().square().mean().backward()
        model.zero_grad()

    # What torch's libraries and Triton keep for themselves is there afterwards.
    step(bs.MoE(1024, 512, 4, 2, device=GPU, dtype=torch.bfloat16))
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with bs.quantized_model_init(recipe=recipe):
            model = bs.MoE(1024, 512, 4, 2, device=GPU, dtype=torch.bfloat16)
        step(model)
        assert torch.cuda.memory_allocated() - before > 2**21
        model.cpu()
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 2**16


def milliseconds(layer: bs.GroupedMLP, rows: int, counts: torch.Tensor) -> float:
    """The shortest of some steps of a layer on a buffer of so many rows."""
    x = torch.randn(rows, 1024, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # the host runs ahead
        start.record()
        layer(x, counts).sum().backward()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return min(found)


def test_time_follows_the_rows_that_are_there_and_not_the_buffer() -> None:
    layer = bs.GroupedMLP(8, 1024, 2048, device=GPU, dtype=torch.bfloat16)
    valid, times = 8192, 8
    counts = torch.full((8,), valid // 8, dtype=torch.int32, device=GPU)
    tight, roomy = (milliseconds(layer, rows, counts) for rows in (valid, times * valid))
    # Tails are written as zeros, which costs bandwidth; multiplying them would cost all of it.
    assert roomy < times / 3 * tight, f"{tight} and {roomy} ms"
    print(f"{tight:.3f} ms with {valid} rows, {roomy:.3f} in a buffer {times} times as large")
