"""A run from beginning to end: folder, steps, evaluations, checkpoints, and how it may stop."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from backstash.errors import ConfigError
from backstash.train.config import TrainConfig
from backstash.train.data import Corpus, read_corpus, unigram_loss
from backstash.train.folder import RunFolder
from backstash.train.interrupt import Interrupt
from backstash.train.loop import Trainer
from backstash.train.metrics import MetricsLog, Output, StepMetrics, open_output, read_metrics
from backstash.train.ranks import Ranks, Silence, open_ranks
from backstash.train.shards import count_parameters
from backstash.train.state import read_checkpoint, write_checkpoint
from backstash.train.tokenizer import open_tokenizer

Log = MetricsLog | Silence


class Ending(enum.Enum):
    """How a run came to its end."""

    FINISHED = "all steps are done"
    STOPPED = "stopped between two steps, with a checkpoint of the last one"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves: the trainer as it is, and the losses to judge it by."""

    trainer: Trainer
    folder: RunFolder
    ending: Ending
    loss_unigram: float

    @property
    def records(self) -> list[dict[str, float]]:
        """Records of all steps, those before a resume included."""
        return read_metrics(self.folder.metrics)


def open_corpus(config: TrainConfig) -> Corpus:
    """Read the text that the config names.

    Raises:
        DataError: the text or the tokenizer cannot be used.
        ConfigError: the tokenizer has more tokens than the model.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    if tokenizer.vocabulary > config.model.vocabulary:
        raise ConfigError(
            f"model.vocabulary has to be at least the tokenizer's {tokenizer.vocabulary}, got "
            f"{config.model.vocabulary}; pass --model.vocabulary {tokenizer.vocabulary}"
        )
    return read_corpus(
        config.data, tokenizer, held_out=config.held_out, context=config.model.context
    )


def train(config: TrainConfig, output: Output | None = None) -> Outcome:
    """Train as the config says, in its run folder.

    The text is read and the model is made before the folder is touched, so a mistake in the
    config costs no earlier run.  Started by ``torchrun`` with ``shard_weights``, all processes
    train one model, and the first one writes the files and speaks.

    Raises:
        ConfigError, DataError, DeviceError: the run cannot start.
        CheckpointError: it cannot be resumed, or a checkpoint cannot be written.
        NonFiniteError: a step diverged.
        PeerError: another process of the run failed or is gone.
    """
    with open_ranks(config) as ranks:
        return train_on(ranks, config, output)


def train_on(ranks: Ranks, config: TrainConfig, output: Output | None = None) -> Outcome:
    """Train as :func:`train` does, on ranks that have met already; all of them call it."""
    ranks.check(config)
    folder = RunFolder(config.run)
    folder.check(config.start)
    corpus = open_corpus(config)
    trainer = Trainer(config, corpus, ranks)
    if config.start == "resume":
        trainer.restore(read_checkpoint(folder.newest_checkpoint()))
        if trainer.finished_steps > config.steps:
            raise ConfigError(
                f"steps has to be at least {trainer.finished_steps}, which the run has finished "
                f"already, got {config.steps}; pass --steps {2 * trainer.finished_steps} to go on"
            )
    ranks.first_does(lambda: _begin(folder, config))
    unigram = unigram_loss(corpus, config.model.vocabulary)
    if ranks.is_first:
        output = output or open_output(steps=config.steps, log_every=config.log_every)
        log = MetricsLog(folder.metrics, folder.tensorboard, last_step=trainer.finished_steps)
    else:
        output = log = Silence()
    try:
        _say_start(output, trainer, unigram)
        ending = _steps(trainer, folder, log, output)
    finally:
        log.close()
        output.close()
    if config.account and ranks.size > 1 and ending is Ending.FINISHED:
        trainer = _alone(trainer)
    return Outcome(trainer=trainer, folder=folder, ending=ending, loss_unigram=unigram)


def _alone(trainer: Trainer) -> Trainer:
    """On the first rank, one with all weights that needs the others no more."""
    checkpoint = trainer.checkpoint()
    if not trainer.ranks.is_first:
        return trainer
    alone = Trainer(trainer.config, trainer.corpus)
    alone.restore(checkpoint)
    return alone


def _begin(folder: RunFolder, config: TrainConfig) -> None:
    folder.prepare(config.start)
    folder.write_config(config)


def _say_start(output: Output, trainer: Trainer, unigram: float) -> None:
    corpus = trainer.corpus
    parameters = count_parameters(trainer.model)
    left_out = f", {corpus.left_out} files left out (no text)" if corpus.left_out else ""
    output.say(
        f"{corpus.documents} documents, {len(corpus.train_tokens):,} tokens to train on, "
        f"{len(corpus.held_out_tokens):,} held out{left_out}"
    )
    output.say(
        f"{parameters:,} parameters on {trainer.device}, recipe {trainer.config.recipe_words}, "
        f"{trainer.config.dtype}"
    )
    if trainer.ranks.size > 1:
        output.say(
            f"{trainer.ranks.size} ranks, {trainer.config.batch // trainer.ranks.size} sequences "
            "of each batch on each"
        )
    output.say(f"unigram entropy of the held-out text: {unigram:.3f} nats a token")
    if trainer.finished_steps:
        output.say(f"resumed after step {trainer.finished_steps}")


def _steps(trainer: Trainer, folder: RunFolder, log: Log, output: Output) -> Ending:
    config = trainer.config
    if trainer.finished_steps == 0:
        _report({"step": 0, "held_out_loss": trainer.evaluate()}, log, output)
    with Interrupt() as interrupt:
        while trainer.finished_steps < config.steps:
            metrics = trainer.step()
            _report(_with_evaluation(metrics, trainer), log, output)
            is_last = metrics.step == config.steps
            is_stop = (
                trainer.ranks.on_any(flag=interrupt.requested) or metrics.step == config.stop_after
            )
            if is_last or is_stop or metrics.step % config.save_every == 0:
                _save(trainer, folder)
            if is_stop and not is_last:
                return Ending.STOPPED
    return Ending.FINISHED


def _save(trainer: Trainer, folder: RunFolder) -> None:
    checkpoint = trainer.checkpoint()
    keep = trainer.config.keep_checkpoints
    trainer.ranks.first_does(lambda: write_checkpoint(folder.checkpoints, checkpoint, keep=keep))


def _with_evaluation(metrics: StepMetrics, trainer: Trainer) -> dict[str, float]:
    record = metrics.record()
    config = trainer.config
    if metrics.step % config.evaluate_every == 0 or metrics.step == config.steps:
        record["held_out_loss"] = trainer.evaluate()
    return record


def _report(record: dict[str, float], log: Log, output: Output) -> None:
    log.write(record)
    output.progress(record)
