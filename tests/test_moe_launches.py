"""What a layer of experts asks of the host: so many operations, however many rows or experts.

At small sizes a step takes as long as the host takes to launch it, so each operation of ours is
counted, and each of torch that is no mere view.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backstash import kernels
from backstash.moe import Local, MoE

H, F, E, K = 16, 8, 12, 2
# What starts nothing on a GPU: views, and values that are looked at on a CPU only, to check them.
NOTHING = {"view", "t", "transpose", "slice", "select", "detach", "alias", "expand", "new_empty"}
CHECKS = {"aminmax", "min", "_local_scalar_dense"}

ROUTER = Counter(top_experts=1, count_experts=1, weigh_experts=1, sort_by_expert=1)
ROUTER_BACKWARD = Counter(weigh_experts_backward=1)
# A weight for each row; an activation between two matmuls; the rows of a token added up.
EXPERTS = Counter(weights_to_rows=1, activate=1, unpermute=1)
EXPERTS_BACKWARD = Counter(activate_backward=1, unpermute=1, weights_to_copies=1)
#: Of ours, forward and backward.
OURS = {
    "all-experts": (
        ROUTER + EXPERTS + Counter(gathered_mm=1, grouped_mm=1),
        ROUTER_BACKWARD
        + EXPERTS_BACKWARD
        + Counter(gathered_mm_dx=1, grouped_mm_dx=1)
        + Counter(gathered_mm_dw_of_output=1, gathered_mm_dw_of_input=1),
    ),
    "one-rank": (
        ROUTER + EXPERTS + Counter(permute=1, fit_groups=1, grouped_mm=2),
        ROUTER_BACKWARD + EXPERTS_BACKWARD + Counter(permute=1, grouped_mm_dx=2, grouped_mm_dw=2),
    ),
}
# Logits, scores, and the rows of this step; both gradients, of which one joins the experts'.
OF_ROUTER, OF_ROUTER_BACKWARD = Counter(mm=1, _softmax=1, add_=1), Counter(mm=2, add=1)
#: Of torch, forward and backward.
TORCHS = {
    "all-experts": (OF_ROUTER, OF_ROUTER_BACKWARD),
    "one-rank": (OF_ROUTER, OF_ROUTER_BACKWARD),
}
DISPATCHERS = {
    "all-experts": None,
    "one-rank": Local(capacity_factor=2.0, keep_experts=range(4, 8)),
}


class Count(TorchDispatchMode):
    """Counts our operations by name, and torch's outside of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.monkeypatch = monkeypatch
        self.ours: Counter[str] = Counter()
        self.torchs: Counter[str] = Counter()
        self.is_inside = False

    def __enter__(self) -> Any:
        for name in kernels.__all__:
            operation = getattr(kernels, name)
            if inspect.isfunction(operation) and name != "carrying":
                self.monkeypatch.setattr(kernels, name, self.counted(name, operation))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.monkeypatch.undo()
        super().__exit__(*exception)

    def counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            was_inside, self.is_inside = self.is_inside, True
            self.ours[name] += not was_inside
            try:
                return operation(*args, **kwargs)
            finally:
                self.is_inside = was_inside

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not self.is_inside and name not in NOTHING | CHECKS:
            self.torchs[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def in_this_thread() -> Iterator[None]:
    """Let backward run where operations are counted."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.mark.usefixtures("in_this_thread")
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_step_asks_for_so_many_operations_and_no_more(name, tokens, monkeypatch):
    layer = MoE(H, F, E, K, dispatcher=DISPATCHERS[name])
    x = torch.randn(tokens, H, requires_grad=True)
    dy = torch.ones(tokens, H)
    inputs: list[Tensor] = [x, *layer.parameters()]
    forward, backward = Count(monkeypatch), Count(monkeypatch)
    with forward:
        y = layer(x)
    with backward:
        torch.autograd.grad(y, inputs, dy)
    assert (forward.ours, backward.ours) == OURS[name]
    assert (forward.torchs, backward.torchs) == TORCHS[name]
