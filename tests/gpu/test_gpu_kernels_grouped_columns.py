"""The weight gradient of a grouped product on a Hopper GPU, tile by tile."""

import importlib

import pytest
import torch

from grouped_cases import assert_rounded, by_half, by_split, defined, operands
from host_reads import no_host_reads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="kernels for Hopper",
    ),
]
NAN = float("nan")


def multiply_columns(dy, x, ends):
    kernels = importlib.import_module("backstash.kernels.grouped_columns")
    with no_host_reads():
        return kernels.multiply_columns(dy, x, ends)


@by_half
@by_split
@pytest.mark.parametrize(("k", "n"), [(256, 128), (264, 72), (8, 136)], ids=str)
def test_each_group_has_the_gradient_of_its_definition(counts, k, n, dtype):
    x, dy, w, ends = operands(counts, k, n, dtype)
    dw = multiply_columns(dy, x, ends)
    assert_rounded(dw, defined(counts, x, dy, w)[2], max(counts))
    assert not dw[torch.tensor(counts) == 0].any()


def test_nan_in_one_group_and_in_the_tail_stays_there():
    counts = [30, 100, 50]
    x, dy, _, ends = operands(counts, 72, 264, torch.bfloat16)
    wanted = multiply_columns(dy, x, ends)
    x[:30], dy[130:180] = NAN, NAN
    got = multiply_columns(dy, x, ends)
    assert torch.equal(got[1], wanted[1])
    assert got[0].isnan().all()
    assert got[2].isnan().all()


def test_many_groups_of_all_sizes_are_summed_the_same_each_time():
    torch.manual_seed(1)
    counts = [*torch.randint(0, 400, (40,)).tolist(), 6000, 0, 1]
    x, dy, w, ends = operands(counts, 512, 392, torch.bfloat16)
    first = multiply_columns(dy, x, ends)
    assert_rounded(first, defined(counts, x, dy, w)[2], max(counts))
    for _ in range(5):
        assert torch.equal(multiply_columns(dy, x, ends), first)
