"""``torch.compile(fullgraph=True)`` of quantize, matmul and dequantize gives the eager bits."""

import dataclasses
from typing import Any

import pytest
import torch

from backstash.formats import NVFP4, Usage
from backstash.tensors import GroupedTensor
from format_cases import by_format

SHAPE = (33, 40)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(function, fullgraph=True, backend=backend)


@by_format
def test_quantize_matmul_dequantize_is_one_graph(format):
    def step(x, w):
        q = format.quantize(x, Usage.BOTH)
        return q.dequantize(Usage.ROWWISE) @ w, q.dequantize(Usage.COLUMNWISE)

    x, w = torch.randn(SHAPE), torch.randn(40, 8)
    assert all(map(torch.equal, compiled(step)(x, w), step(x, w)))


@by_format
def test_a_quantized_tensor_goes_into_and_out_of_a_graph(format):
    def make(x):
        return format.quantize(x, Usage.BOTH)

    def read(q, w):
        return q.dequantize(Usage.COLUMNWISE) @ w

    x, w = torch.randn(SHAPE), torch.randn(40, 8)
    q = make(x)
    assert torch.equal(compiled(make)(x), q)
    assert torch.equal(compiled(read)(q, w), read(q, w))


@by_format
def test_groups_whose_ends_are_a_tensor_are_one_graph(format):
    def step(x, ends, w):
        return format.quantize(GroupedTensor(x, ends), Usage.COLUMNWISE).dequantize().data @ w

    x, w, run = torch.randn(SHAPE), torch.randn(40, 8), compiled(step)
    for ends in ([3, 3, 20], [0, 33, 33]):
        given = torch.tensor(ends)
        rows = slice(0, ends[-1])
        assert torch.equal(run(x, given, w)[rows], step(x, given, w)[rows])


@pytest.mark.fresh_draws
def test_draws_differ_from_run_to_run_of_one_graph():
    format = dataclasses.replace(NVFP4, stochastic_rounding=True)
    run = compiled(lambda x: format.quantize(x).dequantize())
    x = torch.rand(SHAPE)
    assert not torch.equal(run(x), run(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@by_format
def test_the_default_backend_gives_the_same_codes(format):
    x = torch.randn(SHAPE)
    got = compiled(lambda x: format.quantize(x, Usage.BOTH), "inductor")(x)
    assert torch.equal(got, format.quantize(x, Usage.BOTH))
