"""One step, and what makes it safe to fail.

A :class:`Trainer` owns everything a run changes: weights, optimizer, position in the text,
random state.  :meth:`Trainer.step` either finishes or changes none of it.  That is cheap
because weights move only at the very end: what a step touches before that (random state,
position, the routers' loads) is small, is remembered at the door, and is put back when
anything goes wrong, a loss that is not a number included.  Scales that are learnt move when
``autocast`` is left, which an exception leaves without a trace.  Only an optimizer that runs
out of memory half way cannot be taken back: that needs a second copy of all weights.

The same list of tensors, with the weights, is a checkpoint.  So a run that resumes has no
state that the run it continues did not have.

With several ranks (:mod:`backstash.train.ranks`) each owns its shards of it, and what is
measured is that of all of them; every rank calls every method.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from backstash.device import default_device
from backstash.errors import BackstashError, CheckpointError, DeviceError
from backstash.recipes import autocast
from backstash.saving import Meter, saving
from backstash.train.config import TrainConfig, config_to_json
from backstash.train.data import Batches, Corpus, held_out_batches
from backstash.train.metrics import StashMetrics, StepMetrics, peak_memory_bytes
from backstash.train.model import Decoder
from backstash.train.optimizer import Optimizer, learning_rate
from backstash.train.ranks import Ranks, own_device
from backstash.train.stash import StashGauge, open_stash
from backstash.train.state import Checkpoint

# A resumed run may differ from the one it continues in these; all else decides its values.
_FREE_ON_RESUME = frozenset(
    {"run", "start", "data", "tokenizer", "device", "save_every", "keep_checkpoints", "log_every"}
    | {"steps", "stop_after", "account", "evaluate_every", "evaluate_batches"}
    | {"stash", "stash_bytes", "stash_host_bytes", "stash_page_bytes"}
    | {"shard_weights"}
)


class NonFiniteError(BackstashError, ArithmeticError):
    """Raised when a loss or a gradient is not a number; the step it came from changed nothing."""


def open_device(name: str) -> torch.device:
    """Return the device that a config names.

    Raises:
        DeviceError: this machine has no such GPU.
    """
    device = default_device() if name == "auto" else torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise DeviceError(
                f"device {name} needs a CUDA GPU with that number, and PyTorch sees {count}; "
                "pass --device auto to take what there is"
            )
    return device


class _Pass(NamedTuple):
    """What is left of one forward and backward pass."""

    loss: Tensor
    counts_LE: Tensor
    stash: StashMetrics | None


class Trainer:
    """A model that learns from a corpus as a config says."""

    def __init__(self, config: TrainConfig, corpus: Corpus, ranks: Ranks | None = None) -> None:
        self.config = config
        self.corpus = corpus
        self.ranks = ranks or Ranks()
        is_alone = self.ranks.size == 1
        self.device = open_device(config.device) if is_alone else own_device(config.device)
        self.finished_steps = 0
        torch.manual_seed(config.seed)
        # Made on the CPU: a seed gives the same weights wherever the model then runs.
        self.model = make_model(config, self.ranks.counting).to(self.device)
        self._shards = self.ranks.shard(self.model)
        size = self.ranks.size
        self.stash = open_stash(config, self.device, ranks=size) if config.stash else None
        self._gauge = None if self.stash is None else StashGauge(self.stash)
        self._optimizer = Optimizer(
            self.model, config.optimizer, steps=config.steps, shards=self._shards
        )
        self._recipe = self.ranks.share_scales(config.formats)
        self._batches = Batches(
            corpus.train_tokens,
            batch=config.batch,
            context=config.model.context,
            seed=config.seed,
            part=self.ranks.part(config.batch),
        )

    def step(self) -> StepMetrics:
        """Learn from the next batches.

        Raises:
            NonFiniteError: the loss or the gradients are not finite.  Like after any other
                exception, the trainer is as it was before the call.
        """
        began = time.perf_counter()
        meter = Meter()
        # One context around all passes: scales that are learnt move once a step.
        with self._all_or_nothing(), autocast(recipe=self._recipe):
            # The host waits for the stash's counters, so they are read once a step.
            gauges = [None] * (self.config.accumulate - 1) + [self._gauge]
            passes = [self._forward_backward(meter, gauge) for gauge in gauges]
            loss = self.ranks.mean(torch.stack([one.loss for one in passes]).mean())
            norm = self._optimizer.gradient_norm()
            _check_finite(loss, norm, self.finished_steps + 1)
            self._optimizer.step(self.finished_steps, norm)
            self.model.balance_()
        loads_LE = self.ranks.total(torch.stack([one.counts_LE for one in passes]).sum(0))
        self.finished_steps += 1
        rate = learning_rate(self.finished_steps - 1, self.config.steps, self.config.optimizer)
        return StepMetrics(
            step=self.finished_steps,
            loss=loss.item(),
            grad_norm=norm.item(),
            learning_rate=rate,
            tokens_per_s=self.config.step_tokens / (time.perf_counter() - began),
            saved_bytes=meter.bytes,
            peak_memory_bytes=peak_memory_bytes(self.device),
            expert_load_max=int(loads_LE.max()),
            expert_load_mean=loads_LE.double().mean().item(),
            stash=passes[-1].stash,
        )

    def _forward_backward(self, meter: Meter, gauge: StashGauge | None) -> _Pass:
        tokens_BS, targets_BS = (t.to(self.device) for t in self._batches.draw())
        meter.reset()
        with saving(meter, *(() if self.stash is None else (self.stash,))):
            loss = self.model.loss(tokens_BS, targets_BS)
        stash = None if gauge is None else gauge.read()
        (loss.total / self.config.accumulate).backward()
        self._optimizer.collect()
        return _Pass(loss.total.detach(), loss.counts_LE, stash)

    def evaluate(self) -> float:
        """Return the loss on held-out text, in nats a token; changes nothing."""
        config = self.config
        batches = held_out_batches(
            self.corpus.held_out_tokens,
            batch=config.batch,
            context=config.model.context,
            batches=config.evaluate_batches,
        )
        part = self.ranks.part(config.batch)
        self.model.eval()
        try:
            with torch.no_grad(), autocast(recipe=self._recipe):
                losses = [
                    self.model.loss(
                        tokens_BS[part].to(self.device), targets_BS[part].to(self.device)
                    ).total
                    for tokens_BS, targets_BS in batches
                ]
        finally:
            self.model.train()
        return self.ranks.mean(torch.stack(losses).double().mean()).item()

    def checkpoint(self) -> Checkpoint:
        """Return the state of the run; the tensors are the live ones, so write them at once.

        That of the first rank is whole, however many there are.
        """
        state = self.model.state_dict().items()
        tensors = {f"model.{name}": self._shards.whole(name, t) for name, t in state}
        tensors |= {f"optimizer.{name}": t for name, t in self._optimizer.state().items()}
        tensors |= {f"random.{name}": t for name, t in self._random_state().items()}
        facts = {
            "config": config_to_json(self.config),
            "fingerprint": self.corpus.fingerprint,
            "device": self.device.type,
        }
        return Checkpoint(step=self.finished_steps, tensors=tensors, facts=facts)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, bit for bit.

        Raises:
            CheckpointError: it is of another model, other text, or another run altogether.
        """
        check_same_run(self.config, checkpoint)
        if checkpoint.facts.get("fingerprint") != self.corpus.fingerprint:
            raise CheckpointError(
                "the checkpoint was trained on other text (fingerprint "
                f"{checkpoint.facts.get('fingerprint')}, now {self.corpus.fingerprint}); pass the "
                "same --data and --tokenizer, or start again with --start fresh"
            )
        random_state = checkpoint.part("random")
        own = self._random_state().items()
        wrong = [name for name, t in own if _differs(t, random_state.get(name))]
        if wrong and wrong != ["cuda"]:
            raise CheckpointError(
                f"the checkpoint has no random state that fits {', '.join(wrong)}, so the run "
                "could not go on bit for bit; resume with the torch that it was started with, or "
                "start again with --start fresh"
            )
        load_weights(self.model, checkpoint)
        self._optimizer.set_state(checkpoint.part("optimizer"))
        self._set_random_state(random_state)
        self.finished_steps = checkpoint.step

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        random_state = self._random_state()
        try:
            yield
        except BaseException:
            self._optimizer.drop_gradients()
            self.model.forget_counts_()
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
            self._set_random_state(random_state)
            raise

    def _random_state(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state(), "batches": self._batches.state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _set_random_state(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        self._batches.set_state(states["batches"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)


def make_model(config: TrainConfig, counting: dist.ProcessGroup | None = None) -> Decoder:
    """Return a new model as the config says, on the CPU."""
    formats = config.formats
    learns = any(f.stateful for f in (formats.input, formats.weight, formats.gradient))
    return Decoder(
        config.model,
        dtype=getattr(torch, config.dtype),
        recompute=config.recompute,
        save_original_input=not learns,
        loss_scale=1 / config.accumulate,
        counting=counting,
    )


def _differs(own: Tensor, saved: Tensor | None) -> bool:
    return saved is None or (saved.shape, saved.dtype) != (own.shape, own.dtype)


def _check_finite(loss: Tensor, norm: Tensor, step: int) -> None:
    if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
        raise NonFiniteError(
            f"step {step} needs a finite loss and gradient norm, got loss {loss.item()} and norm "
            f"{norm.item()}; nothing was changed: lower --optimizer.learning-rate, or take a "
            "recipe with more range"
        )


def check_same_run(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raise :class:`CheckpointError` if a field that decides values differs."""
    # An option that is newer than the checkpoint had then what is now its default.
    before = config_to_json(TrainConfig()) | checkpoint.facts.get("config", {})
    now = config_to_json(config)
    differing = [
        f"{part}{key} was {old.get(key)!r} and is {value!r}"
        for part, old, new in (
            ("model.", before.get("model", {}), now["model"]),
            ("optimizer.", before.get("optimizer", {}), now["optimizer"]),
            ("", before, now),
        )
        for key, value in new.items()
        if not isinstance(value, dict) and key not in _FREE_ON_RESUME and old.get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint is of another run: {'; '.join(differing)}; resume with the same "
            "options, or start again with --start fresh"
        )


def load_weights(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load the model's part of a checkpoint.

    Raises:
        CheckpointError: a tensor is missing, is one too many, or has another shape or dtype.
    """
    saved, own = checkpoint.part("model"), model.state_dict()
    # Learnt scales appear with the first step, so a new model does not name them.
    fixed = {name for name in saved if ".delayed_scaling." not in name}
    wrong = sorted(fixed ^ set(own)) or [
        name
        for name, tensor in own.items()
        # The shape of a shard is that of its rows, its size() that of the whole.
        if saved[name].size() != tensor.size() or saved[name].dtype != tensor.dtype
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint is of another model: {len(wrong)} tensors differ, the first is "
            f"{wrong[0]}; pass the --model options that it was trained with"
        )
    model.load_state_dict(saved)
