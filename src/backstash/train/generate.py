"""Text from a trained model, one token at a time.

The whole context is read again for each token.  That costs more than keeping keys and
values, and needs no second way through the model that could differ from the trained one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backstash.errors import ConfigError
from backstash.recipes import autocast
from backstash.train.config import (
    TrainConfig,
    check_device_name,
    check_instance,
    check_integer,
    check_number,
)
from backstash.train.folder import RunFolder
from backstash.train.loop import load_weights, make_model, open_device
from backstash.train.model import Decoder
from backstash.train.state import read_checkpoint
from backstash.train.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to write, and with which model.

    Raises:
        ConfigError: a value is out of its range.
    """

    run: Path = Path("runs/demo")
    """Folder of the run whose newest checkpoint writes."""
    prompt: str = "def "
    """Text to go on from."""
    tokens: int = 200
    """Tokens to write."""
    temperature: float = 0.8
    """Below 1 the likely gets likelier; 0 takes the likeliest."""
    top_k: int = 40
    """Choose among this many likeliest tokens."""
    seed: int = 0
    """Seed of the choices."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        check_instance(self, "run", Path)
        check_instance(self, "prompt", str)
        check_integer(self, "tokens", 1)
        check_integer(self, "top_k", 1)
        check_integer(self, "seed", 0, 2**63 - 1)
        check_number(self, "temperature", least=0.0)
        check_device_name(self.device)
        if not self.prompt:
            raise ConfigError("prompt has to be some text, got none; pass for example 'import '")


def generate_from_run(config: GenerateConfig) -> Iterator[str]:
    """Yield the prompt and then the text that the run's newest checkpoint goes on with.

    Raises:
        CheckpointError: the folder holds no checkpoint, or a damaged one.
        DeviceError: this machine has no such GPU.
    """
    folder = RunFolder(config.run)
    train_config = folder.read_config()
    device = open_device(config.device)
    model = make_model(train_config)
    load_weights(model, read_checkpoint(folder.newest_checkpoint()))
    tokenizer = open_tokenizer(train_config.tokenizer)
    return generate_text(model.to(device), tokenizer, train_config, config)


def generate_text(
    model: Decoder, tokenizer: Tokenizer, train_config: TrainConfig, config: GenerateConfig
) -> Iterator[str]:
    """Yield the prompt and then what ``model`` goes on with, as soon as it is whole text.

    A character may take several tokens: nothing is yielded until it is complete.
    """
    yield config.prompt
    tokens = [int(token) for token in tokenizer.encode(config.prompt)]
    generator = torch.Generator().manual_seed(config.seed)
    pending: list[int] = []
    with autocast(recipe=train_config.formats):
        for _ in range(config.tokens):
            token = next_token(model, tokens, config, generator)
            tokens.append(token)
            pending.append(token)
            text = tokenizer.decode(pending)
            # U+FFFD at the end: a character that the next bytes may still complete.
            if not text.endswith("�") or len(pending) >= 4:
                yield text
                pending = []
    if pending:
        yield tokenizer.decode(pending)


@torch.no_grad()
def next_token(
    model: Decoder, tokens: Sequence[int], config: GenerateConfig, generator: torch.Generator
) -> int:
    """Return a token drawn from what the model expects after ``tokens``."""
    device = next(model.parameters()).device
    context = torch.tensor([tokens[-model.config.context :]], device=device)
    was_training = model.training
    model.eval()
    try:
        logits_V = model(context)[0, -1].double().cpu()
    finally:
        model.train(was_training)
    return choose(logits_V, config, generator)


def choose(logits_V: Tensor, config: GenerateConfig, generator: torch.Generator) -> int:
    """Return an index of ``logits_V``, drawn at the config's temperature among its top k."""
    if config.temperature == 0:
        return int(logits_V.argmax())
    best_K, index_K = logits_V.topk(min(config.top_k, logits_V.numel()))
    probability_K = (best_K / config.temperature).softmax(-1)
    return int(index_K[torch.multinomial(probability_K, 1, generator=generator)])
