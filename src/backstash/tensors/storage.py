"""Quantized tensors in files that know only plain ones, such as safetensors.

Each quantized tensor becomes its buffers, as bytes under ``name::buffer``, and one line of
metadata that says how to put them together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from backstash.errors import CheckpointError
from backstash.formats import BufferSpec, Usage, from_spec
from backstash.formats.format import HIGH_PRECISION_DTYPES
from backstash.tensors.quantized import QuantizedTensor

_SEPARATOR = "::"
_KEY = "backstash.quantized"


def to_plain(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Take the quantized tensors of a state dict apart.

    Returns:
        Plain tensors, bytes for what was quantized, and metadata of strings: exactly the
        arguments of ``safetensors.torch.save_file``.
    """
    plain: dict[str, Tensor] = {}
    kinds: dict[str, Any] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, QuantizedTensor):
            plain[name] = tensor
            continue
        parts = tensor.buffers | ({} if tensor.ends_G is None else {"ends_G": tensor.ends_G})
        kinds[name] = {
            "format": tensor.format.spec(),
            "usage": tensor.usage.value,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "buffers": {
                part: str(buffer.dtype).removeprefix("torch.") for part, buffer in parts.items()
            },
        }
        for part, buffer in parts.items():
            own = buffer.detach().contiguous()
            if own.untyped_storage().nbytes() != own.nbytes:
                own = own.clone()  # rows of another tensor, whose file this is not
            plain[f"{name}{_SEPARATOR}{part}"] = own.view(torch.uint8)
    return plain, ({_KEY: json.dumps(kinds)} if kinds else {})


def from_plain(
    plain: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Tensor]:
    """Put together what :func:`to_plain` took apart.

    Raises:
        CheckpointError: The metadata is damaged, or a buffer that it names is missing or has
            another shape or dtype than its format says.
    """
    state = dict(plain)
    try:
        for name, kind in json.loads((metadata or {}).get(_KEY, "{}")).items():
            state[name] = _put_together(name, kind, state)
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"stored quantized tensors need their metadata and every buffer it names, but "
            f"{error!r} is wrong or missing; the file is damaged"
        ) from error
    return state


def _put_together(name: str, kind: dict[str, Any], state: dict[str, Tensor]) -> QuantizedTensor:
    """The tensor that ``kind`` describes; its buffers are taken out of ``state``."""
    format, usage = from_spec(kind["format"]), Usage(kind["usage"])
    shape, dtype = torch.Size(kind["shape"]), getattr(torch, kind["dtype"])
    buffers = {
        part: state.pop(f"{name}{_SEPARATOR}{part}").view(getattr(torch, part_dtype))
        for part, part_dtype in kind["buffers"].items()
    }
    ends_G = buffers.pop("ends_G", None)
    groups = None if ends_G is None else ends_G.numel()
    wanted = format.buffers(shape[:-1].numel(), shape[-1], dtype, usage, groups)
    came = {part: BufferSpec(tuple(b.shape), b.dtype) for part, b in buffers.items()}
    if not usage or dtype not in HIGH_PRECISION_DTYPES or came != wanted:
        raise CheckpointError(
            f"{name} is stored as {format.name} of shape {tuple(shape)} and {dtype}, whose buffers "
            f"are {wanted}, but the file has {came}; the file is damaged"
        )
    return QuantizedTensor(
        buffers, format=format, usage=usage, shape=shape, dtype=dtype, ends_G=ends_G
    )
