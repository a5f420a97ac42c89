"""Rows of an activation as codes on a GPU: what its values give, bit for bit."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.kernels import Scaling
from host_reads import no_host_reads
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(1, 1), (63, 65), (9, 768), (130, 2048), (3, 5000), (2, 16400)]
SCALINGS = [Scaling(E4M3), Scaling(E5M2, epsilon=0.5), Scaling(E4M3, power_of_two=True)]


def check(h: torch.Tensor, prob: torch.Tensor | None, activation: str, scaling: Scaling) -> None:
    with no_host_reads():
        found = kernels.activate_float8(h, prob, activation, scaling)
    a = kernels.activate(h, prob, activation)
    wanted = kernels.quantize_float8_rows(a, scaling.code_dtype, **scaling.options)
    for one, other in zip(found, wanted, strict=True):
        assert_twin_bytes(one, other)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("scaling", SCALINGS, ids=["e4m3", "e5m2", "power-of-two"])
def test_codes_are_those_of_the_values(scaling: Scaling, size: tuple[int, int]) -> None:
    rows, columns = size
    h = torch.randn(rows, 2 * columns, device="cuda", dtype=torch.bfloat16)
    check(h, torch.rand(rows, device="cuda"), "swiglu", scaling)


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "geglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_other_activations_and_dtypes_are_as_well(activation: str, dtype: torch.dtype) -> None:
    columns = 48 * (1 + kernels.ACTIVATIONS[activation])
    h = torch.randn(33, columns + 8, device="cuda", dtype=dtype)[:, 3 : columns + 3]
    check(h, None, activation, SCALINGS[0])


def test_special_values_are_as_well() -> None:
    h = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -88.0, 3e38]
    for row, value in enumerate(special):
        h[row, row] = value
        h[row, 40 + row] = value
    h[3] = 0
    for scaling in SCALINGS:
        check(h, torch.rand(6, device="cuda"), "swiglu", scaling)


def test_rows_of_the_tail_are_not_written() -> None:
    h, ends_G = torch.randn(50, 64, device="cuda").bfloat16(), torch.tensor([9, 9, 33]).cuda()
    found = kernels.activate_float8(h, None, "swiglu", SCALINGS[0], ends_G)
    wanted = kernels.activate_float8(h, None, "swiglu", SCALINGS[0])
    for one, other in zip(found, wanted, strict=True):
        assert_twin_bytes(one[:33], other[:33])
    # What fresh memory is full of.
    assert (found[0][33:] == 255).all()
    assert found[1][33:].isnan().all()
