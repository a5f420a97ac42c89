"""The most memory that a step of training holds at once on a GPU, from formulas alone.

In every moment there are the weights, the optimizer's state, the pages of a stash, and the
workspaces of the matmul library.  What comes on top is largest in one of six moments:

- the experts of the last layer run forward under a stash: all that is in no page, and, unless they
  are computed there, the buffers of that layer and of the one before it, which it moves into pages
  meanwhile;
- the loss runs backward: all that was saved, and the gradient of the logits twice;
- the experts of the last layer run backward: all that the layers saved, and what one layer works
  with;
- the attention of the last layer does, if that is wider than the experts: what the others saved,
  and sums in float32;
- the experts of the first layer do: what one layer saved, and the gradients of all others;
- the optimizer steps: all gradients, and as much again for the roots of their mean squares.

A layer's experts work in buffers of all rows there is room for.  They hold most of them either
at the activation (the gradients of output, activation and pre-activation) or behind it (those of
output, pre-activation and input, and copies of operands as the matmul reads them).  With a float8
scale for each row the pre-activation's gradient has no values, only codes, unless the
pre-activation is read in a stash's pages.

Letters: C rows that there is room for, H model features, F columns of the pre-activation and I
of the activation.
"""

from __future__ import annotations

import torch

from backstash.formats import (
    Float8Rowwise,
    Format,
    HighPrecisionFormat,
    MXFP8Format,
    NVFP4Format,
    Usage,
)
from backstash.recipes import Operand
from backstash.stash import Sizing
from backstash.train.config import TrainConfig
from backstash.train.estimate import (
    attention_bytes,
    buffer_rows,
    computes_in_slabs,
    ends_saved_bytes,
    estimate,
    expert_buffers,
    forward_tokens,
    itemsize_of,
    kept_format,
    kept_kv_heads,
    layer_input_bytes,
    offered_by_shared,
    shared_buffers,
    stash_bytes,
)
from backstash.train.metrics import mebibytes
from backstash.train.names import layer_name
from backstash.train.stash import pool_margin

#: Of the matmul library on a Hopper GPU, for the thread of forward and for that of backward.
WORKSPACES = 2 * 32 * 2**20
_FLOAT32 = 4


def peak_bytes(config: TrainConfig) -> int:
    """Return the most bytes that a step of ``config`` holds at once on one GPU."""
    return max(moments(config).values())


def moments(config: TrainConfig) -> dict[str, int]:
    """Return the bytes of the moments of which one is the peak, by what happens in them."""
    numbers, layers = estimate(config), config.model.layers
    resident = numbers.weight_bytes + numbers.optimizer_bytes + pool_bytes(config) + WORKSPACES
    is_recomputed = config.recompute != "none"
    taken = sum(_taken_buffers(config))
    kept = layer_input_bytes(config) if is_recomputed else numbers.layer_bytes - taken
    logits = forward_tokens(config) * config.model.vocabulary * _FLOAT32
    ends = ends_saved_bytes(config)
    beside = _shared_results(config) + (numbers.layer_bytes if is_recomputed else 0)
    # The head's input and its log-probabilities are no longer there when layers run backward.
    inside = resident + ends - logits + beside
    last, first = (_experts_bytes(config, is_last=is_last) for is_last in (True, False))
    gradients = _gradient_bytes(config)
    saved = layers * kept + _newest_bytes(config) + ends
    forward = ends - logits + layers * kept + _forward_bytes(config)
    attention = ends - logits + (layers - 1) * kept + _attention_working(config)
    return {
        "the last layer runs forward": resident + gradients[0] + forward,
        "the loss runs backward": resident + gradients[0] + saved + 2 * logits,
        "the last layer runs backward": inside + last + gradients[1] + layers * kept,
        "attention runs backward": resident + gradients[1] + attention,
        "the first layer runs backward": inside + first + gradients[2] + kept,
        "the optimizer steps": resident + 2 * _FLOAT32 * numbers.parameters,
    }


