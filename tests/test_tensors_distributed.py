"""Quantized tensors between processes: broadcast byte by byte, checkpoints, a common amax."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.multiprocessing.spawn import spawn

from backstash.formats import FLOAT8_CURRENT, Code, Usage
from backstash.recipes import recipe
from backstash.tensors import GroupedTensor
from format_cases import FORMATS, assert_identical, by_format, by_grouping, by_usage, quantized

RANKS = 2


def on_two_ranks(check: Any, tmp_path: Any, *args: Any) -> None:
    """Run ``check(rank, *args)`` in two processes that talk over gloo."""
    spawn(_run, (check, str(tmp_path), args), nprocs=RANKS)


def _run(rank: int, check: Any, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    try:
        check(rank, *args)
    finally:
        distributed.destroy_process_group()


def broadcasts(rank: int) -> None:
    for format in FORMATS:
        for ends in (None, [5, 5, 33]):
            torch.manual_seed(1)
            wanted = quantized(format, Usage.BOTH, ends)
            found: Any = wanted if rank == 0 else torch.empty_like(wanted)
            if rank:
                for buffer in found.buffers.values():
                    buffer.fill_(1)
            distributed.broadcast(found, src=0)
            assert_identical(found, wanted)
            work = distributed.broadcast(found, src=1, async_op=True)
            assert work is not None
            work.wait()
            assert_identical(found, wanted)


@pytest.mark.distributed
def test_a_broadcast_gives_the_bytes_of_one_rank_to_all(tmp_path):
    on_two_ranks(broadcasts, tmp_path)


def common_amax(rank: int) -> None:
    group = distributed.group.WORLD
    parts = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).chunk(RANKS)
    for code in Code:
        alone = dataclasses.replace(FLOAT8_CURRENT, code=code)
        format = dataclasses.replace(alone, amax_group=group)
        whole = alone.quantize(torch.cat(parts))
        mine = format.quantize(parts[rank])
        assert torch.equal(mine.scale_inv, whole.scale_inv)
        assert torch.equal(mine.codes, whole.codes.chunk(RANKS)[rank])
    # Groups are compared one by one; a process without rows takes part all the same.
    x = parts[rank] if rank else parts[rank][:0]
    counts = [1, 1] if rank else [0, 0]
    found = format.quantize(GroupedTensor.from_counts(x, counts)).data
    wanted = alone.quantize(GroupedTensor.from_counts(parts[1], [1, 1])).data
    assert torch.equal(found.scale_inv, wanted.scale_inv)


@pytest.mark.distributed
def test_the_largest_magnitude_is_that_of_the_group(tmp_path):
    on_two_ranks(common_amax, tmp_path)


def common_step(rank: int) -> None:
    from backstash.nn import Linear
    from backstash.recipes import autocast

    torch.manual_seed(3)
    layer, x, dy = Linear(8, 4), torch.randn(6, 8), torch.randn(6, 4)
    with autocast(recipe="float8_current"):
        wanted = layer(x)
    rows = slice(3 * rank, 3 * rank + 3)
    chosen = recipe("float8_current", amax_group=distributed.group.WORLD)
    with autocast(recipe=chosen):
        y = layer(x[rows])
    torch.testing.assert_close(y, wanted[rows])
    y.backward(dy[rows])
    partial, layer.weight.grad = layer.weight.grad, None
    assert partial is not None
    wanted.backward(dy)
    distributed.all_reduce(partial)
    torch.testing.assert_close(partial, layer.weight.grad)


@pytest.mark.distributed
def test_a_layer_on_parts_of_the_rows_computes_what_it_does_on_all(tmp_path):
    on_two_ranks(common_step, tmp_path)


def checkpoints(rank: int, folder: str) -> None:
    for number, format in enumerate(FORMATS):
        torch.manual_seed(number)
        wanted = quantized(format, Usage.BOTH, [5, 5, 33])
        found = torch.empty_like(wanted)
        place = f"{folder}/{number}"
        save({"weight": wanted, f"of-rank-{rank}": wanted}, checkpoint_id=place)
        load({"weight": found}, checkpoint_id=place)
        assert_identical(found, wanted)
        other = torch.empty_like(wanted)
        load({f"of-rank-{1 - rank}": other}, checkpoint_id=place)
        assert_identical(other, wanted)


@pytest.mark.distributed
def test_two_ranks_save_and_load_one_checkpoint(tmp_path):
    on_two_ranks(checkpoints, tmp_path, str(tmp_path))


def staged(rank: int, folder: str) -> None:
    """Written while the training goes on: the bytes are those of the moment of the call."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    for number, format in enumerate(FORMATS):
        for way, stager in (("of-the-writer", None), ("by-itself", DefaultStager(options))):
            torch.manual_seed(number)
            weight = torch.nn.Parameter(quantized(format, Usage.BOTH, [5, 5, 33]))
            wanted, found = weight.detach().clone(), torch.empty_like(weight)
            place = f"{folder}/{number}-{way}"
            written: Any = async_save({"weight": weight}, checkpoint_id=place, async_stager=stager)
            with torch.no_grad():
                weight.zero_()
            getattr(written, "upload_completion", written).result()
            load({"weight": found}, checkpoint_id=place)
            assert_identical(found, wanted)


@pytest.mark.distributed
def test_a_checkpoint_that_is_written_meanwhile_has_the_bytes_of_its_moment(tmp_path):
    on_two_ranks(staged, tmp_path, str(tmp_path))


@by_format
@by_usage
@by_grouping
def test_a_distributed_checkpoint_gives_the_bytes_back(format, usage, ends, tmp_path):
    wanted = quantized(format, usage, ends)
    found = torch.empty_like(wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        save({"weight": wanted}, checkpoint_id=tmp_path)
        load({"weight": found}, checkpoint_id=tmp_path)
    assert_identical(found, wanted)
