"""What a step of a layer of experts launches on a Hopper GPU: a sum of its parts, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from backstash.moe import Local, MoE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="the grouped matmuls of a Hopper GPU",
    ),
]
H, F, E, K = 128, 64, 16, 4
# Choose, count in two, place each row, and weigh; back through the weights and in three parts.
ROUTER, ROUTER_BACKWARD = 5, 2
# Weights to rows, tables, activation, sums of rows; and back.
EXPERTS, EXPERTS_BACKWARD = 4, 4
# Sorting tells where each expert's rows end; a buffer has to be asked how many of them it takes.
ENDS = {"all-experts": 0, "one-rank": 1}
# Each matmul has a gradient of rows and one of weights.
MATMULS, MATMULS_BACKWARD = 2, 4
# The rows of a rank are copied into its buffer, and the gradient of its output to its rows.
COPIES = {"all-experts": 0, "one-rank": 1}
DISPATCHERS = {
    "all-experts": None,
    "one-rank": Local(capacity_factor=2.0, keep_experts=range(4, 8)),
}


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """The names of our kernels, as they are launched."""
    hooks = pytest.importorskip("triton").knobs.runtime.launch_enter_hook
    names: list[str] = []

    def note(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    hooks.add(note)
    yield names
    hooks.remove(note)


def names_of(launched: list[str], run: Callable[[], Any]) -> tuple[Any, list[str]]:
    launched.clear()
    result = run()
    return result, list(launched)


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("tokens", [1, 300])
def test_a_step_launches_the_kernels_of_its_parts_once(name, tokens, launched):
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = MoE(H, F, E, K, dispatcher=DISPATCHERS[name], **new)
    x = torch.randn(tokens, H, **new).requires_grad_()
    inputs, dy = [x, *layer.parameters()], torch.randn(tokens, H, **new)
    y, forward = names_of(launched, lambda: layer(x))
    _, backward = names_of(launched, lambda: torch.autograd.grad(y, inputs, dy))
    copies = COPIES[name]
    assert len(forward) == ROUTER + EXPERTS + ENDS[name] + MATMULS + copies, forward
    assert len(backward) == ROUTER_BACKWARD + EXPERTS_BACKWARD + MATMULS_BACKWARD + copies, backward
