"""The optimizers of torch step quantized parameters on a GPU, eagerly and in a captured graph."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from backstash.formats import FLOAT8_CURRENT, MXFP8, NVFP4
from format_cases import quantized
from host_reads import no_host_reads
from optimizer_cases import OPTIMIZERS, PAIRS, SHAPE, check_one_step, options_of

pytestmark = pytest.mark.gpu
by_format = pytest.mark.parametrize("format", [FLOAT8_CURRENT, MXFP8, NVFP4], ids=lambda f: f.name)


#: Of the fused optimizers torch has this one on CPUs only.
ON_GPU = [pair for pair in PAIRS if pair != ("adagrad", "fused")]


@by_format
@pytest.mark.parametrize(("name", "way"), ON_GPU)
def test_an_optimizer_steps_a_quantized_parameter(format: Any, name: str, way: str) -> None:
    check_one_step(name, way, format, "cuda")


def can_be_captured(name: str, way: str) -> bool:
    """Whether nothing of a step is on the host, and averages are not taken one by one."""
    make: Any = OPTIMIZERS[name]
    known = inspect.signature(make.func).parameters
    return (name, way) != ("asgd", "for-loop") and (name[:3] == "sgd" or "capturable" in known)


@pytest.mark.parametrize(("name", "way"), [pair for pair in ON_GPU if can_be_captured(*pair)])
def test_a_step_that_can_be_captured_follows_its_gradients(name: str, way: str) -> None:
    make: Any = OPTIMIZERS[name]
    q: Any = torch.nn.Parameter(quantized(MXFP8).cuda())
    twin: Any = torch.nn.Parameter(q.detach().clone())
    runs = []
    for parameter in (q, twin):
        parameter.grad = torch.zeros(SHAPE, device="cuda")
        runs.append(make([parameter], **options_of(make, way, capturable=True)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for optimizer in runs:
            optimizer.step()  # makes its state, and compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_host_reads():
        runs[0].step()
    for _ in range(3):
        q.grad.normal_()
        twin.grad.copy_(q.grad)
        graph.replay()
        runs[1].step()
    assert torch.equal(q.detach(), twin.detach())