def pool_bytes(config: TrainConfig) -> int:
    """Return the bytes of the pages on the device of the run's stash, if it has one."""
    if not config.stash:
        return 0
    page_bytes = config.stash_page_bytes
    if config.stash_bytes is not None:
        return config.stash_bytes // page_bytes * page_bytes
    pages = -(-stash_bytes(config) // page_bytes)
    return Sizing(margin=pool_margin(config)).pages(pages, page_bytes) * page_bytes


def _taken_buffers(config: TrainConfig) -> list[int]:
    """Bytes of each of a layer's buffers that a stash lets go."""
    experts = expert_buffers(config, 0, buffer_rows(config))
    # Beside what is computed in pages, routing weights stay.
    own = experts[:2] if computes_in_slabs(config) else _taken(config, experts)
    return own + _taken(config, shared_buffers(config, 0))


def _moved_buffers(config: TrainConfig) -> list[int]:
    """Bytes of the experts' buffers in one layer that are there before they are in pages."""
    return [] if computes_in_slabs(config) else expert_buffers(config, 0, buffer_rows(config))


def _taken(config: TrainConfig, buffers: list[int]) -> list[int]:
    has_stash = stash_bytes(config) > 0
    return [nbytes for nbytes in buffers if has_stash and nbytes > config.stash_page_bytes]


def _forward_bytes(config: TrainConfig) -> int:
    """What the experts of the last layer work with in forward, and what a stash has whole."""
    model, rows, itemsize = config.model, buffer_rows(config), itemsize_of(config)
    own = sum(_taken(config, _moved_buffers(config)))
    shared = sum(_taken(config, offered_by_shared(config, 0)))
    whole = own + shared if model.shared_width else min(2, model.layers) * own
    return rows * (model.expert_width + model.hidden) * itemsize + whole


def _newest_bytes(config: TrainConfig) -> int:
    """What a stash never lets go, because backward begins with it."""
    layers = config.model.layers
    own = sum(_taken(config, _moved_buffers(config)))
    shared = sum(_taken(config, offered_by_shared(config, 0)))
    # What is not copied counts with all its rows, for which there must be room.
    others = stash_bytes(config) * (layers - 2) // layers
    if _is_read_in_place(config) or layers < 2 or others + 2 * own > pool_bytes(config):
        return shared if config.model.shared_width else own
    return shared + own if config.model.shared_width else 2 * own


def _whole_bytes(config: TrainConfig, *, is_last: bool) -> int:
    """What a stash has at full size while the experts of a layer run backward.

    That is what they saved and what is expected next, of the shared expert or of the next layer:
    copied back, or never let go if backward begins with it.  What is read in its pages is neither.
    """
    buffers = _moved_buffers(config)
    own, copied = (sum(_taken(config, some)) for some in (buffers, _copied(config, buffers)))
    is_alone = not config.model.shared_width
    if not is_alone:
        next_bytes = sum(_taken(config, _copied(config, offered_by_shared(config, 0))))
    else:
        next_bytes = copied if config.model.layers > 1 else 0
    if is_last and is_alone:
        return max(own + next_bytes, _newest_bytes(config))
    return copied + next_bytes


def _is_read_in_place(config: TrainConfig) -> bool:
    """Are the experts asked first for what they read in its pages?

    Then only the newest of them stay where they are.
    """
    reads_input = config.model.capacity_factor is None or _is_exact(config, Operand.GRADIENT)
    return reads_input and _is_exact(config, Operand.PREACTIVATION)


def _copied(config: TrainConfig, buffers: list[int]) -> list[int]:
    """Of (pre-activation, input, routing weights) those that are copied back for backward."""
    if not _is_exact(config, Operand.PREACTIVATION):
        return buffers
    # A GPU's kernels for rows in pages multiply 16-bit floats.
    is_multiplied = itemsize_of(config) == 2 and _is_exact(config, Operand.GRADIENT)
    return [] if is_multiplied else buffers[1:2]


def _is_exact(config: TrainConfig, operand: Operand) -> bool:
    """Do the experts keep or read this operand in high precision?"""
    format = kept_format(config, operand, layer_name(0, "moe.experts.fc1"))
    return isinstance(format, HighPrecisionFormat)


def _shared_results(config: TrainConfig) -> int:
    """What the shared expert leaves, which runs backward before the others, less what it read."""
    model = config.model
    if not model.shared_width:
        return 0
    buffers = shared_buffers(config, 0)
    weights = 3 * model.hidden * model.shared_width * itemsize_of(config)
    read = sum(buffers) - sum(_taken(config, buffers))
    return layer_input_bytes(config) + weights - read


def _gradient_bytes(config: TrainConfig) -> tuple[int, int, int]:
    """Of weights, when the loss, the last and the first layer run backward."""
    numbers, model, itemsize = estimate(config), config.model, itemsize_of(config)
    ends = 2 * model.vocabulary * model.hidden + model.hidden
    head = model.vocabulary * model.hidden * itemsize
    others = (numbers.parameters - ends) // model.layers * (model.layers - 1) * itemsize
    # Earlier passes of a step have left all of them, in float32.
    earlier = _FLOAT32 * numbers.parameters if config.accumulate > 1 else 0
    if earlier and itemsize == _FLOAT32:
        return earlier, earlier, earlier
    return earlier, earlier + head, earlier + head + others


def _experts_bytes(config: TrainConfig, *, is_last: bool) -> int:
    """What the experts of a layer work with in backward, and what a stash has whole meanwhile."""
    whole = _whole_bytes(config, is_last=is_last)
    hidden, *_ = expert_buffers(config, 0, buffer_rows(config))
    is_paged = hidden in _taken(config, [hidden]) and whole < hidden
    is_paged |= computes_in_slabs(config)
    return _working_bytes(config, 0 if is_paged else hidden) + whole


def _working_bytes(config: TrainConfig, freed: int) -> int:
    """What the experts work with on top of what was saved, of which ``freed`` goes meanwhile."""
    model, rows, itemsize = config.model, buffer_rows(config), itemsize_of(config)
    H, inner = model.hidden, model.expert_width
    is_gathered = model.capacity_factor is None
    name = layer_name(0, "moe.experts.fc1")
    gradient = kept_format(config, Operand.GRADIENT, name)
    # In high precision gathered rows are never there as a whole: the matmuls gather them.
    output = 0 if is_gathered else rows * H * itemsize
    weights = 3 * model.experts * H * inner * itemsize
    behind = weights - freed + (layer_input_bytes(config) if is_gathered else 2 * output)
    if not isinstance(gradient, HighPrecisionFormat):
        behind += _operand_bytes(config, gradient, name)
    if not _is_coded(config, gradient):
        values = rows * 2 * inner * itemsize
        return max(output + rows * inner * itemsize + values, behind + values)
    # Codes of the output's gradient, and those that are made of its activation's: the columns of
    # the activation, and the pre-activation's gradient both ways.
    output += forward_tokens(config) * H if is_gathered else 2 * rows * H
    return max(output + rows * inner * (itemsize + 5), behind)


def _is_coded(config: TrainConfig, gradient: Format) -> bool:
    """Is the gradient of the pre-activation there as codes alone?

    For that the pre-activation has to be a tensor, and not rows in a stash's pages.
    """
    hidden, *_ = expert_buffers(config, 0, buffer_rows(config))
    return isinstance(gradient, Float8Rowwise) and not _taken(config, [hidden])


def _operand_bytes(config: TrainConfig, gradient: Format, name: str) -> int:
    """Operands of a weight's gradient: codes of its gradient, and both as the matmul reads them."""
    model, rows = config.model, buffer_rows(config)
    columns = 2 * model.expert_width
    # Units that multiply float8 read turned codes; for others there are values.
    is_decoded = isinstance(gradient, MXFP8Format | NVFP4Format)
    read = rows * (columns + model.hidden) * (itemsize_of(config) if is_decoded else 1)
    if isinstance(gradient, Float8Rowwise):
        return read  # made turned
    codes = _code_bytes(config, gradient, (rows, columns))
    if model.capacity_factor is None:
        codes += _code_bytes(config, kept_format(config, Operand.INPUT, name), (rows, model.hidden))
    return codes + read


def _attention_working(config: TrainConfig) -> int:
    """What a layer's attention saved and works with in backward, and the experts' gradients."""
    model, itemsize = config.model, itemsize_of(config)
    tokens, features = forward_tokens(config), model.heads * model.head_width
    # Of the stream (by then the head's input is gone), of the output and the queries; of the rest.
    gradients = (2 * features + 2 * kept_kv_heads(config) * model.head_width) * itemsize
    # Torch adds up queries' gradients in float32, and those of shared heads for each query head.
    sums = features * _FLOAT32 if itemsize < _FLOAT32 else 0
    if kept_kv_heads(config) < model.heads:
        sums += 2 * features * itemsize
    experts = 3 * model.experts * model.hidden * model.expert_width * itemsize
    return attention_bytes(config, 0) + tokens * (gradients + sums) + experts


def _code_bytes(config: TrainConfig, format: Format, shape: tuple[int, int]) -> int:
    dtype = getattr(torch, config.dtype)
    return format.saved_bytes(*shape, dtype, Usage.COLUMNWISE, config.model.experts)


def table(config: TrainConfig) -> list[tuple[str, str]]:
    """Return what ``config`` needs as rows of a name and a value, for people."""
    numbers = estimate(config)
    stash = [("in the stash's pages", mebibytes(numbers.stash_bytes))]
    when = moments(config)
    largest = max(when, key=lambda moment: when[moment])
    return [
        ("parameters", f"{numbers.parameters:,}"),
        ("parameters that a token meets", f"{numbers.active_parameters:,}"),
        ("weights", mebibytes(numbers.weight_bytes)),
        ("gradients", mebibytes(numbers.gradient_bytes)),
        ("optimizer", mebibytes(numbers.optimizer_bytes)),
        (
            "saved for backward",
            f"{mebibytes(numbers.saved_bytes)}  ({numbers.saved_bytes:,} bytes)",
        ),
        ("  of which one layer", mebibytes(numbers.layer_bytes)),
        *(stash if numbers.stash_bytes else []),
        ("at most at once, on a GPU", f"{mebibytes(when[largest])}  (when {largest})"),
    ]
