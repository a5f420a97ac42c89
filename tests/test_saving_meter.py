"""``Meter`` counts each storage once and nothing that stays anyway."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import backstash as bs
from backstash.saving import saving
from saving_cases import COLUMNS, COUNTS, FORMATS, ROWS, Carrier, Keeper, leaf


def metered(run: Callable[[], Any]) -> tuple[int, int]:
    with saving(meter := bs.Meter()):
        run()
    return meter.bytes, meter.calls


def test_each_storage_counts_once_and_each_tensor_calls() -> None:
    h = torch.randn(ROWS, COLUMNS, requires_grad=True) * 1
    assert metered(lambda: h * h) == (h.nbytes, 2)
    assert metered(lambda: (h.exp(), F.silu(h))) == (2 * h.nbytes, 2)


def test_views_count_as_the_whole_storage_once() -> None:
    buffer = torch.randn(10, 4, requires_grad=True) * 1
    assert metered(lambda: (F.silu(buffer[:3]), F.silu(buffer[7:]))) == (buffer.nbytes, 2)


def test_parameters_and_views_of_them_count_nothing() -> None:
    layer = nn.Linear(COLUMNS, 3)
    x = torch.randn(ROWS, COLUMNS)
    assert metered(lambda: layer(x)) == (x.nbytes, 1)
    assert metered(lambda: x @ layer.weight.view(-1).view(3, COLUMNS).t()) == (x.nbytes, 1)
    frozen = nn.Parameter(torch.randn(COLUMNS, 3), requires_grad=False)
    assert metered(lambda: x.requires_grad_() @ frozen) == (0, 0)


def test_nested_meters_count_the_same() -> None:
    outer, inner, beside = bs.Meter(), bs.Meter(), bs.Meter()
    with saving(outer), saving(inner, beside):
        torch.ones(5, requires_grad=True).exp()
    torch.ones(5, requires_grad=True).exp()
    assert {(m.bytes, m.calls) for m in (outer, inner, beside)} == {(20, 1)}


def test_a_meter_counts_what_a_later_handler_keeps_and_not_what_an_earlier_one_did() -> None:
    before, after = bs.Meter(), bs.Meter()
    with saving(before, Keeper(), after):
        torch.ones(5, requires_grad=True).exp()
    assert (before.bytes, after.bytes) == (20, 0)


def test_reset_starts_from_zero() -> None:
    h = torch.ones(5, requires_grad=True) * 1
    meter = bs.Meter()
    for _ in range(2):
        meter.reset()
        with saving(meter):
            F.silu(h)
        assert (meter.bytes, meter.calls) == (20, 1)


def test_a_storage_at_the_address_of_one_that_was_freed_counts_too() -> None:
    meter = bs.Meter()
    with saving(meter):
        for _ in range(50):
            torch.ones(1000, requires_grad=True).exp()
    assert (meter.bytes, meter.calls) == (50 * 4000, 50)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("usage", [bs.Usage.ROWWISE, bs.Usage.COLUMNWISE, bs.Usage.BOTH])
def test_bytes_of_a_quantized_tensor_are_the_formula(format: bs.Format, usage: bs.Usage) -> None:
    x = torch.randn(ROWS, COLUMNS)
    want = format.saved_bytes(ROWS, COLUMNS, x.dtype, usage)
    assert metered(lambda: Carrier(format.quantize(x, usage=usage))(leaf()))[0] == want
    grouped = format.quantize(bs.GroupedTensor.from_counts(x, COUNTS), usage=usage)
    want = format.saved_bytes(ROWS, COLUMNS, x.dtype, usage, len(COUNTS))
    ends_and_overflow = 4 * len(COUNTS) + 1
    assert metered(lambda: Carrier(grouped)(leaf()))[0] == want + ends_and_overflow


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_a_sparse_tensor_counts_its_indices_and_values(layout: str) -> None:
    make = getattr(torch, f"sparse_{layout}_tensor")
    values, along, ends = torch.ones(8), torch.arange(8), torch.arange(9)
    places = (torch.stack([along, along]),) if layout == "coo" else (ends, along)
    meter = bs.Meter()
    meter.pack(make(*places, values, (8, 8)), None)
    assert meter.bytes == values.nbytes + sum(place.nbytes for place in places)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_matmul_can_be_metered() -> None:
    x = torch.randn(8, 3, requires_grad=True)
    saved, _ = metered(lambda: torch.sparse.mm(torch.eye(8).to_sparse(), x))
    assert saved > 0


def test_a_wrapper_that_autograd_saves_itself_counts_its_buffers() -> None:
    inner = [torch.randn(4, 4), torch.randn(4, 4)]
    x = torch.randn(4, 4, requires_grad=True)
    wrapper = TwoTensor(*inner)
    assert metered(lambda: x * wrapper)[0] == 2 * 64


def test_a_meter_keeps_nothing() -> None:
    meter = bs.Meter()
    with pytest.raises(bs.LayoutError, match="keeps no tensors"):
        meter.unpack(1)


def test_threads_share_a_meter() -> None:
    meter = bs.Meter()

    def work() -> None:
        with saving(meter):
            for _ in range(50):
                torch.ones(10, requires_grad=True).exp()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (meter.bytes, meter.calls) == (4 * 50 * 40, 200)


def test_counting_changes_no_gradient() -> None:
    def gradient(context: Any) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(6, 6, requires_grad=True)
        with context:
            y = F.gelu(x @ x).exp().sum()
        return torch.autograd.grad(y, x)[0]

    assert torch.equal(gradient(saving(bs.Meter())), gradient(saving()))
