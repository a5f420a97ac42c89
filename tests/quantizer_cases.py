"""Inputs that quantizers get wrong, with readable names, for the tests of several files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import definitions

SHAPES = [
    *[(1, 1), (1, 31), (33, 65), (64, 96), (303, 300), (305, 256), (256, 272)],
    *[(2, 3, 40), (0, 64), (5, 0), (0, 3, 17)],
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COUNTS = {
    "even": [32, 32, 32],
    "empty-first": [0, 40, 5],
    "empty-middle": [3, 0, 0, 70],
    "empty-last": [63, 1, 0],
    "one-row": [1],
    "31-and-33": [31, 33],
    "one-has-everything": [0, 96, 0],
    "all-empty": [0, 0, 0],
}
INF, NAN = math.inf, math.nan
TINY = math.ldexp(1.0, -149)  # the smallest float32
# A few values, repeated to fill a matrix; each row and column block sees all of them.
SPECIALS = {
    "zeros": [0.0],
    "minus-zeros": [-0.0, 0.0],
    "huge": [3.0e38, 1.0, -2.0],
    "all-huge": [definitions.FLOAT32_MAX],
    "subnormal": [TINY, -3 * TINY, 2.0**-127, 2.0**-130],
    "smallest-normal": [2.0**-126, -(2.0**-126)],
    "infinite": [INF, 1.0, -INF, 0.0, -0.0],
    "nan-in-a-block": [NAN, 1.0, -3.0, 448.0],
    "only-nan": [NAN, -NAN],
    "nan-and-infinite": [NAN, INF, -1.0],
    "largest-codes": [448.0, -448.0, 449.0, 464.0, 465.0, 57344.0],
    "exact-power": [224.0, 447.99, 2.0**-9],
}

by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
by_special = pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS.keys())
by_code = pytest.mark.parametrize("code", ["e4m3", "e5m2"])


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values whose columns span many powers of two, so that blocks differ."""
    x = torch.randn(shape, dtype=torch.float64)
    return (x * torch.exp2(torch.randint(-20, 12, shape[-1:]))).to(dtype)


def special_matrix(special: list[float], shape: tuple[int, int] = (33, 65)) -> Tensor:
    """``special`` over and over: each of its values is in most blocks."""
    return torch.tensor(np.resize(np.asarray(special, np.float32), shape))


def matrix(x: Tensor) -> np.ndarray:
    """The values of ``x`` as a float64 matrix, leading dimensions flattened."""
    return x.double().reshape(x.shape[:-1].numel(), x.shape[-1]).numpy()


def grouped_values(counts: list[int], columns: int, tail: int = 5) -> tuple[Tensor, Tensor]:
    """Values with a tail of NaN past the last group, and the ends of the groups."""
    x = values((sum(counts) + tail, columns))
    x[sum(counts) :] = NAN
    return x, torch.tensor(counts).cumsum(0).int()


def assert_same(got: Tensor, wanted: np.ndarray) -> None:
    """Every bit, but for the payload of a NaN; a zero has its sign."""
    wanted = wanted.reshape(got.shape)
    if got.is_floating_point():
        got_values = got.double().numpy()
        np.testing.assert_array_equal(got_values, wanted.astype(np.float64))
        signs = ~np.isnan(wanted)
        assert np.array_equal(np.signbit(got_values)[signs], np.signbit(wanted)[signs])
    else:
        np.testing.assert_array_equal(got.numpy(), wanted)
