"""NVFP4 of bfloat16 pairs on a GPU against the reference, byte for byte."""

import pytest
import torch

from backstash import kernels
from backstash.kernels.reference import nvfp4
from quantizer_cases import by_counts, by_special, grouped_values, special_matrix
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu

R = kernels.hadamard_matrix(torch.device("cpu"))
SEED = torch.tensor([2**62 + 5, -77])
by_seed = pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "random"])
# A largest magnitude over all with which a block whose own is 6 has a scale of exactly one.
WHOLE = torch.tensor([448.0 * 6.0])


def on_gpu(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


def check(name, *given):
    """Codes and scales, of groups along rows only those of rows that are in a group."""
    wanted = getattr(nvfp4, f"quantize_nvfp4_{name}")(*given)
    found = getattr(kernels, f"quantize_nvfp4_{name}")(*map(on_gpu, given))
    ends = given[2] if len(given) > 2 else None
    rows = None if ends is None or name == "columns" else int(ends[-1])
    for part, (got, expected) in enumerate(zip(found, wanted, strict=True)):
        last = None if name == "tiles" and part else rows
        assert_twin_bytes(got[:last], expected[:last])


def check_all(x, amax, ends=None, seed=None):
    """Every direction, with and without a rotation."""
    check("rows", x, amax, ends, seed)
    check("tiles", x, amax, ends, seed)
    check("columns", x, amax, ends, None, seed)
    of_columns = kernels.rotated_column_amax(x, R, ends)
    check("columns", x, of_columns, ends, R, seed)
    check("columns", x, kernels.row_amax(of_columns).flatten(), ends, R, seed)


@by_seed
@pytest.mark.parametrize("columns", [2, 34, 96, 272])
def test_matrices_are_the_references(columns, seed):
    for rows in (1, 33, 305):
        x = torch.randn(rows, columns, dtype=torch.bfloat16)
        check_all(x, kernels.amax(x), None, seed)


@by_seed
@pytest.mark.parametrize("columns", [66, 96])
@by_counts
def test_groups_are_the_references(counts, columns, seed):
    x, ends = grouped_values(counts, columns)
    x = x.bfloat16()
    check_all(x, kernels.group_amax(x, ends), ends, seed)


@by_seed
@by_special
def test_special_values_are_the_references(special, seed):
    x = special_matrix(special, (33, 66)).bfloat16()
    x = torch.cat([x, -x])
    for amax in (kernels.amax(x), torch.tensor([1e-42]), torch.tensor([3.4e38]), WHOLE):
        check_all(x, amax, None, seed)


@pytest.mark.parametrize("columns", [66, 80])
def test_random_splits_are_the_references(columns):
    for counts, tail in random_counts(100):
        x, ends = grouped_values(counts, columns, tail)
        x = x.bfloat16()
        check_all(x, kernels.group_amax(x, ends), ends)


@by_seed
def test_every_bfloat16_has_the_references_code(seed):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)[torch.randperm(2**16)].view(256, 256)
    for amax in (kernels.amax(x), WHOLE, torch.tensor([1e30]), torch.tensor([1e-30])):
        check_all(x, amax, None, seed)
        check_all(x.nan_to_num(0, 1, -1), amax, None, seed)


def test_every_value_beside_every_largest_one_is_the_references():
    # For each largest value of a block, all that are up to 64 times smaller, of both signs.
    largest_M = torch.arange(0x3F80, 0x4080, device="cuda", dtype=torch.int16)
    below_N = torch.arange(6 * 128, device="cuda", dtype=torch.int16)
    x_MNB = torch.empty(256, 2 * 52, 16, device="cuda", dtype=torch.int16)
    x_MNB[:] = largest_M[:, None, None]
    values_MN = largest_M[:, None] - below_N
    filled = torch.cat([values_MN, values_MN[:, :12]], dim=1).view(256, 52, 15)
    x_MNB[:, :52, :15], x_MNB[:, 52:, :15] = (
        filled,
        filled + torch.tensor(-(2**15), dtype=torch.int16),
    )
    x_MK = x_MNB.view(torch.bfloat16).flatten(1)
    for amax in [*torch.linspace(2.0, 4.0, 17).tolist(), 300.0, 5000.0]:
        amax = torch.tensor([amax], device="cuda")
        for got, wanted in (
            (kernels.quantize_nvfp4_rows(x_MK, amax), nvfp4.quantize_nvfp4_rows(x_MK, amax)),
            (
                kernels.quantize_nvfp4_columns(x_MK.T.contiguous(), amax),
                nvfp4.quantize_nvfp4_columns(x_MK.T.contiguous(), amax),
            ),
        ):
            for one, other in zip(got, wanted, strict=True):
                assert_twin_bytes(one, other)


def test_odd_strides_and_places_give_the_same():
    wide = torch.randn(64, 99, device="cuda", dtype=torch.bfloat16)
    amax = torch.ones(1, device="cuda")
    for x in (wide[:, 1:97], wide[:, :96], wide.flatten()[1 : 1 + 32 * 98].view(32, 98)):
        for name in ("rows", "columns", "tiles"):
            quantize = getattr(kernels, f"quantize_nvfp4_{name}")
            for got, wanted in zip(quantize(x, amax), quantize(x.clone(), amax), strict=True):
                assert_twin_bytes(got, wanted)
