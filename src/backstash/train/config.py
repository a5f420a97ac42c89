"""What a training run is: frozen values, checked once when they are made.

A *run* is a model, an optimizer, text, and the numbers that say how long and how often.
A value of :class:`TrainConfig` says all of it and nothing else is read: the same config
with the same text gives the same run, bit for bit.  A variant is a new value, made with
``dataclasses.replace``; making it checks it again.

The fields double as the command line (``--steps``, ``--model.hidden``), so the string under
each of them is what a user reads there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from backstash.errors import ConfigError, RecipeError
from backstash.formats import FLOAT8_CURRENT, HIGH_PRECISION, MXFP8
from backstash.recipes import Recipe, recipe
from backstash.train.names import check_patterns, matmul_names

Start = Literal["new", "fresh", "resume"]
ComputeDtype = Literal["float32", "bfloat16"]
Recompute = Literal["none", "reentrant", "non_reentrant"]
Preactivation = Literal["high_precision", "float8_current", "mxfp8"]

_FORMATS = {
    "high_precision": HIGH_PRECISION,
    "float8_current": FLOAT8_CURRENT,
    "mxfp8": MXFP8,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of the decoder: attention and a Mixture-of-Experts block in each layer.

    Raises:
        ConfigError: a size is not a positive integer, or two of them do not fit together.
    """

    vocabulary: int = 256
    """Number of different tokens; 256 for bytes, else at least what the tokenizer has."""
    context: int = 128
    """Longest sequence in tokens."""
    layers: int = 4
    """Number of decoder layers."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads of the attention."""
    kv_heads: int = 2
    """Key and value heads, each shared by heads / kv_heads query heads."""
    head_width: int = 32
    """Width of one head; even, because rotary embeddings turn pairs."""
    experts: int = 8
    """Experts in each layer."""
    top_k: int = 2
    """Experts that each token goes to."""
    expert_width: int = 128
    """Inner width of one expert."""
    shared_width: int = 0
    """Inner width of the expert that every token goes to; 0 for none."""
    rotary_base: float = 10000.0
    """Longest wavelength of the rotary embedding, in tokens over 2 pi."""
    balance_speed: float = 0.001
    """Step of the routing bias that evens out the experts; 0 leaves it alone."""
    balance_loss: float = 0.01
    """Weight of the auxiliary loss that evens out the experts; 0 for none."""
    capacity_factor: float | None = None
    """Room in the experts' buffers over the rows that come, at least 1, so that none is dropped;
    none gives no buffers."""

    def __post_init__(self) -> None:
        for name in (
            *("vocabulary", "context", "layers", "hidden", "heads", "kv_heads"),
            *("head_width", "experts", "top_k", "expert_width"),
        ):
            check_integer(self, name, 1)
        check_integer(self, "shared_width", 0)
        check_number(self, "rotary_base", above=1.0)
        check_number(self, "balance_speed", least=0.0)
        check_number(self, "balance_loss", least=0.0)
        if self.capacity_factor is not None:
            check_number(self, "capacity_factor", least=1.0)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads has to be a multiple of kv_heads, got heads={self.heads} and "
                f"kv_heads={self.kv_heads}; pass kv_heads={math.gcd(self.heads, self.kv_heads)}"
            )
        if self.head_width % 2:
            raise ConfigError(
                f"head_width has to be even, got {self.head_width}; pass {self.head_width + 1}"
            )
        if self.top_k > self.experts:
            raise ConfigError(
                f"top_k has to be at most the number of experts, got top_k={self.top_k} and "
                f"experts={self.experts}; pass top_k={self.experts} or more experts"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, with a learning rate that warms up and then falls along a cosine.

    Raises:
        ConfigError: a value is not a finite number in its range.
    """

    learning_rate: float = 2e-3
    """Learning rate at the end of the warm-up."""
    final_ratio: float = 0.1
    """Learning rate of the last step, as a part of the highest."""
    warmup: float = 0.1
    """Part of all steps that warms up."""
    beta1: float = 0.9
    """Decay of the mean of the gradient."""
    beta2: float = 0.95
    """Decay of the mean of its square."""
    epsilon: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Decay of matrices, as a part of the learning rate; vectors are not decayed."""
    clip_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", above=0.0)
        check_number(self, "final_ratio", least=0.0, most=1.0)
        check_number(self, "warmup", least=0.0, most=1.0)
        check_number(self, "beta1", least=0.0, below=1.0)
        check_number(self, "beta2", least=0.0, below=1.0)
        check_number(self, "epsilon", above=0.0)
        check_number(self, "weight_decay", least=0.0)
        check_number(self, "clip_norm", above=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run.

    Raises:
        ConfigError: a value is out of its range, or unknown.
    """

    run: Path = Path("runs/train")
    """Folder that checkpoints, metrics and the summary go to."""
    start: Start = "new"
    """new: the folder must hold no run. fresh: delete the run in it. resume: go on with it."""
    data: Path | None = None
    """Text file, or folder of them; the Python standard library's sources if not given."""
    tokenizer: Path | None = None
    """File of the tokenizers library; bytes are the tokens if not given."""
    held_out: float = 0.1
    """Part of the text that is kept for evaluation and never trained on."""
    recipe: str = "mxfp8"
    """Recipe by name: which tensors are kept in which low-precision format."""
    preactivation: Preactivation = "high_precision"
    """Format in which experts keep their activation's input, most of what a step keeps."""
    keep_high_precision: tuple[str, ...] = ()
    """Matmuls that no recipe touches, by name: patterns such as 'layers.0.*' '*.qkv' '*.moe.*'."""
    dtype: ComputeDtype = "float32"
    """What weights and activations are computed in; the optimizer's state is float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    recompute: Recompute = "none"
    """Save only each layer's input and compute the layer again in backward."""
    stash: bool = False
    """Keep what experts save for backward in pages of a pool, valid rows only; changes no bit."""
    stash_bytes: int | None = None
    """Bytes of its pool on the device, in whole pages; if not given, it follows what is needed."""
    stash_host_bytes: int = 0
    """Bytes of its pool in host memory, in whole pages, for what the device has no room for."""
    stash_page_bytes: int = 65536
    """Bytes of a page; smaller buffers are not stashed."""
    shard_weights: bool = False
    """Train one model on all processes that torchrun started, each with a part of the weights."""
    seed: int = 0
    """Seed of the weights and of the order of the text."""
    steps: int = 1000
    """Optimizer steps in all."""
    batch: int = 16
    """Sequences in one forward pass, of all processes together."""
    accumulate: int = 1
    """Forward and backward passes in one optimizer step."""
    evaluate_every: int = 100
    """Steps from one evaluation on held-out text to the next."""
    evaluate_batches: int = 4
    """Batches of held-out text in one evaluation."""
    save_every: int = 100
    """Steps from one checkpoint to the next."""
    keep_checkpoints: int = 2
    """Checkpoints to keep; older ones are deleted once a newer one is whole."""
    log_every: int = 10
    """Steps from one line of output to the next."""
    stop_after: int | None = None
    """Stop after this many steps, as Ctrl-C would, though the schedule goes on to all of them."""
    account: bool = False
    """At the end, compare saved bytes with plain PyTorch and gradients under hooks."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name in (
            *("steps", "batch", "accumulate", "evaluate_every", "evaluate_batches"),
            *("save_every", "keep_checkpoints", "log_every"),
        ):
            check_integer(self, name, 1)
        check_integer(self, "seed", 0, 2**63 - 1)
        if self.stop_after is not None:
            check_integer(self, "stop_after", 1)
        check_number(self, "held_out", above=0.0, below=1.0)
        check_choice(self, "start", get_args(Start))
        check_choice(self, "preactivation", get_args(Preactivation))
        check_choice(self, "dtype", get_args(ComputeDtype))
        check_choice(self, "recompute", get_args(Recompute))
        check_instance(self, "run", Path)
        check_instance(self, "data", Path | None)
        check_instance(self, "tokenizer", Path | None)
        check_instance(self, "account", bool)
        check_instance(self, "shard_weights", bool)
        check_instance(self, "model", ModelConfig)
        check_instance(self, "optimizer", OptimizerConfig)
        check_instance(self, "stash", bool)
        check_stash(self)
        names = matmul_names(self.model.layers, is_shared=self.model.shared_width > 0)
        check_patterns(self.keep_high_precision, names)
        check_recipe(self)
        check_device_name(self.device)

    @property
    def formats(self) -> Recipe:
        """The recipe itself."""
        return recipe(
            self.recipe,
            preactivation=_FORMATS[self.preactivation],
            keep_high_precision=self.keep_high_precision,
        )

    @property
    def recipe_words(self) -> str:
        """The recipe, and what it does not touch."""
        kept = self.keep_high_precision
        return self.recipe + (f" except for {', '.join(kept)}" if kept else "")

    @property
    def step_tokens(self) -> int:
        """Tokens that one optimizer step learns from."""
        return self.batch * self.accumulate * self.model.context


def check_integer(config: object, name: str, least: int, most: int | None = None) -> None:
    """Raise :class:`ConfigError` unless the field is an integer of at least ``least``."""
    value = getattr(config, name)
    wanted = f"an integer of at least {least}" + ("" if most is None else f" and at most {most}")
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        raise ConfigError(f"{name} has to be {wanted}, got {value!r}; pass for example {least + 1}")


def check_number(
    config: object,
    name: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Raise :class:`ConfigError` unless the field is a finite number within the bounds."""
    value = getattr(config, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number and math.isfinite(value) and above < value < below and least <= value <= most
    if not fits:
        bounds = {"above": above, "at least": least, "at most": most, "below": below}
        wanted = " and ".join(f"{word} {b:g}" for word, b in bounds.items() if math.isfinite(b))
        default = getattr(type(config)(), name)
        example = least + 1 if default is None else default
        raise ConfigError(
            f"{name} has to be a finite number {wanted}, got {value!r}; "
            f"pass for example {example:g}"
        )


def check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise :class:`ConfigError` unless the field is one of ``choices``."""
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{name} has to be one of {', '.join(choices)}, got {value!r}; pass one")


def check_instance(config: object, name: str, wanted: Any) -> None:
    """Raise :class:`ConfigError` unless the field has the type it was declared with."""
    value = getattr(config, name)
    if not isinstance(value, wanted):
        kind = getattr(wanted, "__name__", str(wanted))
        raise ConfigError(f"{name} has to be a {kind}, got {value!r}; wrap it in one")


def check_stash(config: TrainConfig) -> None:
    """Raise :class:`ConfigError` unless the sizes are those of a pool, and mean something."""
    if config.stash_bytes is not None:
        check_integer(config, "stash_bytes", 0)
    check_integer(config, "stash_host_bytes", 0)
    check_integer(config, "stash_page_bytes", 16)
    if config.stash_page_bytes & (config.stash_page_bytes - 1):
        raise ConfigError(
            f"stash_page_bytes has to be a power of two, got {config.stash_page_bytes}; "
            f"pass {1 << config.stash_page_bytes.bit_length()}"
        )
    for name in ("stash_bytes", "stash_host_bytes"):
        size = getattr(config, name)
        if size is not None and 0 < size < config.stash_page_bytes:
            raise ConfigError(
                f"{name} has to be room for a page of {config.stash_page_bytes} bytes, got {size}; "
                "pass more bytes, or 0 for none"
            )
    if not config.stash and (config.stash_bytes is not None or config.stash_host_bytes):
        raise ConfigError(
            f"a pool without a stash would hold nothing, got stash={config.stash}, "
            f"stash_bytes={config.stash_bytes} and stash_host_bytes={config.stash_host_bytes}; "
            "pass --stash too, or neither size"
        )


def check_recipe(config: TrainConfig) -> None:
    """Raise :class:`ConfigError` unless a recipe has this name and takes this preactivation."""
    try:
        _ = config.formats
    except RecipeError as error:
        raise ConfigError(f"{error}; pass --recipe with one of these") from error


def check_device_name(name: object) -> None:
    """Raise :class:`ConfigError` unless this names a kind of device; it need not be here."""
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    known = name in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdecimal())
    if not known:
        raise ConfigError(
            f"device has to be auto, cpu, cuda or cuda:N, got {name!r}; pass auto to take a GPU "
            "if there is one"
        )


Config = TypeVar("Config", TrainConfig, ModelConfig, OptimizerConfig)


def config_to_json(config: Any) -> dict[str, Any]:
    """Return the config as plain JSON values, nested as the config is."""
    return {name: _as_json(value) for name, value in dataclasses.asdict(config).items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def config_from_json(values: Mapping[str, Any], kind: type[Config]) -> Config:
    """Return the config that :func:`config_to_json` wrote.

    Raises:
        ConfigError: a key is unknown, or a value is not one that its field can have.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"a {kind.__name__} has to be a JSON object, got {values!r}; write the fields by name"
        )
    names = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - names):
        raise ConfigError(
            f"{kind.__name__} has no field {', '.join(unknown)}; "
            f"remove it, or use one of {', '.join(sorted(names))}"
        )
    fields = dict(values)
    if kind is TrainConfig:
        if "model" in fields:
            fields["model"] = config_from_json(fields["model"], ModelConfig)
        if "optimizer" in fields:
            fields["optimizer"] = config_from_json(fields["optimizer"], OptimizerConfig)
        if isinstance(patterns := fields.get("keep_high_precision"), list):
            fields["keep_high_precision"] = tuple(patterns)
        for name in ("run", "data", "tokenizer"):
            if isinstance(fields.get(name), str):
                fields[name] = Path(fields[name])
    return kind(**fields)
