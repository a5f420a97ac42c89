"""What a run will need, from formulas alone: nothing is allocated and nothing is run.

Bytes kept for backward are the sum, over the layers, of what each module says that it keeps.
It is the list in the header of ``model.py`` with the small things added: the statistics of
normalizations, the routing, and the loss's log-probabilities.  ``Meter`` around a real
forward pass counts the same.

Letters: T tokens of one forward pass, H width, L layers, N and M query and key heads, D head
width, E experts, K experts a token, I inner width of an expert, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from backstash import kernels
from backstash.device import default_device
from backstash.formats import Format, HighPrecisionFormat, Usage
from backstash.recipes import Operand, Phase, Role
from backstash.stash import pages_for
from backstash.train.attention import repeats_heads
from backstash.train.config import ModelConfig, TrainConfig
from backstash.train.names import layer_name

_INT64, _INT32, _FLOAT32 = 8, 4, 4
#: Of a page that the matmuls of a GPU write.
_SLAB_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Numbers of parameters and bytes of one run; :mod:`.peak` says how much is there at once.

    Attributes:
        parameters: all weights; ``active_parameters`` are those that one token meets.
        weight_bytes: the weights in the compute dtype.
        gradient_bytes: gradients at their most, at the end of backward.
        optimizer_bytes: Adam's two means and, for low-precision weights, float32 masters.
        saved_bytes: kept for backward by one forward pass.
        layer_bytes: of these, the largest layer's; recomputation needs them once, on top.
        stash_bytes: valid rows of the buffers that a stash takes, in the most pages that they
            need; 0 without a stash.
    """

    parameters: int
    active_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    layer_bytes: int
    stash_bytes: int = 0


def estimate(config: TrainConfig) -> Estimate:
    """Return what ``config`` needs."""
    parameters = count_parameters(config.model, experts=config.model.experts)
    itemsize = getattr(torch, config.dtype).itemsize
    has_masters = itemsize < _FLOAT32
    layers = [layer_saved_bytes(config, layer) for layer in range(config.model.layers)]
    is_kept = config.recompute == "none"
    kept = sum(layers) if is_kept else config.model.layers * layer_input_bytes(config)
    return Estimate(
        parameters=parameters,
        active_parameters=count_parameters(config.model, experts=config.model.top_k),
        weight_bytes=parameters * itemsize,
        gradient_bytes=parameters * (itemsize + _FLOAT32 if has_masters else _FLOAT32),
        optimizer_bytes=parameters * _FLOAT32 * (3 if has_masters else 2),
        saved_bytes=kept + ends_saved_bytes(config),
        layer_bytes=max(layers),
        stash_bytes=stash_bytes(config),
    )


def stash_bytes(config: TrainConfig) -> int:
    """Return the bytes of pages that a forward pass fills, for the run's stash if it has one.

    What is computed again is not saved, so there is nothing to stash.
    """
    if not config.stash or config.recompute != "none":
        return 0
    return sum(_stashed_bytes(config, layer) for layer in range(config.model.layers))


def _stashed_bytes(config: TrainConfig, layer: int) -> int:
    page_bytes, shared = config.stash_page_bytes, offered_by_shared(config, layer)
    # A buffer that is no larger than a page stays where it is.
    taken = [(1, nbytes) for nbytes in shared if nbytes > page_bytes]
    if computes_in_slabs(config):
        return _slab_bytes(config) + pages_for(taken, page_bytes) * page_bytes
    valid, room = (
        expert_buffers(config, layer, rows) for rows in (valid_rows(config), buffer_rows(config))
    )
    taken += [(1, v) for v, most in zip(valid, room, strict=True) if most > page_bytes]
    return pages_for(taken, page_bytes) * page_bytes


def _slab_bytes(config: TrainConfig) -> int:
    """Pages of what the experts of a layer compute in them: input, and pre-activation."""
    dtype, page_bytes = getattr(torch, config.dtype), config.stash_page_bytes
    wide = sum(_slab_columns(config)) // kernels.slab_width(dtype, page_bytes)
    return kernels.slabs_for(valid_rows(config), config.model.experts) * wide * page_bytes


def _slab_columns(config: TrainConfig) -> tuple[int, int]:
    return config.model.hidden, 2 * config.model.expert_width


