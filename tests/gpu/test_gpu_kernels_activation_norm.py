"""Activations and normalizations on a GPU against the reference in float64."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the float32 that all of it is computed in.
EPS = torch.finfo(torch.float32).eps
SIZES = [(1, 1), (63, 65), (9, 768), (5, 5000)]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))


def assert_near(got, wanted, terms=1):
    """Within a rounding to the dtype; a sum of many terms is off by its terms' roundings."""
    assert (got is None) == (wanted is None)
    if got is None:
        return
    rtol, atol = max(torch.finfo(got.dtype).eps, 8 * EPS), 64 * EPS * max(1, terms) ** 0.5
    torch.testing.assert_close(got.cpu().double(), wanted.double(), rtol=rtol, atol=atol)


@by_dtype
@by_size
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_activations_are_the_references(activation, weighted, size, dtype):
    rows, columns = size
    h = torch.randn(rows, columns * (1 + kernels.ACTIVATIONS[activation])).to(dtype)
    da = torch.randn(rows, columns).to(dtype)
    prob = torch.rand(rows) if weighted else None
    wide = None if prob is None else prob.double()
    wanted = kernels.activate(h.double(), wide, activation)
    wanted_back = kernels.activate_backward(da.double(), h.double(), wide, activation)
    h, da = h.cuda(), da.cuda()
    prob = None if prob is None else prob.cuda()
    with no_host_reads():
        got = kernels.activate(h, prob, activation)
        dh, dprob = kernels.activate_backward(da, h, prob, activation)
    assert_near(got, wanted)
    assert_near(dh, wanted_back[0])
    assert_near(dprob, wanted_back[1], terms=columns)
    rooms = [None if v is None else room_for(v) for v in (dh, dprob, got)]
    inner = [None if room is None else room[2:-3] for room in rooms]
    assert inner[0] is not None
    into = kernels.ActivationGradients(inner[0], *inner[1:])
    kernels.activate_backward(da, h, prob, activation, into)
    for room, right in zip(rooms, (*wanted_back, wanted), strict=True):
        if room is not None:
            assert_near(room[2:-3], right, terms=columns if room.ndim == 1 else 1)
            assert room[:2].isnan().all()
            assert room[-3:].isnan().all()


def room_for(value):
    """Room for more rows, of which nobody has written one."""
    rows, *columns = value.shape
    return value.new_full((rows + 5, *columns), float("nan"))


@by_dtype
@by_size
def test_normalizations_are_the_references(size, dtype):
    rows, columns = size
    x, dy = (torch.randn(rows, columns).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(columns).to(dtype) for _ in range(2))
    wide = [v.double() for v in (x, dy, weight, bias)]
    y, mean, rstd = kernels.layer_norm(wide[0], wide[2], wide[3], 1e-5)
    back = kernels.layer_norm_backward(wide[1], wide[0], wide[2], mean.double(), rstd.double())
    x, dy, weight, bias = (v.cuda() for v in (x, dy, weight, bias))
    with no_host_reads():
        got = kernels.layer_norm(x, weight, bias, 1e-5)
        got_back = kernels.layer_norm_backward(dy, x, weight, got[1], got[2])
    for one, other in zip(got, (y, mean, rstd), strict=True):
        assert_near(one, other)
    for one, other in zip(got_back, back, strict=True):
        assert_near(one, other, terms=columns * rows)
    y, rstd = kernels.rms_norm(wide[0], wide[2], 1e-5)
    back = kernels.rms_norm_backward(wide[1], wide[0], wide[2], rstd)
    got = kernels.rms_norm(x, weight, 1e-5)
    got_back = kernels.rms_norm_backward(dy, x, weight, got[1])
    for one, other in zip((*got, *got_back), (y, rstd, *back), strict=True):
        assert_near(one, other, terms=columns * rows)


def test_without_rows_gradients_of_weights_are_zeros():
    x, weight = torch.empty(0, 8, device="cuda"), torch.ones(8, device="cuda")
    _, rstd = kernels.rms_norm(x, weight, 1e-5)
    assert not kernels.rms_norm_backward(x, x, weight, rstd)[1].any()
