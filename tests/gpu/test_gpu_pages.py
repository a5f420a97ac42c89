"""The stash on a GPU: kernels against their reference, and whole steps against none."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from backstash import kernels
from backstash.kernels import PoolState
from backstash.kernels.reference import pages as reference
from backstash.stash import PagePool, Policy, Stash
from host_reads import no_host_reads
from pages_cases import Pool, check_restored, gpu_pool, random_bytes, random_program
from stash_cases import assert_nothing_is_held
from stash_gpu_cases import Step, assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("plain_memory")]

GPU = "cuda"


@pytest.mark.parametrize("page", [16, 64, 4096, 65536])
@pytest.mark.parametrize("seed", range(4))
def test_every_page_is_free_or_held_once_in_any_program(page: int, seed: int) -> None:
    random_program(kernels, seed, 60, page, GPU)


@pytest.mark.parametrize("shift", [0, 1, 4, 16])
@pytest.mark.parametrize("page", [16, 256, 65536])
def test_a_launch_leaves_what_the_reference_leaves(page: int, shift: int) -> None:
    widths, capacities, valid = [48, 4, 1, 4096, 16], [900, 7000, 3, 300, 1], [700, 7001, 0, 299, 1]
    on_host = 90_000 * 16 // page + 100
    pools = [Pool(400, on_host, page, reference), gpu_pool(400, on_host, page)]
    tables = []
    for pool in pools:
        device = str(pool.device)
        sources = [
            random_bytes(shift + w * c, w, device)[shift:]
            for w, c in zip(widths, capacities, strict=True)
        ]
        rows = [torch.tensor([count], device=device) for count in valid]
        held = pool.stash(sources, rows, widths)
        check_restored(held, pool.restore(held))
        tables.append((held.table.cpu(), pool))
        again = pool.stash(sources[:2], rows[:2], widths[:2])
        pool.release(held)
        check_restored(again, pool.restore(again, [1]), [1])
    torch.cuda.synchronize()
    (one, cpu), (two, gpu) = tables
    assert torch.equal(one, two)
    assert torch.equal(cpu.state, gpu.state.cpu())
    assert torch.equal(cpu.free_N, gpu.free_N.cpu())
    assert int(cpu.receipt) == int(gpu.receipt)


def test_addresses_beyond_four_gigabytes_are_right() -> None:
    nbytes = 5 * 2**30 + 12345
    pool = gpu_pool(nbytes // 65536 + 2, 0, 65536)
    source = torch.arange(nbytes // 8 + 1, device=GPU).view(torch.uint8)[:nbytes]
    held = pool.stash([source], [torch.tensor([nbytes], device=GPU)], [1])
    (restored,) = pool.restore(held)
    assert torch.equal(restored, source)


def test_many_launches_without_a_pause_do_not_see_each_others_heads() -> None:
    pool = gpu_pool(40_000, 0, 4096)
    sources = [random_bytes(300_000, i, GPU) for i in range(40)]
    rows = torch.tensor([290_001], device=GPU)
    for _ in range(5):
        held = [pool.stash([source] * 3, [rows] * 3, [1] * 3) for source in sources]
        for one in held:
            check_restored(one, pool.restore(one))
        pages = [page for one in held for page in pool.pages_of(one)]
        assert len(set(pages)) == len(pages)
        for one in held:
            pool.release(one)
    assert sorted(pool.free_pages()[0]) == list(range(40_000))


def test_a_replay_takes_and_gives_back_pages_as_the_counts_say() -> None:
    pool = gpu_pool(500, 100, 256)
    source, rows = random_bytes(40_000, 1, GPU), torch.zeros(1, dtype=torch.int32, device=GPU)
    pool.release(pool.stash([source], [rows], [10]))  # compiles
    restored = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = pool.stash([source], [rows], [10])
        kernels.restore_pages(
            [restored],
            [0],
            held.table,
            pool.device_pages,
            pool.host_pages,
            pool.state,
            buffers=1,
            page_bytes=256,
        )
        pool.release(held)
    for turn in range(100):
        count = turn * 53 % 4100
        rows.fill_(count)
        source.random_(0, 255)
        restored.fill_(0xAB)
        graph.replay()
        valid = min(count, 4000) * 10
        assert torch.equal(restored[:valid], source[:valid])
        assert (restored[valid:] == 0xAB).all()
    assert sorted(pool.free_pages()[0]) == list(range(500))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page", [64, 4096, 65536])
def test_compressed_values_are_those_of_the_reference(page: int, dtype: torch.dtype) -> None:
    x = (torch.randn(1000 * 96) * torch.randn(1000 * 96).exp()).to(dtype)
    x[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    x[96:128] = 0
    results = []
    for pool in (Pool(90, 9000, page), gpu_pool(90, 9000, page)):
        device = str(pool.device)
        sources = [x.to(device), x[: 7 * 33].to(device)]
        rows = [torch.tensor([n], device=device, dtype=torch.int32) for n in (901, 99)]
        held = pool.stash(sources, rows, [96, 33])
        restored = pool.restore(held)
        counters = [pool.counter(place) for place in PoolState]
        results.append((held.table[:7].tolist(), counters, *(r.cpu() for r in restored)))
    (table, counters, *wanted), (gpu_table, gpu_counters, *found) = results
    assert table == gpu_table
    assert counters == gpu_counters
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_compressing_stash_gives_a_gpu_what_it_gives_a_cpu() -> None:
    x = torch.randn(4096, 96)
    gradients = []
    for device in ("cpu", GPU):
        pool = PagePool(2**22, device=device, page_bytes=4096)
        stash = Stash(pool, compress=bs.MXFP8)
        leaf = x.to(device, copy=True).requires_grad_()
        with bs.saving(stash):
            marked = leaf * 1.0
            bs.mark_grouped_tensor(marked, torch.tensor([1234], device=device))
            loss = marked[:1234].square().sum() * 0 + (marked * marked)[:1234].sum()
        loss.backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad[:1234].cpu())
        del loss
        assert_nothing_is_held(stash)
    assert torch.equal(*gradients)


# --- steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["high_precision", "float8_current", "mxfp8"])
@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
@pytest.mark.parametrize("megabytes", [(64, 0), (4, 64), (4, 0)], ids=str)
def test_gradients_are_bit_equal_with_and_without_the_stash(
    recipe: str, policy: Policy, megabytes: tuple[int, int]
) -> None:
    device, host = (size * 2**20 for size in megabytes)
    stash = Stash(PagePool(device, host, device=GPU, page_bytes=16384), policy=policy)
    plain, ours = Step(recipe=recipe), Step(stash, recipe=recipe)
    for total in (900, 0, 4096, 17):
        assert_equal(ours.gradients(ours, total), plain.gradients(plain, total))
    assert_nothing_is_held(stash)
    assert stash.stats().overflows == 0


def test_no_value_travels_to_the_host_in_a_step() -> None:
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=16384))
    step = Step(stash)
    step.gradients(step, 900)
    with no_host_reads():
        step()
    assert_nothing_is_held(stash)


def test_an_original_is_free_for_the_next_layer_however_far_the_host_runs_ahead() -> None:
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=16384), ahead=0)
    plain, ours = Step(), Step(stash)
    peaks = []
    for step in (plain, ours):
        step.gradients(step, 900)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.gradients(step, 900)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0]
    assert_nothing_is_held(stash)