def computes_in_slabs(config: TrainConfig) -> bool:
    """Do experts write what they save into the pages of the run's stash as they compute it?

    They do with a buffer's rows in high precision, which are whole pages wide; on a GPU, taken to
    be of Hopper's kind, with 16 bits a value and pages of 16 KB at least.
    """
    if not config.stash or config.recompute != "none" or config.model.capacity_factor is None:
        return False
    like = torch.empty(0, dtype=getattr(torch, config.dtype), device="cpu")
    is_multiplied = config.stash_page_bytes >= _SLAB_BYTES and like.itemsize == 2
    if not (is_multiplied or _device_kind(config) == "cpu"):
        return False
    first, second = (layer_name(0, f"moe.experts.{name}") for name in ("fc1", "fc2"))
    roles = (
        (Operand.INPUT, Phase.FORWARD, first),
        (Operand.INPUT, Phase.BACKWARD, first),
        (Operand.WEIGHT, Phase.FORWARD, first),
        (Operand.PREACTIVATION, Phase.BACKWARD, first),
        (Operand.GRADIENT, Phase.BACKWARD, first),
        (Operand.INPUT, Phase.FORWARD, second),
    )
    formats = [config.formats.format(Role(o, phase, "", name)) for o, phase, name in roles]
    return all(isinstance(format, HighPrecisionFormat) for format in formats) and (
        kernels.has_slabs(like, _slab_columns(config), config.stash_page_bytes)
    )


def count_parameters(model: ModelConfig, *, experts: int) -> int:
    """Return the parameters of a model of which a token sees ``experts`` experts."""
    hidden, queries = model.hidden, model.heads * model.head_width
    keys = model.kv_heads * model.head_width
    attention = hidden * (queries + 2 * keys) + queries * hidden
    # A gated expert has three matrices: gate, up, and down.
    mixture = model.experts * hidden + 3 * hidden * (
        experts * model.expert_width + model.shared_width
    )
    norms = 2 * hidden
    return model.layers * (attention + mixture + norms) + 2 * model.vocabulary * hidden + hidden


def layer_saved_bytes(config: TrainConfig, layer: int) -> int:
    """Return the bytes that one layer keeps."""
    parts = attention_bytes, _mixture_bytes, _shared_bytes
    return sum(part(config, layer) for part in parts)


def layer_input_bytes(config: TrainConfig) -> int:
    """Return the bytes that one layer keeps when it will be computed again."""
    return forward_tokens(config) * config.model.hidden * itemsize_of(config)


def ends_saved_bytes(config: TrainConfig) -> int:
    """Return what is kept outside the layers: tokens, head, loss, and the rotary table."""
    tokens, model = forward_tokens(config), config.model
    # Inputs and targets share the drawn windows; the loss keeps the targets in a row.
    ids = (config.batch * (model.context + 1) + tokens) * _INT64
    table = 2 * model.context * model.head_width * itemsize_of(config)
    head = tokens * (model.hidden * itemsize_of(config) + _FLOAT32)
    loss = tokens * model.vocabulary * _FLOAT32 + _FLOAT32
    return ids + table + head + loss


def attention_bytes(config: TrainConfig, layer: int) -> int:
    """Return the bytes that one layer keeps of its attention, its input among them."""
    tokens, model = forward_tokens(config), config.model
    stream = tokens * (model.hidden * itemsize_of(config) + _FLOAT32)
    features = model.heads * model.head_width
    # Queries and output, keys and values, and a log-sum-exp for each head and token.
    width = 2 * features + 2 * kept_kv_heads(config) * model.head_width
    attention = tokens * (width * itemsize_of(config) + model.heads * _FLOAT32)
    # A learnt scale is used once, so the matmul after attention keeps columns of its own.
    name = layer_name(layer, "projection")
    is_learnt = kept_format(config, Operand.INPUT, name).stateful
    own = _columns(config, name, (tokens, features)) if is_learnt else 0
    return stream + attention + own


def kept_kv_heads(config: TrainConfig) -> int:
    """Return the heads of keys and values that the attention is given."""
    is_repeated = repeats_heads(getattr(torch, config.dtype), _device_kind(config))
    return config.model.heads if is_repeated else config.model.kv_heads


def _device_kind(config: TrainConfig) -> str:
    return default_device().type if config.device == "auto" else config.device.partition(":")[0]


