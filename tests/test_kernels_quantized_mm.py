"""Products on codes: the reference against float64 products of what the codes stand for."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.errors import DtypeError, LayoutError, ShapeError
from quantized_mm_cases import (
    COLUMNS,
    KINDS,
    ROWS,
    assert_product,
    by_kind,
    by_tiles,
    codes_of,
    products,
    spread,
)

COUNTS = {
    "one-matrix": 70,
    "no-rows": 0,
    "empty-one-and-33": [0, 1, 33],
    "all-empty": [0, 0],
    "one-group": [40],
}
by_counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())


@by_tiles
@by_counts
@by_kind
def test_products_are_those_of_the_dequantized_values(kind, counts, weight_blocks):
    for product in products(kind, (counts, (40, 96)), weight_blocks):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            got = product.multiply(product.a, product.b, product.ends_G, dtype)
            assert got.dtype is dtype
            assert_product(got, product)


def test_rows_past_the_last_group_are_exact_zeros():
    for product in products(KINDS["mxfp8"], ([3, 0, 5], (33, 65)), "lines")[:2]:
        got = product.multiply(product.a, product.b, product.ends_G, torch.bfloat16)
        assert got[:8].any()
        assert not got[8:].any()


def test_a_group_without_rows_has_a_weight_gradient_of_exact_zeros():
    dw = products(KINDS["blocks"], ([3, 0, 5], (33, 65)), "lines")[2]
    got = dw.multiply(dw.a, dw.b, dw.ends_G, torch.bfloat16)
    assert [bool(group.any()) for group in got] == [True, False, True]


X = spread(6, 8)
ENDS = torch.tensor([2, 6]).int()


def rows(x=X):
    return codes_of(KINDS["mxfp8"], ROWS, x, None)


def columns(x=X, ends=None):
    return codes_of(KINDS["mxfp8"], COLUMNS, x, ends)


MISTAKES = {
    "columns where rows are added up": (
        lambda: kernels.quantized_mm(columns(), rows(), None, torch.float32),
        LayoutError,
        "blocks along rows, got blocks down columns",
    ),
    "rows of a weight where columns are": (
        lambda: kernels.quantized_mm_dx(rows(), rows(), None, torch.float32),
        LayoutError,
        "blocks down columns, got blocks along rows",
    ),
    "rows of another length": (
        lambda: kernels.quantized_mm(rows(), rows(X[:, :7]), None, torch.float32),
        ShapeError,
        r"\(6, 8\) and \(6, 7\)",
    ),
    "a weight of too few rows": (
        lambda: kernels.quantized_mm_dx(rows(), columns(), ENDS, torch.float32),
        ShapeError,
        "in 2 groups",
    ),
    "a weight that is no whole groups": (
        lambda: kernels.quantized_mm(rows(), rows(X[:5]), ENDS, torch.float32),
        ShapeError,
        "got 5 rows",
    ),
    "other rows": (
        lambda: kernels.quantized_mm_dw(columns(), columns(X[:5]), None, torch.float32),
        ShapeError,
        "the same rows",
    ),
    "bytes": (
        lambda: kernels.quantized_mm(
            rows()._replace(codes=rows().codes.view(torch.uint8)), rows(), None, torch.float32
        ),
        DtypeError,
        "got torch.uint8",
    ),
    "ends that are no integers": (
        lambda: kernels.quantized_mm(rows(), rows(), ENDS.float(), torch.float32),
        DtypeError,
        "int32 or int64",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_operands_that_do_not_fit_are_refused(mistake):
    call, error, words = mistake
    with pytest.raises(error, match=words):
        call()
