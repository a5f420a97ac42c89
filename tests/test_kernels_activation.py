"""Activations against torch's own functions and autograd, in float64."""

import pytest
import torch
import torch.nn.functional as F

from backstash import kernels
from backstash.errors import ConfigError, ShapeError

CURVES = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}

by_activation = pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
by_rows = pytest.mark.parametrize("rows", [0, 1, 63])
by_prob = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


def define(h, prob, activation):
    if activation in GATED:
        gate, up = h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]
        a = CURVES[GATED[activation]](gate) * up
    else:
        a = CURVES[activation](h)
    return a if prob is None else a * prob[:, None]


def make(rows, activation, dtype, *, weighted):
    torch.manual_seed(0)
    width = 34 if kernels.ACTIVATIONS[activation] else 17
    h = (2 * torch.randn(rows, width, dtype=torch.float64)).to(dtype)
    da = torch.randn(rows, 17, dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return h, da, torch.rand(rows, dtype=wide) if weighted else None


def assert_close(got, wanted, dtype):
    arithmetic = torch.float64 if dtype is torch.float64 else torch.float32
    rtol, atol = torch.finfo(dtype).eps, 64 * torch.finfo(arithmetic).eps
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=atol)


@by_activation
@by_rows
@by_prob
@by_dtype
def test_values_and_gradients_are_their_definition(activation, rows, weighted, dtype):
    h, da, prob = make(rows, activation, dtype, weighted=weighted)
    h64 = h.double().requires_grad_()
    prob64 = None if prob is None else prob.double().requires_grad_()
    a64 = define(h64, prob64, activation)
    wanted = torch.autograd.grad(a64, [h64] + [prob64] * weighted, da.double())
    a = kernels.activate(h, prob, activation)
    dh, dprob = kernels.activate_backward(da, h, prob, activation)
    assert a.dtype is dh.dtype is dtype
    assert_close(a, a64.detach(), dtype)
    assert_close(dh, wanted[0], dtype)
    if prob is None:
        assert dprob is None
    else:
        assert dprob is not None
        assert dprob.dtype is prob.dtype
        # A row's weight has a gradient summed over 17 products.
        assert_close(dprob / 17, wanted[1] / 17, prob.dtype)


@by_activation
def test_gradients_and_the_activation_are_written_where_asked(activation):
    columns = 6 * (1 + kernels.ACTIVATIONS[activation])
    h, da, prob = torch.randn(5, columns), torch.randn(5, 6), torch.rand(5)
    rooms = [torch.full((9, *size), float("nan")) for size in ((columns,), (), (6,))]
    into = kernels.ActivationGradients(*(room[1:6] for room in rooms))
    got = kernels.activate_backward(da, h, prob, activation, into)
    wanted = (
        *kernels.activate_backward(da, h, prob, activation),
        kernels.activate(h, prob, activation),
    )
    for one, expected in zip(into, wanted, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0)
    assert got[0] is into.dh_TF
    assert got[1] is into.dprob_T
    assert all(room[[0, 6, 7, 8]].isnan().all() for room in rooms)


@by_activation
def test_a_weight_of_one_changes_no_bit(activation):
    h, da, _ = make(63, activation, torch.float32, weighted=False)
    one = torch.ones(63)
    assert torch.equal(kernels.activate(h, one, activation), kernels.activate(h, None, activation))
    with_one, _ = kernels.activate_backward(da, h, one, activation)
    without, _ = kernels.activate_backward(da, h, None, activation)
    assert torch.equal(with_one, without)


@by_activation
def test_large_inputs_saturate_and_stay_finite(activation):
    h = torch.tensor([[-1e4, 1e4], [1e4, -1e4]])
    width = 1 if kernels.ACTIVATIONS[activation] else 2
    dh, _ = kernels.activate_backward(torch.ones(2, width), h, None, activation)
    assert kernels.activate(h, None, activation).isfinite().all()
    assert dh.isfinite().all()


@by_activation
def test_a_nan_row_stays_in_its_row(activation):
    h, da, prob = make(3, activation, torch.float32, weighted=True)
    h[1] = float("nan")
    dh, dprob = kernels.activate_backward(da, h, prob, activation)
    assert dprob is not None
    for result in (kernels.activate(h, prob, activation), dh, dprob):
        assert result[[0, 2]].isfinite().all()


def test_what_does_not_fit_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="swiglu"):
        kernels.activate(torch.zeros(2, 4), None, "swish")
    with pytest.raises(ShapeError, match="halves"):
        kernels.activate(torch.zeros(2, 5), None, "swiglu")
    with pytest.raises(ShapeError, match="flatten the weights"):
        kernels.activate(torch.zeros(2, 4), torch.zeros(2, 1), "gelu")
    with pytest.raises(ShapeError, match="what activate returned"):
        kernels.activate_backward(torch.zeros(2, 4), torch.zeros(2, 4), None, "swiglu")
