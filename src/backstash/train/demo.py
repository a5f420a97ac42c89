"""What a demo shows once its model is trained: where the bytes went, and that nothing changed.

Three questions, each answered by running one step of the trained model:

1. How many bytes does a forward pass keep for backward: in plain PyTorch, in our modules in
   high precision, in our modules in the run's recipe?
2. Are gradients bit-equal when something else keeps those bytes for us: identity hooks,
   ``save_on_cpu``, ``torch.utils.checkpoint`` in both modes?
3. What does the model write?
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from backstash.recipes import Recipe, autocast, recipe
from backstash.saving import Meter, saving
from backstash.stash import Stash
from backstash.train.config import ModelConfig, Recompute
from backstash.train.data import held_out_batches
from backstash.train.generate import GenerateConfig, generate_text
from backstash.train.loop import Trainer
from backstash.train.model import Decoder
from backstash.train.plain import PlainDecoder
from backstash.train.session import Outcome
from backstash.train.shards import count_parameters
from backstash.train.tokenizer import open_tokenizer

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Something that keeps what backward needs: hooks, or recomputation."""

    name: str
    hooks: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    recompute: Recompute = "none"


KEEPERS = (
    Keeper(name="identity hooks", hooks=lambda: saved_tensors_hooks(_same, _same)),
    Keeper(name="save_on_cpu", hooks=save_on_cpu),
    Keeper(name="checkpoint, non-reentrant", recompute="non_reentrant"),
    Keeper(name="checkpoint, reentrant", recompute="reentrant"),
)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def stash_figures(stash: Stash, records: list[dict[str, float]]) -> dict[str, float]:
    """Return what the stash held over the whole run; steps without a stash count as none."""
    steps = [r for r in records if "stash_fill" in r]
    return {
        "page_bytes": stash.pool.page_bytes,
        "pool_bytes": stash.pool.device_size * stash.pool.page_bytes,
        "host_pool_bytes": stash.pool.host_size * stash.pool.page_bytes,
        "high_bytes": max((r["stash_high_bytes"] for r in steps), default=0),
        "fill": steps[-1]["stash_fill"] if steps else 0.0,
        "spilled_bytes": sum(r["stash_spilled_bytes"] for r in steps),
        "kept_bytes": sum(r["stash_kept_bytes"] for r in steps),
        "growths": stash.pool.growths,
    }


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Return the numbers that any run ends with."""
    records = outcome.records
    evaluated = [r["held_out_loss"] for r in records if "held_out_loss" in r]
    steps = [r for r in records if "loss" in r]
    trainer = outcome.trainer
    summary = {
        "steps": trainer.finished_steps,
        "recipe": trainer.config.recipe_words,
        "preactivation": trainer.config.preactivation,
        "dtype": trainer.config.dtype,
        "device": str(trainer.device),
        "parameters": count_parameters(trainer.model),
        "loss_first": evaluated[0] if evaluated else None,
        "loss_last": evaluated[-1] if evaluated else None,
        "loss_unigram": outcome.loss_unigram,
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in steps) if steps else None,
        "saved_bytes": steps[-1]["saved_bytes"] if steps else None,
        "peak_memory_bytes": steps[-1]["peak_memory_bytes"] if steps else None,
    }
    if trainer.stash is not None:
        summary["stash"] = stash_figures(trainer.stash, records)
    return summary


def account(trainer: Trainer) -> dict[str, Any]:
    """Answer the three questions about a trained model; leaves it as it was."""
    batch = _held_out_batch(trainer)
    equal = bit_equal_under(trainer, batch)
    return {
        **saved_bytes_of_twins(trainer, batch),
        "bit_equal_under": equal,
        "bit_equal_under_hooks": all(equal.values()),
        "sample": sample(trainer),
    }


def _held_out_batch(trainer: Trainer) -> Batch:
    config = trainer.config
    batches = held_out_batches(
        trainer.corpus.held_out_tokens,
        batch=config.batch,
        context=config.model.context,
        batches=1,
    )
    tokens_BS, targets_BS = next(batches)
    return tokens_BS.to(trainer.device), targets_BS.to(trainer.device)


def saved_bytes_of_twins(trainer: Trainer, batch: Batch) -> dict[str, int]:
    """Return the bytes one forward pass keeps: plain, ours in high precision, ours as trained.

    Distinct bytes of what autograd holds, without the weights, which are there anyway.
    """
    plain = plain_twin(trainer.model, trainer.config.model)
    return {
        "saved_bytes_plain": saved_bytes(plain, batch, recipe("high_precision")),
        "saved_bytes_high_precision": saved_bytes(trainer.model, batch, recipe("high_precision")),
        "saved_bytes": saved_bytes(trainer.model, batch, trainer.config.formats),
    }


def plain_twin(model: Decoder, config: ModelConfig) -> PlainDecoder:
    """Return the same model, with the same weights, in plain PyTorch."""
    parameter = next(model.parameters())
    # Its first weights are drawn and thrown away; nobody else's draws may move for that.
    with torch.random.fork_rng(devices=[]):
        plain = PlainDecoder(config, dtype=parameter.dtype).to(parameter.device)
    state = model.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    return plain


def saved_bytes(model: Decoder | PlainDecoder, batch: Batch, formats: Recipe) -> int:
    """Return the distinct bytes that ``model`` keeps for backward of one batch."""
    meter = Meter()
    with saving(meter), autocast(recipe=formats):
        result = model.loss(*batch)
    count = meter.bytes
    del result
    return count


def bit_equal_under(trainer: Trainer, batch: Batch) -> dict[str, bool]:
    """Return for each keeper whether all gradients have the bits that they have without it."""
    wanted = _gradients(trainer, batch, Keeper(name="none"))
    keepers = (*KEEPERS, *_keepers_of_run(trainer))
    return {keeper.name: _equal(_gradients(trainer, batch, keeper), wanted) for keeper in keepers}


def _keepers_of_run(trainer: Trainer) -> list[Keeper]:
    """What keeps saved tensors in this run and not in every one."""
    stash = trainer.stash
    return [] if stash is None else [Keeper(name="the stash", hooks=lambda: saving(stash))]


def _gradients(trainer: Trainer, batch: Batch, keeper: Keeper) -> dict[str, Tensor]:
    model = trainer.model
    before = model.recompute
    model.recompute = keeper.recompute
    try:
        with keeper.hooks(), autocast(recipe=trainer.config.formats):
            loss = model.loss(*batch).total
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    finally:
        model.recompute = before
        model.zero_grad(set_to_none=True)
        model.forget_counts_()


def _equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[n], wanted[n]) for n in wanted)


def sample(trainer: Trainer) -> str:
    """Return some text that the model writes."""
    tokenizer = open_tokenizer(trainer.config.tokenizer)
    config = GenerateConfig(prompt="def ", tokens=200)
    return "".join(generate_text(trainer.model, tokenizer, trainer.config, config))


def curves(outcome: Outcome) -> dict[str, list[tuple[float, float]]]:
    """Return the losses over the steps, by name."""
    names = {"training": "loss", "held out": "held_out_loss"}
    return {
        name: [(r["step"], r[key]) for r in outcome.records if key in r]
        for name, key in names.items()
    }


def table(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a summary with an account as rows of a name and a value, for people."""
    plain = summary["saved_bytes_plain"]
    rows = [
        ("held-out loss before training", f"{summary['loss_first']:.3f} nats a token"),
        ("held-out loss after training", f"{summary['loss_last']:.3f}"),
        ("unigram entropy (a model without context)", f"{summary['loss_unigram']:.3f}"),
        ("tokens/s", f"{summary['tokens_per_s']:,.0f}"),
    ]
    for name, key in (
        ("saved for backward, plain PyTorch", "saved_bytes_plain"),
        ("saved for backward, backstash high_precision", "saved_bytes_high_precision"),
        (f"saved for backward, backstash {_formats(summary)}", "saved_bytes"),
    ):
        rows.append((name, f"{summary[key]:,} bytes  ({summary[key] / plain:.0%})"))
    if "stash" in summary:
        stash = summary["stash"]
        rows += [
            ("most in the stash's pages", f"{stash['high_bytes']:,} bytes"),
            ("  of a pool of", f"{stash['pool_bytes']:,} bytes"),
            ("  spilled to host memory, all steps", f"{stash['spilled_bytes']:,} bytes"),
            ("  kept out for want of room, all steps", f"{stash['kept_bytes']:,} bytes"),
        ]
    for name, is_equal in summary["bit_equal_under"].items():
        rows.append((f"gradients under {name}", "bit-equal" if is_equal else "NOT EQUAL"))
    return rows


def _formats(summary: dict[str, Any]) -> str:
    kept = summary["preactivation"]
    return summary["recipe"] + ("" if kept == "high_precision" else f", pre-activations {kept}")
