"""The peak of a step follows from what is saved and from what a layer works with."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash.train.config import TrainConfig
from backstash.train.estimate import estimate
from backstash.train.loop import Trainer
from backstash.train.peak import moments, peak_bytes, pool_bytes, table
from backstash.train.session import open_corpus
from train_cases import small_model, small_run


def large(**fields: Any) -> TrainConfig:
    """A run whose activations are larger than its weights."""
    sizes = {"context": 512, "hidden": 64, "expert_width": 64, "layers": 8, "vocabulary": 32}
    model = small_model(**(sizes | fields.pop("model", {})))
    return TrainConfig(batch=16, model=model, recipe="high_precision", **fields)


def test_a_stash_needs_less_where_buffers_have_room_for_more() -> None:
    peaks = {
        (factor, stash): peak_bytes(large(stash=stash, model={"capacity_factor": factor}))
        for factor in (2.0, 8.0)
        for stash in (False, True)
    }
    # Without a stash all layers pay for the room, with one only those under way.
    plain = peaks[8.0, False] - peaks[2.0, False]
    assert peaks[8.0, True] - peaks[2.0, True] < plain / 2
    assert peaks[8.0, True] < peaks[8.0, False]


RUNS: dict[str, TrainConfig] = {
    "the last layer runs forward": large(
        dtype="bfloat16", stash=True, model={"capacity_factor": 8.0, "expert_width": 16}
    ),
    "the loss runs backward": large(model={"vocabulary": 65536}),
    "the last layer runs backward": large(),
    "attention runs backward": large(
        dtype="bfloat16", model={"top_k": 1, "expert_width": 4, "heads": 8, "head_width": 64}
    ),
    "the first layer runs backward": large(
        dtype="bfloat16",
        recompute="reentrant",
        model={"capacity_factor": 64.0, "experts": 640, "layers": 2},
    ),
    "the optimizer steps": TrainConfig(batch=1, model=small_model(experts=64, expert_width=256)),
}


@pytest.mark.parametrize("moment", RUNS)
def test_each_moment_is_the_peak_of_some_run(moment: str) -> None:
    when = moments(RUNS[moment])
    assert list(when) == list(RUNS)
    assert peak_bytes(RUNS[moment]) == when[moment]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_earlier_passes_leave_their_gradients(dtype: Any) -> None:
    once = large(dtype=dtype)
    twice = dataclasses.replace(once, accumulate=2)
    grown = {name: moments(twice)[name] - nbytes for name, nbytes in moments(once).items()}
    parameters = estimate(once).parameters
    assert grown["the loss runs backward"] == 4 * parameters
    assert grown["the optimizer steps"] == 0


def test_with_a_scale_a_row_wide_experts_have_less_of_their_gradients_at_once() -> None:
    current, rowwise = (
        dataclasses.replace(large(dtype="bfloat16", model={"hidden": 256}), recipe=recipe)
        for recipe in ("float8_current", "float8_rowwise")
    )
    assert peak_bytes(rowwise) < peak_bytes(current)


def test_recomputation_saves_inputs_and_one_layer() -> None:
    assert peak_bytes(large(recompute="reentrant")) < peak_bytes(large())


@pytest.mark.parametrize("fields", [{}, {"stash_bytes": 5000}, {"stash": False}], ids=str)
def test_the_pages_are_those_that_the_run_then_has(tmp_path: Path, fields: dict[str, Any]) -> None:
    values: dict[str, Any] = {"stash": True, "stash_page_bytes": 64} | fields
    config = small_run(tmp_path, model=small_model(capacity_factor=2.0), **values)
    stash = Trainer(config, open_corpus(config)).stash
    held = 0 if stash is None else stash.pool.device_size * config.stash_page_bytes
    assert pool_bytes(config) == held


def test_the_table_shows_every_part_and_when_the_peak_is() -> None:
    rows = dict(table(large(stash=True)))
    assert {"weights", "gradients", "optimizer", "saved for backward"} <= rows.keys()
    assert "in the stash's pages" in rows
    assert "when the last layer runs forward" in rows["at most at once, on a GPU"]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mxfp8": {"recipe": "mxfp8"},
    "buffers": {"model": {"capacity_factor": 2.0}},
    "buffers, stash": {"stash": True, "model": {"capacity_factor": 2.0}},
    "buffers, float8": {"recipe": "float8_current", "model": {"capacity_factor": 2.0}},
    "buffers, stash, mxfp8": {
        **{"recipe": "mxfp8", "stash": True, "model": {"capacity_factor": 2.0}}
    },
    "float8_rowwise": {"recipe": "float8_rowwise"},
    "buffers, float8_rowwise": {"recipe": "float8_rowwise", "model": {"capacity_factor": 2.0}},
    "stash, float8_rowwise": {"recipe": "float8_rowwise", "stash": True},
    "buffers, stash, float8_rowwise": {
        **{"recipe": "float8_rowwise", "stash": True, "model": {"capacity_factor": 2.0}}
    },
    "shared": {"model": {"shared_width": 512}},
    "shared, stash": {"stash": True, "model": {"shared_width": 512, "capacity_factor": 2.0}},
    "much room, stash": {"stash": True, "model": {"layers": 4, "capacity_factor": 4.0}},
    "two passes": {"accumulate": 2, "stash": True, "model": {"capacity_factor": 2.0}},
    "vocabulary": {"model": {"vocabulary": 32768}},
    "weights": {"batch": 2, "model": {"experts": 32}},
    "attention": {"model": {"top_k": 1, "expert_width": 128}},
}
#: Of what was measured, by the estimate.
WITHIN = 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_on_a_gpu_the_peak_is_the_estimate(tmp_path: Path, fields: dict[str, Any]) -> None:
    sizes = {
        **{"layers": 3, "hidden": 1024, "heads": 16, "kv_heads": 4, "head_width": 64},
        **{"experts": 8, "top_k": 4, "expert_width": 512, "context": 512, "vocabulary": 256},
    }
    values = {"device": "cuda", "dtype": "bfloat16", "recipe": "high_precision", "batch": 16}
    model = small_model(**(sizes | fields.get("model", {})))
    # Enough text for a sequence in both parts.
    config = small_run(tmp_path, **(values | fields | {"model": model, "held_out": 0.3}))
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = Trainer(config, open_corpus(config))
    # A stash knows in which order backward asks once it has seen it.
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
    peak = torch.cuda.max_memory_allocated()
    # The matmul library keeps the workspaces of an earlier run.
    assert before <= 2**27
    assert peak_bytes(config) == pytest.approx(peak, rel=WITHIN)
