"""A run with a stash is the run without one, and says what the stash held."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash import cli
from backstash.errors import ConfigError
from backstash.train import metrics
from backstash.train.config import TrainConfig, config_from_json, config_to_json
from backstash.train.demo import account, summarize, table
from backstash.train.estimate import computes_in_slabs, estimate
from backstash.train.loop import Trainer
from backstash.train.metrics import PlainOutput, describe
from backstash.train.peak import table as estimate_table
from backstash.train.session import open_corpus
from backstash.train.stash import open_stash, pool_margin
from train_cases import assert_same, resumed, run, small_model, small_run, state_of

STASH_KEYS = {"stash_pages_used", "stash_fill", "stash_high_bytes"}
STASH_KEYS |= {"stash_spilled_bytes", "stash_kept_bytes"}
CAPACITIES = (None, 1.0, 2.5)


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    find = metrics.importlib.util.find_spec
    monkeypatch.setattr(
        metrics.importlib.util,
        "find_spec",
        lambda name: None if name == "tensorboard" else find(name),
    )


def stashed_run(folder: Path, **fields: Any) -> TrainConfig:
    """A small run whose buffers are many small pages."""
    return small_run(folder, **({"stash": True, "stash_page_bytes": 64} | fields))


def without(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, stash=False, stash_bytes=None, stash_host_bytes=0)


def trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, open_corpus(config))


def assert_same_run(config: TrainConfig) -> Trainer:
    """Both runs have the same losses, gradients and state, bit for bit; returns the stashed one."""
    ours, plain = trainer(config), trainer(without(config))
    for _ in range(3):
        got, wanted = ours.step(), plain.step()
        assert (got.loss, got.grad_norm) == (wanted.loss, wanted.grad_norm)
        assert got.saved_bytes == wanted.saved_bytes
        assert (got.stash is not None, wanted.stash) == (True, None)
    assert_same(dict(ours.checkpoint().tensors), dict(plain.checkpoint().tensors))
    assert ours.stash is not None
    stats = ours.stash.stats()
    assert (stats.device_used, stats.host_used) == (0, 0)
    return ours


# --- nothing changes ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8", "float8_delayed"])
@pytest.mark.parametrize("preactivation", ["high_precision", "mxfp8"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_loss_and_weight_is_that_of_a_run_without_a_stash(
    tmp_path: Path, recipe: str, preactivation: str, capacity: float | None
) -> None:
    model = small_model(capacity_factor=capacity, shared_width=24, balance_loss=0.01)
    config = stashed_run(tmp_path, recipe=recipe, preactivation=preactivation, model=model)
    ours = assert_same_run(config)
    assert ours.stash is not None
    assert ours.stash.stats().bytes_stashed > 0


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
def test_a_stash_goes_with_recomputation(tmp_path: Path, recompute: str) -> None:
    model = small_model(capacity_factor=2.0)
    assert_same_run(stashed_run(tmp_path, recompute=recompute, model=model))


@pytest.mark.parametrize(("stash_bytes", "host_bytes"), [(0, 0), (1024, 0), (1024, 1 << 20)])
def test_a_pool_that_is_too_small_changes_nothing_either(
    tmp_path: Path, stash_bytes: int, host_bytes: int
) -> None:
    config = stashed_run(
        tmp_path,
        stash_bytes=stash_bytes,
        stash_host_bytes=host_bytes,
        accumulate=2,
        model=small_model(capacity_factor=2.0),
    )
    assert_same_run(config)
    reading = trainer(config).step().stash
    assert reading is not None
    assert (reading.stash_spilled_bytes > 0) == (host_bytes > 0)
    assert (reading.stash_kept_bytes > 0) == (host_bytes == 0)


@pytest.mark.parametrize(("before", "after"), list(itertools.product([True, False], repeat=2)))
def test_a_resumed_run_goes_on_bit_for_bit_with_a_stash_or_without(
    tmp_path: Path, before: bool, after: bool
) -> None:
    model = small_model(capacity_factor=2.0)
    whole = run(small_run(tmp_path / "whole", model=model))
    config = dataclasses.replace(whole.trainer.config, run=tmp_path / "run", stash_page_bytes=64)
    run(dataclasses.replace(config, stash=before, stop_after=2))
    ours = run(resumed(dataclasses.replace(config, stash=after)))
    assert_same(state_of(ours), state_of(whole))
    losses = [[r.get("loss") for r in outcome.records] for outcome in (ours, whole)]
    assert losses[0] == losses[1]
    assert [r.keys() >= STASH_KEYS for r in ours.records[1:]] == [before, before, after, after]


def test_a_step_that_fails_gives_its_pages_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stashed_run(tmp_path, accumulate=2)
    ours, plain = trainer(config), trainer(without(config))

    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours._optimizer, "collect", fail)
    with pytest.raises(KeyboardInterrupt):
        ours.step()
    monkeypatch.undo()
    assert [ours.step().loss for _ in range(2)] == [plain.step().loss for _ in range(2)]
    assert ours.stash is not None
    assert ours.stash.stats().device_used == 0


def test_a_capacity_drops_no_row_and_its_loss_is_the_same(tmp_path: Path) -> None:
    losses = [
        [trainer(small_run(tmp_path, model=small_model(capacity_factor=c))).step().loss]
        for c in CAPACITIES
    ]
    assert losses[0] == losses[1] == losses[2]


# --- what is said ------------------------------------------------------------------------------


def test_without_a_stash_no_number_of_it_is_shown(tmp_path: Path) -> None:
    outcome = run(small_run(tmp_path))
    assert not any(key.startswith("stash") for r in outcome.records for key in r)
    assert "stash" not in summarize(outcome)
    assert outcome.trainer.stash is None
    assert not any("stash" in name for name in dict(estimate_table(TrainConfig())))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_record_says_what_the_stash_holds_when_backward_begins(
    tmp_path: Path, accumulate: int
) -> None:
    config = stashed_run(
        tmp_path, accumulate=accumulate, model=small_model(capacity_factor=2.0, hidden=32)
    )
    ours = trainer(config)
    assert ours.stash is not None
    for step in range(3):
        reading = ours.step().stash
        assert reading is not None
        # From the second microbatch on the newest stay where they are.
        is_first = step == 0 and accumulate == 1
        assert (reading.stash_pages_used * 64 == reading.stash_high_bytes) == is_first
        assert 0 < reading.stash_pages_used * 64 <= reading.stash_high_bytes
        assert 0 < reading.stash_fill <= 1
        assert (reading.stash_spilled_bytes, reading.stash_kept_bytes) == (0, 0)


def test_spilled_bytes_are_those_of_the_step_though_the_pool_is_replaced(tmp_path: Path) -> None:
    config = stashed_run(tmp_path, stash_host_bytes=1 << 20, model=small_model(capacity_factor=1.0))
    ours = trainer(config)
    assert ours.stash is not None
    # A pool that knows nothing yet: everything goes to the host, and then it grows.
    assert ours.stash.pool._replace(0) is True
    ours.stash.pool._need.pages = 0.0
    readings = [ours.step().stash for _ in range(4)]
    spilled = [r.stash_spilled_bytes for r in readings if r is not None]
    assert spilled[0] == readings[0].stash_pages_used * 64 > 0  # pyright: ignore[reportOptionalMemberAccess]
    assert spilled[-1] == 0
    assert all(0 <= count <= spilled[0] for count in spilled)
    highs = [r.stash_high_bytes for r in readings if r is not None]
    assert highs == sorted(highs)


def test_the_progress_line_shows_fill_high_water_and_spill(tmp_path: Path) -> None:
    record = {**trainer(stashed_run(tmp_path)).step().record(), "stash_fill": 0.5}
    record |= {"stash_high_bytes": 3 << 20, "stash_spilled_bytes": 1 << 20}
    stream = io.StringIO()
    PlainOutput(steps=1, log_every=1, stream=stream).progress(record)
    assert "stash 50% full, most 3.0 MiB, spilled 1.0 MiB" in stream.getvalue()
    assert "stash" not in describe({k: v for k, v in record.items() if "stash" not in k})


def test_the_summary_and_its_table_have_figures_of_the_stash(tmp_path: Path) -> None:
    outcome = run(stashed_run(tmp_path, model=small_model(capacity_factor=2.0)))
    summary = json.loads(json.dumps(summarize(outcome) | account(outcome.trainer)))
    figures = summary["stash"]
    assert figures["high_bytes"] == max(r.get("stash_high_bytes", 0) for r in outcome.records)
    assert 0 < figures["high_bytes"] <= figures["pool_bytes"]
    assert figures["page_bytes"] == 64
    assert (figures["spilled_bytes"], figures["kept_bytes"]) == (0, 0)
    assert summary["bit_equal_under"]["the stash"] is True
    assert summary["bit_equal_under_hooks"] is True
    rows = dict(table(summary))
    assert rows["most in the stash's pages"] == f"{figures['high_bytes']:,} bytes"
    assert rows["gradients under the stash"] == "bit-equal"


def test_the_option_is_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_run(tmp_path)
    words = ["--preset", "tiny", "--data", "text", "--steps", "2", "--device", "cpu"]
    stash = ["--stash", "--stash-page-bytes", "256", "--model.capacity-factor", "2"]
    assert cli.main(["train", *words, *stash]) == 0
    assert "% full, most " in capsys.readouterr().out
    assert json.loads(Path("runs/tiny/summary.json").read_text())["stash"]["high_bytes"] > 0
    assert cli.main(["estimate", *words, *stash]) == 0
    assert "in the stash's pages" in capsys.readouterr().out


# --- how large ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8", "float8_current", "float8_delayed"])
@pytest.mark.parametrize("preactivation", ["high_precision", "mxfp8"])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("shared_width", [0, 24])
def test_the_estimate_is_what_the_stash_then_holds(
    tmp_path: Path, recipe: str, preactivation: str, capacity: float | None, shared_width: int
) -> None:
    model = small_model(capacity_factor=capacity, shared_width=shared_width, layers=3)
    config = stashed_run(
        tmp_path, recipe=recipe, preactivation=preactivation, model=model, stash_page_bytes=16
    )
    reading = trainer(config).step().stash
    assert reading is not None
    assert reading.stash_kept_bytes == 0
    held, wanted = reading.stash_pages_used * 16, estimate(config).stash_bytes
    # Not to the byte: codes and scales fill pages of their own, and scales for the last, partly
    # filled block of each expert are there only if it has rows.
    assert held == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("shared_width", [0, 32])
def test_the_estimate_counts_whole_slabs_for_each_expert(tmp_path: Path, shared_width: int) -> None:
    page_bytes = 64 * 16 * 4  # 16 columns of float32
    model = small_model(capacity_factor=2.0, shared_width=shared_width, layers=3)
    fields = {"recipe": "high_precision", "stash_page_bytes": page_bytes}
    config = stashed_run(tmp_path, model=model, **fields)
    assert computes_in_slabs(config)
    train = trainer(config)
    reading = train.step().stash
    assert reading is not None
    assert train.stash is not None
    assert train.stash.stats().claimed == model.layers
    held = reading.stash_pages_used * page_bytes
    columns = model.hidden + 2 * model.expert_width
    spared = model.layers * model.experts * columns // 16 * page_bytes
    # An expert's last slab may be as good as empty, or full.
    assert estimate(config).stash_bytes - spared <= held <= estimate(config).stash_bytes


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
def test_recomputation_leaves_nothing_to_stash(tmp_path: Path, recompute: str) -> None:
    config = stashed_run(tmp_path, recompute=recompute)
    reading = trainer(config).step().stash
    assert reading is not None
    assert reading.stash_pages_used == estimate(config).stash_bytes == 0


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8", "float8_current", "float8_delayed"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_saved_bytes_count_the_room_of_buffers(
    tmp_path: Path, top_k: int, dtype: Any, recipe: str, capacity: float | None
) -> None:
    model = small_model(capacity_factor=capacity, shared_width=24, top_k=top_k, balance_loss=0.1)
    config = small_run(tmp_path, dtype=dtype, recipe=recipe, model=model)
    assert trainer(config).step().saved_bytes == estimate(config).saved_bytes


def test_a_pool_has_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    config = stashed_run(tmp_path, stash_bytes=4096, stash_host_bytes=1024)
    pool = open_stash(config, torch.device("cpu")).pool
    assert (pool.device_size, pool.host_size, pool.page_bytes) == (64, 16, 64)
    assert pool.sizing is None


def test_a_pool_that_follows_has_room_for_the_empty_rows_of_a_layer(tmp_path: Path) -> None:
    config = stashed_run(tmp_path, model=small_model(capacity_factor=3.0, layers=4))
    assert pool_margin(config) == pytest.approx(1.1 * 1.5)
    assert pool_margin(stashed_run(tmp_path)) == pytest.approx(1.1)


def test_a_rank_has_a_pool_for_its_part_of_the_batch(tmp_path: Path) -> None:
    config = stashed_run(tmp_path, batch=4)
    half = dataclasses.replace(config, batch=2)
    pools = [
        open_stash(config, torch.device("cpu"), ranks=2).pool,
        open_stash(half, torch.device("cpu")).pool,
    ]
    assert pools[0].device_size == pools[1].device_size > 0


# --- what is refused ---------------------------------------------------------------------------


def test_a_stash_that_would_take_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than a page of 1048576 bytes"):
        trainer(stashed_run(tmp_path, stash_page_bytes=2**20))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stash": "yes"}, "stash"),
    *(({"stash": True, "stash_bytes": value}, "stash_bytes") for value in (-1, 1.5, "1", True)),
    *(({"stash": True, "stash_host_bytes": value}, "stash_host_bytes") for value in (-1, None)),
    *(({"stash_page_bytes": value}, "stash_page_bytes") for value in (0, 8, 24, 65537, None)),
    ({"stash": True, "stash_bytes": 16, "stash_page_bytes": 32}, "a page of 32 bytes, got 16"),
    ({"stash": True, "stash_host_bytes": 4}, "stash_host_bytes has to be room for a page of 65536"),
    ({"stash_bytes": 1 << 20}, "--stash"),
    ({"stash_host_bytes": 1 << 20}, "--stash"),
]


@pytest.mark.parametrize(("fields", "named"), WRONG, ids=[repr(fields) for fields, _ in WRONG])
def test_a_wrong_size_is_refused_when_the_config_is_made(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        TrainConfig(**fields)
    assert "pass" in str(caught.value) or "wrap" in str(caught.value)


@pytest.mark.parametrize("value", [0, 0.9, -1.0, float("nan"), float("inf"), "2", True])
def test_a_capacity_that_would_drop_rows_is_refused(value: Any) -> None:
    words = r"capacity_factor has to be .* at least 1, got .*; pass for example 2"
    with pytest.raises(ConfigError, match=words):
        small_model(capacity_factor=value)


def test_the_options_survive_being_written_down() -> None:
    config = TrainConfig(stash=True, stash_bytes=1 << 20, model=small_model(capacity_factor=2.0))
    assert config_from_json(json.loads(json.dumps(config_to_json(config))), TrainConfig) == config


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
@pytest.mark.parametrize("capacity", [None, 2.0])
def test_on_a_gpu_the_estimate_is_the_most_that_was_held(
    tmp_path: Path, recipe: str, capacity: float | None
) -> None:
    model = small_model(hidden=256, expert_width=512, context=128, capacity_factor=capacity)
    config = stashed_run(
        tmp_path,
        recipe=recipe,
        model=model,
        batch=32,
        device="cuda",
        dtype="bfloat16",
        stash_page_bytes=65536,
    )
    made = trainer(config)
    for _ in range(3):
        reading = made.step().stash
    assert reading is not None
    assert reading.stash_kept_bytes == 0
    assert reading.stash_high_bytes == pytest.approx(estimate(config).stash_bytes, rel=0.05)
