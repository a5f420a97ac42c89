"""NVFP4 along rows and in tiles on a GPU against the reference on the CPU, byte for byte."""

import numpy as np
import pytest
import torch

import definitions_nvfp4
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

# A largest magnitude over all with which a block whose own is 6 has a scale of exactly one.
WHOLE = torch.tensor([448.0 * 6.0])
SEED = torch.tensor([2**62 + 5, -77])
BY_DIRECTION = {
    "rows": (kernels.quantize_nvfp4_rows, kernels.dequantize_nvfp4_rows),
    "tiles": (kernels.quantize_nvfp4_tiles, kernels.dequantize_nvfp4_tiles),
}
OPTIONS = {
    "plain": {},
    "four-over-six": {"four_over_six": True},
    "random": {"seed": SEED},
    "random-four-over-six": {"seed": SEED, "four_over_six": True},
}
by_direction = pytest.mark.parametrize("direction", BY_DIRECTION)
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
# Each combination is compiled: where others vary as well, these two stand for all.
BOTH_ENDS = ["plain", "random-four-over-six"]
by_most = pytest.mark.parametrize("options", [OPTIONS[k] for k in BOTH_ENDS], ids=BOTH_ENDS)


def on_gpu(value):
    return value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else value


def check(direction, x, amax, ends=None, seed=None, four_over_six=False):
    """Codes, scales and values; of a grouped matrix, those of rows that are in a group."""
    quantize, dequantize = BY_DIRECTION[direction]
    given = (x, amax, ends, seed)
    codes, scales = quantize(*given, four_over_six=four_over_six)
    with no_host_reads():
        got_codes, got_scales = quantize(*map(on_gpu, given), four_over_six=four_over_six)
        reading = x.shape[1], x.dtype, on_gpu(ends)
        got = dequantize(got_codes, got_scales, on_gpu(amax), *reading)
    rows = None if ends is None else int(ends[-1])
    of_rows = rows if direction == "rows" else None
    assert_twin_bytes(got_codes[:rows], codes[:rows])
    assert_twin_bytes(got_scales[:of_rows], scales[:of_rows])
    wanted = dequantize(codes, scales, amax, x.shape[1], x.dtype, ends)
    assert_twin_bytes(got[:rows], wanted[:rows])
    assert not got[len(x) if rows is None else rows :].any()


@by_direction
@by_shape
def test_codes_scales_and_values_are_the_references(shape, direction):
    x = values(shape).flatten(0, -2)
    check(direction, x, kernels.amax(x))


@by_direction
@by_most
@by_dtype
@pytest.mark.parametrize("columns", [65, 96])
def test_every_dtype_is_the_references(columns, dtype, options, direction):
    x = values((33, columns), dtype)
    check(direction, x, kernels.amax(x), **options)


@by_direction
@by_options
@by_special
def test_special_values_are_the_references(special, options, direction):
    x = special_matrix(special)
    for amax in (kernels.amax(x), torch.tensor([1e-42]), WHOLE):
        check(direction, x, amax, **options)


@by_direction
@by_options
@by_counts
def test_groups_are_the_references(counts, options, direction):
    x, ends = grouped_values(counts, 65)
    check(direction, x, kernels.group_amax(x, ends), ends, **options)


@by_most
@pytest.mark.parametrize("shape", [(33, 65), (305, 256)], ids=str)
def test_rows_with_a_magnitude_of_their_own_are_the_references(shape, options):
    x = values(shape)
    check("rows", x, kernels.row_amax(x), **options)
    ends = torch.tensor([shape[0] // 2, shape[0]], dtype=torch.int32)
    check("rows", x, kernels.row_amax(x), ends, **options)


@by_direction
def test_values_on_and_beside_every_boundary_are_the_references(direction):
    middle = definitions_nvfp4.MIDDLE.astype(np.float32)
    codes = definitions_nvfp4.MAGNITUDES.astype(np.float32)
    points = np.concatenate([middle, codes, [np.float32(6.5), np.float32(7)]])
    points = np.concatenate([np.nextafter(points, np.float32(0)), points, np.nextafter(points, 9)])
    x = torch.zeros(len(points), 16)
    x[:, 2] = torch.from_numpy(points)
    x[:, 3], x[:, 15] = -x[:, 2], 6.0
    check(direction, x, WHOLE)
    check(direction, x, WHOLE, seed=SEED)


def test_scales_on_and_beside_every_boundary_are_the_references():
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = ((e4m3[1:].double() + e4m3[:-1].double()) / 2).float()
    points = torch.cat([middle, e4m3, torch.tensor([448.1, 464.0, 1e30])])
    points = torch.cat([points, points.nextafter(points * 0), points.nextafter(points + 1e35)])
    x = torch.zeros(len(points), 16)
    x[:, 4] = points * 6  # with WHOLE, the factor over all is one
    check("rows", x, WHOLE)
    check("rows", x, WHOLE, four_over_six=True)


@by_direction
def test_every_bfloat16_has_the_references_code(direction):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)[torch.randperm(2**16)].view(256, 256)
    for amax in (kernels.amax(x), WHOLE, torch.tensor([1e30])):
        check(direction, x, amax)


@by_direction
def test_random_splits_are_the_references(direction):
    for counts, tail in random_counts(100):
        x, ends = grouped_values(counts, 65, tail)
        check(direction, x, kernels.group_amax(x, ends), ends)


@by_direction
def test_a_graph_replays_with_other_ends_and_seeds(direction):
    quantize, dequantize = BY_DIRECTION[direction]
    x, ends = grouped_values([128, 128], 96, 0)
    amax = kernels.group_amax(x, ends)
    x_gpu, ends_gpu, seed_gpu = x.cuda(), ends.cuda(), SEED.cuda()

    def cast():
        codes, scales = quantize(x_gpu, amax.cuda(), ends_gpu, seed_gpu)
        return codes, dequantize(codes, scales, amax.cuda(), 96, torch.bfloat16, ends_gpu)

    amax = amax.cuda()
    cast()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got_codes, got = cast()
    for new in ([0, 256], [31, 200], [256, 256], [0, 0], [1, 2]):
        ends, seed = torch.tensor(new, dtype=torch.int32), torch.tensor([new[0], 7 + new[1]])
        ends_gpu.copy_(ends)
        seed_gpu.copy_(seed)
        graph.replay()
        codes, scales = quantize(x, amax.cpu(), ends, seed)
        assert_twin_bytes(got_codes[: new[1]], codes[: new[1]])
        wanted = dequantize(codes, scales, amax.cpu(), 96, torch.bfloat16, ends)
        assert_twin_bytes(got[: new[1]], wanted[: new[1]])


@by_direction
def test_any_strides_give_the_same(direction):
    x = values((300, 520)).cuda()
    quantize, _ = BY_DIRECTION[direction]
    wanted = quantize(x[::2, ::2].contiguous(), WHOLE.cuda())
    for given in (x[::2, ::2], x[::2, ::2].T.contiguous().T):
        for got, expected in zip(quantize(given, WHOLE.cuda()), wanted, strict=True):
            assert_twin_bytes(got, expected)
