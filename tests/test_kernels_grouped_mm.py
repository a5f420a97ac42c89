"""Grouped matmuls against the definition: a loop over rows in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from host_reads import no_host_reads

COUNTS = {
    "even": [4, 4, 4],
    "empty-first": [0, 5, 3],
    "empty-middle": [2, 0, 0, 7],
    "empty-last": [63, 1, 0],
    "one-has-everything": [0, 63, 0],
    "all-empty": [0, 0, 0],
    "one-group-one-row": [1],
    "no-multiple-of-a-block": [31, 33, 1, 0],
}
SIZES = {"K1-N1": (1, 1), "K17-N63": (17, 63), "K64-N16": (64, 16)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

by_counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
by_size = pytest.mark.parametrize(("k", "n"), SIZES.values(), ids=SIZES.keys())
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_ends_dtype = pytest.mark.parametrize("ends_dtype", [torch.int32, torch.int64], ids=str)


def make(counts, k, n, *, tail=5, dtype=torch.float32):
    """Random operands with a tail of NaN, ends, and the group of every row that is there."""
    torch.manual_seed(0)
    rows = sum(counts)
    x = torch.randn(rows + tail, k, dtype=torch.float64).to(dtype)
    dy = torch.randn(rows + tail, n, dtype=torch.float64).to(dtype)
    w = torch.randn(len(counts), n, k, dtype=torch.float64).to(dtype)
    x[rows:] = dy[rows:] = float("nan")
    ends = torch.tensor(counts).cumsum(0).int()
    return x, dy, w, ends, [g for g, count in enumerate(counts) for _ in range(count)]


def define(x, dy, w, groups):
    """The definition of y, dx and dw: every row alone, in float64."""
    x, dy, w = x.double(), dy.double(), w.double()
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    for t, g in enumerate(groups):
        y[t] = w[g] @ x[t]
        dx[t] = dy[t] @ w[g]
        dw[g] += torch.outer(dy[t], x[t])
    return y, dx, dw


def assert_close(got, wanted, dtype):
    assert got.dtype is dtype
    # A sum of s products, each rounded in the arithmetic, and one rounding to the dtype.
    eps = torch.finfo(dtype if dtype is torch.float64 else torch.float32).eps
    scale = wanted.abs().max().item() if wanted.numel() else 0.0
    atol, rtol = 64 * eps * scale, torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, atol=atol, rtol=rtol)


@by_counts
@by_size
@by_dtype
def test_all_three_products_are_their_definition(counts, k, n, dtype):
    x, dy, w, ends, groups = make(counts, k, n, dtype=dtype)
    y, dx, dw = define(x, dy, w, groups)
    assert_close(kernels.grouped_mm(x, w, ends), y, dtype)
    assert_close(kernels.grouped_mm_dx(dy, w, ends), dx, dtype)
    assert_close(kernels.grouped_mm_dw(dy, x, ends), dw, dtype)


@by_counts
@by_ends_dtype
def test_row_groups_names_the_group_of_each_row_and_the_tail(counts, ends_dtype):
    *_, ends, groups = make(counts, 1, 1)
    got = kernels.row_groups(ends.to(ends_dtype), len(groups) + 3)
    assert got.dtype is torch.int64
    assert got.tolist() == groups + [len(counts)] * 3


@by_counts
def test_int64_ends_give_the_same_bits_as_int32(counts):
    x, dy, w, ends, _ = make(counts, 17, 5)
    for kernel, a, b in (
        (kernels.grouped_mm, x, w),
        (kernels.grouped_mm_dx, dy, w),
        (kernels.grouped_mm_dw, dy, x),
    ):
        assert torch.equal(kernel(a, b, ends), kernel(a, b, ends.long()))


@by_counts
def test_a_tail_of_nan_gives_zeros_and_reaches_nothing(counts):
    x, dy, w, ends, groups = make(counts, 17, 5, tail=9)
    clean = x.nan_to_num(), dy.nan_to_num()
    y, dx = kernels.grouped_mm(x, w, ends), kernels.grouped_mm_dx(dy, w, ends)
    assert y[len(groups) :].eq(0).all()
    assert dx[len(groups) :].eq(0).all()
    dw = kernels.grouped_mm_dw(dy, x, ends)
    assert torch.equal(dw, kernels.grouped_mm_dw(clean[1], clean[0], ends))
    assert torch.equal(kernels.group_sum(dy, ends), kernels.group_sum(clean[1], ends))


@by_counts
def test_an_empty_group_has_an_exactly_zero_weight_gradient(counts):
    x, dy, _, ends, _ = make(counts, 17, 5)
    dw, db = kernels.grouped_mm_dw(dy, x, ends), kernels.group_sum(dy, ends)
    for g, count in enumerate(counts):
        if count == 0:
            assert dw[g].eq(0).all()
            assert db[g].eq(0).all()


def test_a_nan_in_one_group_stays_in_that_group():
    x, dy, w, ends, _ = make([3, 2], 4, 3)
    x[0] = dy[0] = float("nan")
    assert kernels.grouped_mm(x, w, ends)[1:].isfinite().all()
    assert kernels.grouped_mm_dw(dy, x, ends)[1].isfinite().all()
    assert kernels.group_sum(dy, ends)[1].isfinite().all()


def test_ends_past_the_buffer_are_clamped_to_it():
    x, dy, w, ends, _ = make([3, 4], 6, 5, tail=0)
    far = ends + torch.tensor([0, 100], dtype=torch.int32)
    assert torch.equal(kernels.grouped_mm(x, w, far), kernels.grouped_mm(x, w, ends))
    assert torch.equal(kernels.grouped_mm_dw(dy, x, far), kernels.grouped_mm_dw(dy, x, ends))
    assert torch.equal(kernels.group_sum(x, far), kernels.group_sum(x, ends))


def test_views_with_any_strides_are_read_right():
    x, _, w, ends, _ = make([3, 4], 6, 5)
    wide = torch.randn(x.shape[0], 13)
    wide[:, 1:7] = x
    y = kernels.grouped_mm(wide[:, 1:7], w.mT.contiguous().mT, ends)
    assert torch.equal(y, kernels.grouped_mm(x, w, ends))


@pytest.mark.parametrize(("rows", "k", "n"), [(0, 3, 4), (5, 0, 4), (5, 3, 0)])
def test_a_dimension_of_zero_gives_zeros_of_the_right_shape(rows, k, n):
    x, dy, w = torch.randn(rows, k), torch.randn(rows, n), torch.randn(2, n, k)
    ends = torch.tensor([rows // 2, rows], dtype=torch.int32)
    y, dx = kernels.grouped_mm(x, w, ends), kernels.grouped_mm_dx(dy, w, ends)
    dw = kernels.grouped_mm_dw(dy, x, ends)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, w.shape)
    assert not y.any() or k
    assert not dx.any() or n
    assert not dw.any() or rows


@by_counts
@by_dtype
def test_the_bias_of_a_group_is_added_to_its_rows_only(counts, dtype):
    _, y, _, ends, groups = make(counts, 1, 5, dtype=dtype)
    bias = torch.randn(len(counts), 5, dtype=torch.float64).to(dtype)
    wanted = torch.zeros_like(y, dtype=torch.float64)
    for t, g in enumerate(groups):
        wanted[t] = y[t].double() + bias[g].double()
    got = kernels.add_group_bias(y, bias, ends)
    assert_close(got, wanted, dtype)
    assert got[len(groups) :].eq(0).all()


@by_counts
@by_dtype
def test_the_sum_of_a_group_is_the_sum_of_its_rows(counts, dtype):
    _, y, _, ends, groups = make(counts, 1, 5, dtype=dtype)
    wanted = torch.zeros(len(counts), 5, dtype=torch.float64)
    for t, g in enumerate(groups):
        wanted[g] += y[t].double()
    assert_close(kernels.group_sum(y, ends), wanted, dtype)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    k=st.integers(1, 20),
    n=st.integers(1, 20),
    tail=st.integers(0, 7),
)
def test_any_split_is_its_definition(counts, k, n, tail):
    x, dy, w, ends, groups = make(counts, k, n, tail=tail)
    y, dx, dw = define(x, dy, w, groups)
    assert_close(kernels.grouped_mm(x, w, ends), y, torch.float32)
    assert_close(kernels.grouped_mm_dx(dy, w, ends), dx, torch.float32)
    assert_close(kernels.grouped_mm_dw(dy, x, ends), dw, torch.float32)


@pytest.mark.gpu
@by_counts
@by_size
@by_dtype
def test_on_a_gpu_all_three_products_are_their_definition_without_a_host_read(counts, k, n, dtype):
    x, dy, w, ends, groups = make(counts, k, n, dtype=dtype)
    y, dx, dw = define(x, dy, w, groups)
    sums = torch.zeros(len(counts), n, dtype=torch.float64)
    for t, g in enumerate(groups):
        sums[g] += dy[t].double()
    x, dy, w, ends = x.cuda(), dy.cuda(), w.cuda(), ends.cuda()
    with no_host_reads():
        got = [
            kernels.grouped_mm(x, w, ends),
            kernels.grouped_mm_dx(dy, w, ends),
            kernels.grouped_mm_dw(dy, x, ends),
            kernels.group_sum(dy, ends),
            kernels.add_group_bias(dy, w[:, :, 0], ends),
        ]
    for kernel, wanted in zip(got, (y, dx, dw, sums), strict=False):
        assert_close(kernel.cpu(), wanted, dtype)
    assert got[-1][len(groups) :].eq(0).all()
    assert got[2][[count == 0 for count in counts]].eq(0).all()


@pytest.mark.parametrize(
    ("x", "w", "ends", "error", "remedy"),
    [
        ((4, 3), (2, 5, 4), [2, 4], ShapeError, "row length"),
        ((4,), (2, 5, 4), [2, 4], ShapeError, "row length"),
        ((4, 3), (2, 5, 3), [4], ShapeError, "empty group"),
        ((4, 3), (2, 5, 3), [[2, 4]], ShapeError, "running sum"),
        ((4, 3), (2, 5, 3), [2.0, 4.0], DtypeError, "int32"),
    ],
    ids=["other-K", "one-dimension", "too-few-ends", "ends-2d", "ends-float"],
)
def test_operands_that_do_not_fit_are_refused_with_a_remedy(x, w, ends, error, remedy):
    with pytest.raises(error, match=remedy):
        kernels.grouped_mm(torch.zeros(x), torch.zeros(w), torch.tensor(ends))


def test_operands_of_two_dtypes_are_refused():
    ends = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(DtypeError, match="cast one"):
        kernels.grouped_mm(torch.zeros(2, 3), torch.zeros(1, 4, 3).half(), ends)
    with pytest.raises(ShapeError, match="same T"):
        kernels.grouped_mm_dw(torch.zeros(2, 3), torch.zeros(3, 3), ends)
    with pytest.raises(ShapeError, match="one bias"):
        kernels.add_group_bias(torch.zeros(2, 3), torch.zeros(2, 3), ends)
    with pytest.raises(ShapeError, match="leading"):
        kernels.group_sum(torch.zeros(2, 3, 4), ends)
