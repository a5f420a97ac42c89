"""NVFP4 down columns on a GPU against the reference on the CPU, byte for byte."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from quantizer_cases import (
    by_counts,
    by_dtype,
    by_shape,
    by_special,
    grouped_values,
    special_matrix,
    values,
)
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu

SEED = torch.tensor([2**62 + 5, -77])
R = kernels.hadamard_matrix(torch.device("cpu"))
OPTIONS = {
    "plain": {},
    "four-over-six": {"four_over_six": True},
    "random": {"seed": SEED},
    "rotated": {"rotation": R},
    "rotated-random": {"rotation": R, "seed": SEED},
    "everything": {"rotation": R, "seed": SEED, "four_over_six": True},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
# Each combination is compiled: where others vary as well, these two stand for all.
BOTH_ENDS = ["plain", "everything"]
by_most = pytest.mark.parametrize("options", [OPTIONS[k] for k in BOTH_ENDS], ids=BOTH_ENDS)


def on_gpu(value):
    return value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else value


def magnitudes(x, ends, rotation, per_column):
    """The largest magnitudes that the casts are given, by the reference."""
    if rotation is not None:
        amax = kernels.rotated_column_amax(x, rotation, ends)
        return amax if per_column else kernels.row_amax(amax).flatten()
    if per_column:
        return kernels.column_amax(x, ends)
    return kernels.amax(x) if ends is None else kernels.group_amax(x, ends)


def check(x, ends=None, rotation=None, seed=None, per_column=False, four_over_six=False):
    """Every byte of codes and scales, and all values."""
    amax = magnitudes(x, ends, rotation, per_column)
    given = (x, amax, ends, rotation, seed)
    codes, scales = kernels.quantize_nvfp4_columns(*given, four_over_six=four_over_six)
    with no_host_reads():
        on_device = tuple(map(on_gpu, given))
        if rotation is not None:
            got_amax = kernels.rotated_column_amax(on_device[0], on_device[3], on_device[2])
        got_codes, got_scales = kernels.quantize_nvfp4_columns(
            *on_device, four_over_six=four_over_six
        )
        got = kernels.dequantize_nvfp4_columns(
            got_codes, got_scales, on_device[1], len(x), x.dtype, *on_device[2:4]
        )
    if rotation is not None:
        assert_twin_bytes(got_amax, kernels.rotated_column_amax(x, rotation, ends))
    assert_twin_bytes(got_codes, codes)
    assert_twin_bytes(got_scales, scales)
    wanted = kernels.dequantize_nvfp4_columns(codes, scales, amax, len(x), x.dtype, ends, rotation)
    assert_twin_bytes(got, wanted)


@pytest.mark.parametrize("rotation", [None, R], ids=["plain", "rotated"])
@by_shape
def test_codes_scales_and_values_are_the_references(shape, rotation):
    check(values(shape).flatten(0, -2), rotation=rotation)


@by_most
@by_dtype
@pytest.mark.parametrize("columns", [65, 96])
def test_every_dtype_is_the_references(columns, dtype, options):
    check(values((33, columns), dtype), **options)


@by_options
@by_special
def test_special_values_are_the_references(special, options):
    check(special_matrix(special), **options)


@by_options
@by_counts
def test_groups_are_the_references_and_what_is_past_them_is_zero(counts, options):
    x, ends = grouped_values(counts, 65)
    check(x, ends, **options)


@by_most
@by_counts
def test_groups_with_magnitudes_of_their_columns_are_the_references(counts, options):
    x, ends = grouped_values(counts, 65)
    check(x, ends, per_column=True, **options)


@pytest.mark.parametrize("rotation", [None, R], ids=["plain", "rotated"])
def test_every_bfloat16_has_the_references_code(rotation):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)[torch.randperm(2**16)].view(256, 256)
    check(x, rotation=rotation)
    check(x.nan_to_num(0, 1, -1), rotation=rotation)


@pytest.mark.parametrize("rotation", [None, R], ids=["plain", "rotated"])
def test_random_splits_are_the_references(rotation):
    for counts, tail in random_counts(100):
        x, ends = grouped_values(counts, 65, tail)
        check(x, ends, rotation)


@pytest.mark.parametrize("rotation", [None, R], ids=["plain", "rotated"])
def test_a_graph_replays_with_other_ends_and_seeds(rotation):
    x, ends = grouped_values([128, 128], 96, 0)
    x_gpu, ends_gpu, seed_gpu = x.cuda(), ends.cuda(), SEED.cuda()
    amax_gpu, rotation_gpu = kernels.group_amax(x, ends).cuda(), on_gpu(rotation)

    def cast():
        given = (x_gpu, amax_gpu, ends_gpu, rotation_gpu, seed_gpu)
        codes, scales = kernels.quantize_nvfp4_columns(*given)
        read = (amax_gpu, 256, torch.bfloat16, ends_gpu, rotation_gpu)
        return codes, scales, kernels.dequantize_nvfp4_columns(codes, scales, *read)

    cast()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cast()
    amax = amax_gpu.cpu()
    for new in ([0, 256], [31, 200], [256, 256], [0, 0], [1, 2]):
        ends, seed = torch.tensor(new, dtype=torch.int32), torch.tensor([new[0], 7 + new[1]])
        ends_gpu.copy_(ends)
        seed_gpu.copy_(seed)
        graph.replay()
        codes, scales = kernels.quantize_nvfp4_columns(x, amax, ends, rotation, seed)
        read = (amax, 256, torch.bfloat16, ends, rotation)
        values_MK = kernels.dequantize_nvfp4_columns(codes, scales, *read)
        for got, wanted in zip(found, (codes, scales, values_MK), strict=True):
            assert_twin_bytes(got, wanted)


@pytest.mark.parametrize("rotation", [None, R], ids=["plain", "rotated"])
def test_any_strides_give_the_same(rotation):
    x, amax = values((300, 520)).cuda(), torch.ones(1, device="cuda")
    given = (amax, None, on_gpu(rotation))
    wanted = kernels.quantize_nvfp4_columns(x[::2, ::2].contiguous(), *given)
    for strided in (x[::2, ::2], x[::2, ::2].T.contiguous().T):
        found = kernels.quantize_nvfp4_columns(strided, *given)
        for got, expected in zip(found, wanted, strict=True):
            assert_twin_bytes(got, expected)
