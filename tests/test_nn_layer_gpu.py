"""On a GPU every layer gives what it gives on the CPU, and reads nothing on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.nn import RowMap
from backstash.recipes import autocast, recipe
from host_reads import no_host_reads
from nn_cases import CASE_NAMES, CASES, COUNTS, RECIPES, Case, run
from nn_references import relative_error


def on_gpu(case: Case, dtype: torch.dtype) -> Case:
    """The same case, whose arguments lie on the device in ``dtype``."""

    def move(value: Any) -> Any:
        if value is COUNTS:
            value = torch.tensor(COUNTS, dtype=torch.int32)
        if isinstance(value, RowMap):
            return RowMap(value.source_R.cuda(), value.slots_TK.cuda())
        return value.cuda() if isinstance(value, Tensor) else value

    arguments, keywords = case.arguments()
    moved = [move(a) for a in arguments], {key: move(value) for key, value in keywords.items()}
    return Case(case.name, case.build, lambda: (tuple(moved[0]), moved[1]), case.rows)


# Torch says so where the first matmul of a process is one of backward.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_a_layer_is_that_of_the_cpu_and_reads_nothing_on_the_host(
    case: Case, recipe_name: str, dtype: torch.dtype
) -> None:
    module = case.make()
    expected = run(case, module, recipe_name)
    there = on_gpu(case, dtype)
    moved = there.make().to("cuda", dtype)
    inputs = [x.detach().to("cuda", dtype).requires_grad_() for x in case.inputs()]
    torch.manual_seed(5)
    dy = (torch.randn(expected[0].shape) / 8).to("cuda", dtype)
    for _ in range(2):
        # The first call of a kernel may compile it and ask the device for its properties.
        for leaf in (*inputs, *moved.parameters()):
            leaf.grad = None
        with autocast(recipe=recipe_name):
            y = there.call(moved, *inputs)
        y.backward(dy)
        if recipe_name == "float8_delayed":
            break
    found = [y, *(x.grad for x in inputs), *(p.grad for p in moved.parameters())]  # pyright: ignore
    # Sums in another order, and a rounding to sixteen bits of each of two values.
    tolerance = torch.finfo(dtype).eps * (64 if dtype is torch.float32 else 2)
    if recipe_name != "high_precision":
        # A value beside the middle of two codes may fall to either.
        tolerance = recipe(recipe_name).gradient.rtol
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert relative_error(one.cpu(), other) <= tolerance
    with no_host_reads(), autocast(recipe=recipe_name):
        y = there.call(moved, *inputs)
        y.backward(dy)
