"""What a CUDA graph of a step holds, beside what the step holds at once as it is."""

from __future__ import annotations

import gc

import pytest
import torch

import backstash as bs
from backstash.stash import CapturedStep, PagePool, Stash, StepState
from stash_gpu_cases import CAPACITY, GPU, WIDTH, Layers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("plain_memory")]

PAGE = 16384
SHALLOW, DEEP = 4, 28
ROWS = 512
#: The allocator takes memory from the device in such pieces, a graph has its own, and cuts them
#: otherwise.  Without a stash a layer would hold more than twice as much.
PIECE, SLACK = 20 * 2**20, 1.4


class Measured:
    """A step of a model so deep: what it holds at once, and what a graph of it holds."""

    def __init__(self, layers: int) -> None:
        self.stash = Stash(PagePool(2**27, device=GPU, page_bytes=PAGE))
        self.model = Layers(layers)
        self.x = torch.randn(CAPACITY, WIDTH, device=GPU, dtype=torch.bfloat16)
        self.counts = torch.full((8,), ROWS // 8, dtype=torch.int32, device=GPU)
        captured = CapturedStep(self.run, self.stash, [self.model])
        captured()
        self.eager_bytes = self.peak_bytes()
        before = self.reserved_bytes()
        captured()
        assert captured.state is StepState.CAPTURED
        self.graph_bytes = self.reserved_bytes() - before

    def run(self) -> torch.Tensor:
        with bs.saving(self.stash):
            loss = self.model(self.x * 1.0, self.counts)[:ROWS].float().square().sum()
        loss.backward()
        return loss.detach()

    def peak_bytes(self) -> int:
        """The most that a step holds at once, beyond what is there between steps."""
        self.model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    @staticmethod
    def reserved_bytes() -> int:
        """What is taken from the device and cannot be given back."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()


def test_a_graph_holds_little_more_than_the_step_at_once_however_deep_the_model() -> None:
    graphs, eager = [], []
    for layers in (SHALLOW, DEEP):
        measured = Measured(layers)
        graphs.append(measured.graph_bytes)
        eager.append(measured.eager_bytes)
        del measured
        gc.collect()
    said = f"graphs {graphs}, steps {eager}"
    print(said)
    for graph, step in zip(graphs, eager, strict=True):
        assert graph <= SLACK * step + 2 * PIECE, said
    assert graphs[1] - graphs[0] <= SLACK * (eager[1] - eager[0]), said
