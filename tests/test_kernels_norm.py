"""Normalizations against their formulas and autograd, in float64."""

import pytest
import torch

from backstash import kernels
from backstash.errors import ShapeError

EPS = 1e-5
by_shape = pytest.mark.parametrize(
    ("rows", "features"), [(0, 8), (1, 1), (1, 17), (63, 16)], ids=str
)
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


def make(rows, features, dtype):
    torch.manual_seed(0)
    x, dy = (torch.randn(rows, features, dtype=torch.float64).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(features, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, dy, weight, bias


def define_layer_norm(x, weight, bias):
    center = x - x.mean(1, keepdim=True)
    return center / ((center**2).mean(1, keepdim=True) + EPS) ** 0.5 * weight + bias


def define_rms_norm(x, weight):
    return x / ((x**2).mean(1, keepdim=True) + EPS) ** 0.5 * weight


def assert_close(got, wanted, dtype, rows):
    assert got.dtype is dtype
    arithmetic = torch.float64 if dtype is torch.float64 else torch.float32
    rtol, atol = torch.finfo(dtype).eps, 64 * max(rows, 1) * torch.finfo(arithmetic).eps
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=atol)


@by_shape
@by_dtype
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_layer_norm_and_its_gradients_are_their_definition(rows, features, dtype, has_bias):
    x, dy, weight, bias = make(rows, features, dtype)
    bias = bias if has_bias else torch.zeros_like(bias)
    inputs = [v.double().requires_grad_() for v in (x, weight, bias)]
    y64 = define_layer_norm(*inputs)
    wanted = torch.autograd.grad(y64, inputs, dy.double())
    y, mean, rstd = kernels.layer_norm(x, weight, bias if has_bias else None, EPS)
    assert mean.dtype is rstd.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert mean.shape == rstd.shape == (rows,)
    assert_close(y, y64.detach(), dtype, rows)
    for got, want in zip(
        kernels.layer_norm_backward(dy, x, weight, mean, rstd), wanted, strict=True
    ):
        # One feature normalizes to zero: its gradient cancels to the rounding of 1/sqrt(eps).
        assert_close(got, want, dtype, rows if features > 1 else EPS**-0.5)


@by_shape
@by_dtype
def test_rms_norm_and_its_gradients_are_their_definition(rows, features, dtype):
    x, dy, weight, _ = make(rows, features, dtype)
    inputs = [v.double().requires_grad_() for v in (x, weight)]
    y64 = define_rms_norm(*inputs)
    wanted = torch.autograd.grad(y64, inputs, dy.double())
    y, rstd = kernels.rms_norm(x, weight, EPS)
    assert rstd.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert rstd.shape == (rows,)
    assert_close(y, y64.detach(), dtype, rows)
    for got, want in zip(kernels.rms_norm_backward(dy, x, weight, rstd), wanted, strict=True):
        assert_close(got, want, dtype, rows if features > 1 else EPS**-0.5)


def test_rows_of_zeros_and_constants_are_finite():
    x = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    weight, dy = torch.ones(2), torch.ones(2, 2)
    y, mean, rstd = kernels.layer_norm(x, weight, None, EPS)
    assert torch.equal(y, torch.zeros(2, 2))
    assert kernels.layer_norm_backward(dy, x, weight, mean, rstd)[0].isfinite().all()
    y, rstd = kernels.rms_norm(x, weight, EPS)
    assert y.isfinite().all()
    assert kernels.rms_norm_backward(dy, x, weight, rstd)[0].isfinite().all()


def test_a_row_far_from_zero_keeps_its_variance():
    x = torch.tensor([[4096.0, 4097.0, 4098.0, 4099.0]])
    y, _, _ = kernels.layer_norm(x, torch.ones(4), None, EPS)
    wanted = define_layer_norm(x.double(), torch.ones(4).double(), 0)
    assert_close(y, wanted, torch.float32, 1)


def test_what_does_not_fit_is_refused_with_a_remedy():
    with pytest.raises(ShapeError, match="one weight a feature"):
        kernels.layer_norm(torch.zeros(2, 3), torch.zeros(2), None, EPS)
    with pytest.raises(ShapeError, match="one bias a feature"):
        kernels.layer_norm(torch.zeros(2, 3), torch.zeros(3), torch.zeros(2), EPS)
    with pytest.raises(ShapeError, match="flatten the rows"):
        kernels.rms_norm(torch.zeros(2, 3, 3), torch.zeros(3), EPS)
    x, stat = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ShapeError, match="forward returned"):
        kernels.rms_norm_backward(torch.zeros(3, 3), x, torch.zeros(3), stat)
