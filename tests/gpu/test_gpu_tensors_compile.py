"""``torch.compile(fullgraph=True)`` of quantize, matmul and dequantize on a GPU: the eager bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backstash.formats import FLOAT8_CURRENT, Usage
from backstash.tensors import GroupedTensor
from format_cases import by_format

pytestmark = pytest.mark.gpu
# Rows and columns that are no multiple of a block, and that are.
RAGGED, WHOLE = (33, 40), (256, 128)
by_case = pytest.mark.parametrize(
    ("backend", "shape", "dtype"),
    [
        ("aot_eager", RAGGED, torch.float32),
        ("aot_eager", WHOLE, torch.bfloat16),
        # The compiler warns about itself.
        pytest.param("inductor", WHOLE, torch.float32, marks=pytest.mark.filterwarnings("ignore")),
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(function, fullgraph=True, backend=backend)


def divides(format: Any, backend: str) -> bool:
    """Whether the compiler divides by a scale itself, which inductor does not round correctly."""
    return backend == "inductor" and format is FLOAT8_CURRENT


@by_format
@by_case
def test_quantize_matmul_dequantize_is_one_graph(
    format: Any, backend: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, w = (torch.randn(size, device="cuda").to(dtype) for size in (shape, (shape[1], 8)))

    def step(x: Any, w: Any) -> Any:
        q = format.quantize(x, Usage.BOTH)
        rows, columns = q.dequantize(Usage.ROWWISE), q.dequantize(Usage.COLUMNWISE)
        return rows @ w, rows, columns

    got, wanted = compiled(step, backend)(x, w), step(x, w)
    if divides(format, backend):
        torch.testing.assert_close(got, wanted)
    else:
        assert all(map(torch.equal, got, wanted))


@by_format
def test_a_quantized_tensor_goes_into_and_out_of_a_graph(format: Any) -> None:
    x = torch.randn(RAGGED, device="cuda")

    def make(x: Any) -> Any:
        return format.quantize(x, Usage.BOTH)

    q = make(x)
    assert torch.equal(compiled(make)(x), q)
    read = compiled(lambda q: q.dequantize(Usage.COLUMNWISE))
    assert torch.equal(read(q), q.dequantize(Usage.COLUMNWISE))


@by_format
def test_groups_whose_ends_lie_on_the_device_are_one_graph(format: Any) -> None:
    def step(x: Any, ends: Any) -> Any:
        return format.quantize(GroupedTensor(x, ends), Usage.COLUMNWISE).dequantize().data

    x, run = torch.randn(RAGGED, device="cuda"), compiled(step)
    for ends in ([3, 3, 20], [0, 33, 33]):
        given = torch.tensor(ends, device="cuda")
        rows = slice(0, ends[-1])
        assert torch.equal(run(x, given)[rows], step(x, given)[rows])
