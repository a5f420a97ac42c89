"""A step finishes or changes nothing, and the next one is what it would have been."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from backstash.errors import CheckpointError, DeviceError
from backstash.nn.module import scaling_state
from backstash.recipes import recipe_names
from backstash.train.config import TrainConfig
from backstash.train.loop import NonFiniteError, Trainer, load_weights, open_device
from backstash.train.session import open_corpus
from backstash.train.state import Checkpoint, write_checkpoint
from train_cases import assert_same, small_model, small_run


def trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, open_corpus(config))


def state(of: Trainer) -> dict[str, Tensor]:
    """All that a step may change, what a checkpoint does not hold included."""
    tensors = {name: t.clone() for name, t in of.checkpoint().tensors.items()}
    for name, scaling in scaling_state(of.model).items():
        tensors[f"history.{name}"] = scaling.history_LG.clone()
    for index, moe in enumerate(of.model.mixtures()):
        tensors[f"pending.{index}"] = moe.router._pending_E.clone()
    return tensors


def losses(of: Trainer, steps: int) -> list[float]:
    return [of.step().loss for _ in range(steps)]


class Broken(Exception):
    """Raised where a test breaks a step."""


def break_backward(of: Trainer, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the second pass of a step fail after its first has run whole."""
    calls = []
    collect = of._optimizer.collect

    def fail() -> None:
        collect()
        calls.append(1)
        if len(calls) == 2:
            raise error

    monkeypatch.setattr(of._optimizer, "collect", fail)


def test_buffers_that_a_failing_step_has_written_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = trainer(small_run(tmp_path, steps=8))
    losses(of, 2)
    before = {name: buffer.clone() for name, buffer in of.model.named_buffers()}
    balance = of.model.balance_

    def fail() -> None:
        balance()
        raise Broken

    monkeypatch.setattr(of.model, "balance_", fail)
    with pytest.raises(Broken):
        of.step()
    assert_same(dict(of.model.named_buffers()), before)


@pytest.mark.parametrize("finished", [0, 2])
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8", "float8_delayed"])
@pytest.mark.parametrize("error", [Broken(), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_step_that_fails_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: int,
    recipe: str,
    error: BaseException,
) -> None:
    config = small_run(tmp_path, recipe=recipe, accumulate=2, steps=8)
    undisturbed, disturbed = trainer(config), trainer(config)
    losses(undisturbed, finished)
    torch.manual_seed(1)
    losses(disturbed, finished)
    torch.manual_seed(1)
    before = state(disturbed)
    break_backward(disturbed, monkeypatch, error)
    with pytest.raises(type(error)):
        disturbed.step()
    monkeypatch.undo()
    after = state(disturbed)
    # A learnt scale that the failed step was the first to need is as new.
    new = {name for name in after if name not in before}
    assert all("scaling" in name or "history" in name for name in new)
    assert_same({name: after[name] for name in before}, before)
    assert disturbed.finished_steps == finished
    torch.manual_seed(1)
    assert losses(disturbed, 3) == losses(undisturbed, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_no_numbers_stop_the_run_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    of = trainer(small_run(tmp_path))
    of.step()
    before = state(of)
    monkeypatch.setattr(of._optimizer, "gradient_norm", lambda: torch.tensor(value))
    with pytest.raises(NonFiniteError, match=r"step 2 needs a finite.*learning-rate"):
        of.step()
    assert_same(state(of), before)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    of = trainer(small_run(tmp_path))
    with torch.no_grad():
        of.model.embedding.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="loss nan"):
        of.step()


def test_evaluation_changes_nothing_and_repeats(tmp_path: Path) -> None:
    of = trainer(small_run(tmp_path, recipe="float8_delayed"))
    of.step()
    before = state(of)
    assert of.evaluate() == of.evaluate()
    assert of.model.training
    assert_same(state(of), before)


def test_accumulated_passes_learn_what_one_large_pass_learns(tmp_path: Path) -> None:
    model = small_model(balance_speed=0.0, balance_loss=0.01)
    fields: dict[str, Any] = {"recipe": "high_precision", "model": model}
    whole = trainer(small_run(tmp_path, batch=4, **fields))
    parts = trainer(small_run(tmp_path, batch=2, accumulate=2, **fields))
    first, second = whole.step(), parts.step()
    # The draws of two small batches are those of a large one.
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-2)
    assert second.expert_load_mean == first.expert_load_mean
    assert second.saved_bytes < first.saved_bytes