def _mixture_bytes(config: TrainConfig, layer: int) -> int:
    tokens, model = forward_tokens(config), config.model
    rows, places = valid_rows(config), buffer_rows(config)
    stream = tokens * (model.hidden * itemsize_of(config) + _FLOAT32)
    normalized = tokens * model.hidden * itemsize_of(config)
    # The scores of all experts are kept for the balance loss, and where one is not a share.
    needs_scores = model.balance_loss or model.top_k == 1
    scores = tokens * model.experts * _FLOAT32 if needs_scores else 0
    # Choice and slot of each row, its weight beside its token and in its place; its source.
    weights = (model.top_k > 1) + (model.capacity_factor is None)
    routing = rows * (2 * _INT64 + weights * _FLOAT32) + places * _INT64
    # The shares of the balance loss, and the number of tokens they are divided by.
    routing += (model.experts + 1) * _FLOAT32 if model.balance_loss else 0
    # Whether they fitted; how many are valid is the last of the ends of the groups.
    kept = sum(expert_buffers(config, layer, places))
    return stream + normalized + scores + routing + kept + _ends(model.experts)


def expert_buffers(config: TrainConfig, layer: int, rows: int) -> list[int]:
    """Bytes of what is kept in the experts' order: pre-activation, and a buffer's rows."""
    model, name = config.model, layer_name(layer, "moe.experts.fc1")
    hidden = _preactivation(config, name, (rows, 2 * model.expert_width), model.experts)
    # Without a capacity the experts gather from the tokens, which are kept already.
    if model.capacity_factor is None:
        return [hidden]
    columns = _columns(config, name, (rows, model.hidden), model.experts)
    return [hidden, columns, rows * _FLOAT32]


def valid_rows(config: TrainConfig) -> int:
    """Rows that all experts of a layer get together."""
    return forward_tokens(config) * config.model.top_k


def buffer_rows(config: TrainConfig) -> int:
    """Rows that their buffers have room for."""
    factor = config.model.capacity_factor
    return valid_rows(config) if factor is None else math.ceil(factor * valid_rows(config))


def _shared_bytes(config: TrainConfig, layer: int) -> int:
    if not config.model.shared_width:
        return 0
    return sum(shared_buffers(config, layer)) + _ends(1)


def shared_buffers(config: TrainConfig, layer: int) -> list[int]:
    """Bytes of what the expert keeps that every token goes to: pre-activation, and input."""
    tokens, model = forward_tokens(config), config.model
    if not model.shared_width:
        return []
    name = layer_name(layer, "moe.shared.fc1")
    hidden = _preactivation(config, name, (tokens, 2 * model.shared_width), 1)
    # In high precision its input is the experts' input, which is kept already.
    if _shares_input(config, layer):
        return [hidden, 0]
    return [hidden, _columns(config, name, (tokens, model.hidden), 1)]


def offered_by_shared(config: TrainConfig, layer: int) -> list[int]:
    """Bytes of what a stash is offered by the expert that every token goes to."""
    offered = shared_buffers(config, layer)
    # The router keeps the same values, but not marked as the shared expert marks them.
    if offered and _shares_input(config, layer):
        offered.append(layer_input_bytes(config))
    return offered


def _shares_input(config: TrainConfig, layer: int) -> bool:
    name = layer_name(layer, "moe.shared.fc1")
    return isinstance(kept_format(config, Operand.INPUT, name), HighPrecisionFormat)


def _preactivation(config: TrainConfig, name: str, shape: tuple[int, int], groups: int) -> int:
    format = kept_format(config, Operand.PREACTIVATION, name)
    return format.saved_bytes(*shape, getattr(torch, config.dtype), Usage.ROWWISE, groups)


def _columns(
    config: TrainConfig, name: str, shape: tuple[int, int], groups: int | None = None
) -> int:
    format = kept_format(config, Operand.INPUT, name)
    return format.saved_bytes(*shape, getattr(torch, config.dtype), Usage.COLUMNWISE, groups)


def kept_format(config: TrainConfig, operand: Operand, name: str) -> Format:
    """The format in which the matmul of this name keeps an operand for backward."""
    return config.formats.format(Role(operand, Phase.BACKWARD, "", name))


def _ends(groups: int) -> int:
    """Bytes of the ends of the groups."""
    return groups * _INT32


def forward_tokens(config: TrainConfig) -> int:
    """Return the tokens of one forward pass."""
    return config.batch * config.model.context


def itemsize_of(config: TrainConfig) -> int:
    """Return the bytes of a value in the compute dtype."""
    return getattr(torch, config.dtype).itemsize
