"""The account after a run: whose bytes, whose bits, whose text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backstash.recipes import recipe
from backstash.train import demo, metrics
from backstash.train.demo import Keeper, account, bit_equal_under, curves, summarize, table
from backstash.train.estimate import estimate
from backstash.train.session import Outcome
from train_cases import assert_same, run, small_run, state_of


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    return run(small_run(tmp_path, recipe="mxfp8", preactivation="mxfp8"))


def test_the_summary_has_what_a_reader_looks_for(outcome: Outcome) -> None:
    summary = summarize(outcome) | account(outcome.trainer)
    wanted = {"loss_first", "loss_last", "loss_unigram", "tokens_per_s", "steps", "recipe"}
    wanted |= {"saved_bytes_plain", "saved_bytes_high_precision", "saved_bytes"}
    assert wanted | {"bit_equal_under_hooks"} <= summary.keys()
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["steps"] == 4
    assert summary["bit_equal_under_hooks"] is True
    assert summary["sample"].startswith("def ")


def test_low_precision_keeps_less_than_high_and_high_less_than_plain(outcome: Outcome) -> None:
    numbers = account(outcome.trainer)
    ours, high, plain = (
        numbers[key] for key in ("saved_bytes", "saved_bytes_high_precision", "saved_bytes_plain")
    )
    assert ours < high < plain
    assert ours == estimate(outcome.trainer.config).saved_bytes
    assert ours == outcome.records[-1]["saved_bytes"]


def test_an_account_leaves_the_run_as_it_was(outcome: Outcome) -> None:
    before = state_of(outcome)
    account(outcome.trainer)
    assert_same(state_of(outcome), before)
    assert all(p.grad is None for p in outcome.trainer.model.parameters())
    assert outcome.trainer.model.recompute == "none"


def test_hooks_that_change_a_bit_are_noticed(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.001 if tensor.is_floating_point() else tensor

    lossy = Keeper(
        name="lossy",
        hooks=lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, worse),
    )
    monkeypatch.setattr(demo, "KEEPERS", (*demo.KEEPERS, lossy))
    batch = demo._held_out_batch(outcome.trainer)
    equal = bit_equal_under(outcome.trainer, batch)
    assert equal.pop("lossy") is False
    assert all(equal.values())
    assert len(equal) == 4


def test_the_table_names_each_number(outcome: Outcome) -> None:
    rows = dict(table(summarize(outcome) | account(outcome.trainer)))
    assert rows["gradients under save_on_cpu"] == "bit-equal"
    assert "(100%)" in rows["saved for backward, plain PyTorch"]
    assert any("mxfp8, pre-activations mxfp8" in name for name in rows)


def test_the_curves_are_those_of_the_records(outcome: Outcome) -> None:
    found = curves(outcome)
    assert [step for step, _ in found["training"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["held out"]] == [0, 2, 4]


def test_a_recipe_changes_what_is_kept_not_the_weights(outcome: Outcome) -> None:
    batch = demo._held_out_batch(outcome.trainer)
    before = state_of(outcome)
    assert demo.saved_bytes(outcome.trainer.model, batch, recipe("float8_current")) > 0
    outcome.trainer.model.forget_counts_()
    assert_same(state_of(outcome), before)
