"""Which program runs behind a name, and that nothing is asked where there is no choice."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from backstash import kernels
from backstash.kernels import binding, reference


def test_without_triton_a_name_is_the_reference_itself(monkeypatch):
    monkeypatch.setattr(binding, "HAS_TWINS", False)
    assert binding.by_device(kernels.block_ends, "cast") is kernels.block_ends


def test_a_tensor_on_the_cpu_goes_to_the_reference():
    def wanted(x, *, by):
        """Multiply."""
        return x * by

    def refused(x, *, by):
        raise RuntimeError("the twin was called")

    operation = binding.choosing(wanted, refused, binding.ANY_GPU)
    assert torch.equal(operation(torch.ones(2), by=3), torch.full((2,), 3.0))
    assert operation.__doc__ == "Multiply."


def test_an_argument_may_have_any_name():
    def wanted(x, first):
        return x * first

    operation = binding.choosing(wanted, wanted, binding.ANY_GPU)
    assert torch.equal(operation(torch.ones(2), first=3), torch.full((2,), 3.0))


def test_a_tensor_that_only_stands_for_one_goes_to_the_reference():
    def wanted(x):
        return x + 1

    def refused(x):
        raise RuntimeError("the twin was called")

    operation = binding.choosing(wanted, refused, binding.ANY_GPU)
    with FakeTensorMode():
        assert operation(torch.empty(2, device="cuda")).device.type == "cuda"


@pytest.mark.parametrize(
    "kind", [torch.Tensor, torch.nn.Parameter, type("Own", (torch.Tensor,), {})]
)
def test_a_tensor_with_memory_of_its_own_is_one(kind):
    assert not binding._has_no_memory(torch.empty(2).as_subclass(kind))


def test_of_several_tensors_the_first_says_where_to_run():
    def wanted(tensors):
        return len(tensors)

    operation = binding.choosing(wanted, wanted, binding.ANY_GPU)
    assert operation([torch.ones(2), torch.ones(3)]) == 2


def test_every_operation_keeps_the_name_of_its_reference():
    assert reference.__doc__
    for name in kernels.__all__:
        operation = getattr(kernels, name)
        if inspect.isfunction(operation):
            assert operation.__name__ == name


def test_no_file_of_twins_is_named_like_an_operation():
    """Importing a file puts it into its package under its name, in the place of the operation."""
    files = {path.stem for path in Path(kernels.__file__).parent.iterdir()}
    assert not files & set(kernels.__all__)


def test_each_operation_is_bound_under_its_own_name_to_a_file_that_has_it():
    package = Path(kernels.__file__).parent
    for statement in ast.parse(Path(kernels.__file__).read_text()).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        name = ast.unparse(statement.targets[0])
        bound, file = (
            ast.unparse(statement.value.args[0]),
            ast.literal_eval(statement.value.args[1]),
        )
        assert name == bound
        path = package / file
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert re.search(rf"\b{name}\b", source), f"{file} has no {name}"


WITHOUT_GLUON = """
import sys
import triton

for name in [name for name in sys.modules if name.startswith("triton.experimental.gluon")]:
    del sys.modules[name]
sys.modules["triton.experimental.gluon"] = None  # to import it is an error
from backstash.kernels import grouped_matmul, quantized_matmul
print(len(grouped_matmul.DTYPES), quantized_matmul._HAS_GLUON)
"""


def test_twins_can_be_imported_where_triton_has_no_gluon():
    pytest.importorskip("triton")
    command = [sys.executable, "-c", WITHOUT_GLUON]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "False"], done.stderr