def test_the_measurements_of_a_step(tmp_path: Path) -> None:
    of = trainer(small_run(tmp_path))
    metrics = of.step()
    assert metrics.step == of.finished_steps == 1
    assert 5 < metrics.loss < 6
    assert metrics.grad_norm > 0
    assert metrics.learning_rate == of.config.optimizer.learning_rate
    assert metrics.expert_load_mean == 2 * 16 * 2 / 4
    assert metrics.expert_load_max >= metrics.expert_load_mean
    assert metrics.saved_bytes > 0


@pytest.mark.fresh_draws
@pytest.mark.parametrize("recipe", recipe_names())
def test_a_restored_trainer_goes_on_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    config = small_run(tmp_path, recipe=recipe)
    first = trainer(config)
    losses(first, 2)
    checkpoint = first.checkpoint()
    frozen = Checkpoint(
        step=checkpoint.step,
        tensors={name: t.clone() for name, t in checkpoint.tensors.items()},
        facts=checkpoint.facts,
    )
    wanted = losses(first, 2)
    second = trainer(config)
    second.restore(frozen)
    assert losses(second, 2) == wanted
    assert_same(state(second), state(first))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": small_model(layers=1)}, "model.layers was 2 and is 1"),
        ({"recipe": "high_precision"}, "recipe was 'mxfp8' and is 'high_precision'"),
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"dtype": "bfloat16"}, "dtype was"),
        ({"batch": 3}, "batch was 2 and is 3"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    config = small_run(tmp_path)
    checkpoint = trainer(config).checkpoint()
    with pytest.raises(CheckpointError, match=named):
        trainer(dataclasses.replace(config, **fields)).restore(checkpoint)


def test_a_checkpoint_of_other_text_is_refused(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    checkpoint = trainer(config).checkpoint()
    (tmp_path / "text" / "doc00.txt").write_text("other text\n" * 30)
    with pytest.raises(CheckpointError, match=r"other text.*--data"):
        trainer(config).restore(checkpoint)


@pytest.mark.parametrize("damage", ["cpu is missing", "batches are missing", "cpu is short"])
def test_a_checkpoint_without_its_random_state_is_refused(tmp_path: Path, damage: str) -> None:
    config = small_run(tmp_path)
    checkpoint = trainer(config).checkpoint()
    name, tensors = f"random.{damage.split()[0]}", dict(checkpoint.tensors)
    state = tensors.pop(name)
    if "short" in damage:
        tensors[name] = state[:-1]
    with pytest.raises(CheckpointError, match=f"random state that fits {damage.split()[0]}"):
        trainer(config).restore(dataclasses.replace(checkpoint, tensors=tensors))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    checkpoint = trainer(small_run(tmp_path)).checkpoint()
    other = trainer(small_run(tmp_path, model=small_model(hidden=32))).model
    with pytest.raises(CheckpointError, match="another model"):
        load_weights(other, checkpoint)
    fewer = trainer(small_run(tmp_path, model=small_model(layers=1))).model
    with pytest.raises(CheckpointError, match="another model"):
        load_weights(fewer, checkpoint)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="--device auto"):
        open_device("cuda:99")


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu") == torch.device("cpu")


def test_the_weights_in_a_checkpoint_have_the_names_of_the_model(tmp_path: Path) -> None:
    of = trainer(small_run(tmp_path, steps=2))
    of.step()
    tensors = load_file(write_checkpoint(tmp_path / "checkpoints", of.checkpoint(), keep=1))
    named = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    assert_same(named, of.model.state_dict())
