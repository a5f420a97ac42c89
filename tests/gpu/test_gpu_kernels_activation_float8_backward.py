"""The gradient of an activation as codes on a GPU: what its values give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import ActivationGradients, Scaling
from host_reads import no_host_reads
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Sums over so few columns have another order; their bits are not compared.
ANOTHER_ORDER = 64
PLAIN = Scaling(E4M3), Scaling(E4M3)
OTHERS = Scaling(E5M2, power_of_two=True), Scaling(E4M3, epsilon=0.5)


def by_values(
    da: Tensor, h: Tensor, prob: Tensor | None, activation: str, ends_G: Tensor
) -> ActivationGradients:
    into = ActivationGradients(
        torch.empty_like(h), None if prob is None else torch.empty_like(prob), torch.empty_like(da)
    )
    kernels.activate_backward(da, h, prob, activation, into, ends_G)
    return into


def check(
    da: Tensor,
    h: Tensor,
    prob: Tensor | None,
    activation: str,
    ends_G: Tensor,
    scalings: tuple[Scaling, Scaling] = PLAIN,
) -> None:
    """Rows are compared up to the tail, columns up to the padding, routing weights all."""
    with no_host_reads():
        found = kernels.activate_backward_float8(da, h, prob, activation, ends_G, scalings)
    into = by_values(da, h, prob, activation, ends_G)
    assert into.a_TI is not None
    of_dh, of_a = scalings
    dh_rows, dh_turned = kernels.quantize_float8_rows_and_turned(
        into.dh_TF, of_dh.code_dtype, ends_G, **of_dh.options
    )
    a_turned = kernels.quantize_float8_turned(into.a_TI, of_a.code_dtype, ends_G, **of_a.options)
    rows, padded = int(ends_G[-1].clamp(max=len(h))), int(dh_turned.padded_ends_G[-1])
    for one, other in zip(found.dh_rows, dh_rows, strict=True):
        assert_twin_bytes(one[:rows], other[:rows])
    for turned, wanted in ((found.dh_turned, dh_turned), (found.a_turned, a_turned)):
        codes, right = (
            part.codes.view(torch.uint8)[:, :padded].contiguous() for part in (turned, wanted)
        )
        assert turned.codes.dtype is wanted.codes.dtype
        assert_twin_bytes(codes, right)
        assert_twin_bytes(turned.scale_inv, wanted.scale_inv)
        assert_twin_bytes(turned.padded_ends_G, wanted.padded_ends_G)
    assert (found.dprob_T is None) == (prob is None)
    if found.dprob_T is not None and into.dprob_T is not None:
        if da.shape[1] > ANOTHER_ORDER:
            assert_twin_bytes(found.dprob_T, into.dprob_T)
        torch.testing.assert_close(found.dprob_T, into.dprob_T, equal_nan=True)
        assert not found.dprob_T[rows:].any()


def values(rows: int, columns: int, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    new = {"device": "cuda", "dtype": torch.bfloat16}
    h = torch.randn(rows, columns * (1 + kernels.ACTIVATIONS[activation]), **new)
    return torch.randn(rows, columns, **new), h, torch.rand(rows, device="cuda")


@pytest.mark.parametrize("columns", [2, 72, 768, 2048])
def test_random_splits_are_those_of_the_values(columns: int) -> None:
    for counts, tail in random_counts(5):
        ends_G = torch.tensor(counts).cumsum(0).cuda()
        check(*values(sum(counts) + tail, columns, "swiglu"), "swiglu", ends_G)


def test_large_groups_are_as_well() -> None:
    ends_G = torch.tensor([700, 700, 2100, 2100, 5003], device="cuda", dtype=torch.int32)
    check(*values(5010, 304, "swiglu"), "swiglu", ends_G)


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "geglu", "reglu"])
def test_other_activations_and_scalings_are_as_well(activation: str) -> None:
    ends_G = torch.tensor([130, 130, 301], device="cuda", dtype=torch.int32)
    da, h, prob = values(310, 48, activation)
    check(da, h, prob, activation, ends_G, OTHERS)
    check(da, h, None, activation, ends_G, OTHERS)


def test_rows_and_columns_apart_in_memory_are_as_well() -> None:
    ends_G = torch.tensor([60, 100], device="cuda")
    da, h, prob = values(200, 40, "swiglu")
    check(da[::2, :32], h[::2, 8:72], prob[::2], "swiglu", ends_G)


def test_a_tail_longer_than_the_groups_is_as_well() -> None:
    ends_G = torch.tensor([3, 3, 40], device="cuda", dtype=torch.int32)
    check(*values(1000, 48, "swiglu"), "swiglu", ends_G)


def test_what_the_kernels_do_not_take_is_as_well() -> None:
    ends_G = torch.tensor([20, 33], device="cuda", dtype=torch.int32)
    for dtype, columns in ((torch.float16, 32), (torch.float32, 32), (torch.bfloat16, 2056)):
        da, h, prob = values(40, columns, "swiglu")
        check(da.to(dtype), h.to(dtype), prob, "swiglu", ends_G)
    da, h, prob = values(0, 32, "swiglu")
    check(da, h, prob, "swiglu", torch.zeros(2, device="cuda", dtype=torch.int32))


def test_every_bfloat16_gives_the_bits_of_the_values() -> None:
    every = torch.arange(65536, device="cuda").to(torch.int16).view(torch.bfloat16)
    gate = every.view(256, 256)
    ends_G = torch.arange(1, 257, device="cuda", dtype=torch.int32)
    da, up = torch.randn(2, 256, 256, device="cuda").bfloat16()
    check(da, torch.cat([gate, up], 1), torch.rand(256, device="cuda"), "swiglu", ends_G)
