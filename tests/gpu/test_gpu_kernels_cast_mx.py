"""MXFP8 on a GPU against the reference on the CPU, byte for byte."""

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

BY_DIRECTION = {
    "rows": (kernels.quantize_mx_rows, kernels.dequantize_mx_rows),
    "columns": (kernels.quantize_mx_columns, kernels.dequantize_mx_columns),
    "tiles": (kernels.quantize_mx_tiles, kernels.dequantize_mx_tiles),
}
by_direction = pytest.mark.parametrize("direction", BY_DIRECTION)
by_grouped_direction = pytest.mark.parametrize("direction", ["columns", "tiles"])


def check(x, dtype, direction, ends=None, rows=None):
    """Codes, exponents and values; of a grouped matrix the codes of its first ``rows`` rows."""
    quantize, dequantize = BY_DIRECTION[direction]
    given = () if ends is None else (ends,)
    codes, exponents = quantize(x, *given)
    with no_host_reads():
        on_gpu = tuple(value.cuda(non_blocking=True) for value in given)
        got_codes, got_exponents = quantize(x.cuda(non_blocking=True), *on_gpu)
        got = dequantize(got_codes, got_exponents, dtype, *on_gpu)
    assert_twin_bytes(got_codes[:rows], codes[:rows])
    assert_twin_bytes(got_exponents, exponents)
    assert_twin_bytes(got, dequantize(codes, exponents, dtype, *given))


@by_direction
@by_dtype
@by_shape
def test_codes_exponents_and_values_are_the_references(shape, dtype, direction):
    check(values(shape, dtype).flatten(0, -2), dtype, direction)


@by_direction
@by_special
def test_special_values_are_the_references(special, direction):
    check(special_matrix(special), torch.float32, direction)


@by_grouped_direction
@by_dtype
@by_counts
def test_groups_are_the_references(counts, dtype, direction):
    x, ends = grouped_values(counts, 72)
    check(x.to(dtype), dtype, direction, ends, sum(counts))


@by_direction
def test_every_bfloat16_has_the_references_code(direction):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)[torch.randperm(2**16)].view(256, 256)
    check(x, torch.bfloat16, direction)


@pytest.mark.parametrize("grouped", [False, True], ids=["matrix", "groups"])
@pytest.mark.parametrize("columns", [7, 64, 300, 2048])
def test_one_pass_gives_what_two_give(columns, grouped):
    x, ends = grouped_values([33, 0, 64, 1, 95], columns)
    x, rows = x.cuda(), 193
    ends = ends.cuda() if grouped else None
    got_rows, got_columns = kernels.quantize_mx_both(x, ends)
    for got, wanted in zip(got_rows, kernels.quantize_mx_rows(x), strict=True):
        assert_twin_bytes(got[:rows], wanted[:rows])
    codes, exponents = kernels.quantize_mx_columns(x, ends)
    assert_twin_bytes(got_columns[0][:rows], codes[:rows])
    assert_twin_bytes(got_columns[1], exponents)


def test_a_thousand_random_splits_are_the_references():
    for counts, tail in random_counts(1000):
        x, ends = grouped_values(counts, 33, tail)
        check(x, torch.float32, "columns", ends, sum(counts))


def test_a_graph_replays_with_other_ends():
    x, _ = grouped_values([256], 96, 0)
    x, ends = x.cuda(), torch.tensor([128, 256], dtype=torch.int32, device="cuda")
    kernels.dequantize_mx_columns(*kernels.quantize_mx_columns(x, ends), torch.bfloat16, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (row_codes, _), (codes, exponents) = kernels.quantize_mx_both(x, ends)
        got = kernels.dequantize_mx_columns(codes, exponents, torch.bfloat16, ends)
    for new in ([0, 256], [31, 200], [256, 256], [0, 0], [1, 2]):
        ends.copy_(torch.tensor(new))
        graph.replay()
        wanted_codes, wanted_exponents = kernels.quantize_mx_columns(x.cpu(), ends.cpu())
        assert_twin_bytes(codes[: new[1]], wanted_codes[: new[1]])
        assert_twin_bytes(row_codes[: new[1]], kernels.quantize_mx_rows(x.cpu())[0][: new[1]])
        assert_twin_bytes(exponents, wanted_exponents)
        wanted = (wanted_codes, wanted_exponents, torch.bfloat16, ends.cpu())
        assert_twin_bytes(got, kernels.dequantize_mx_columns(*wanted))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, importing itself
def test_any_strides_and_a_compiled_call_give_the_same():
    x = values((300, 520)).cuda()
    wanted = kernels.quantize_mx_rows(x[::2, ::2].contiguous())
    compiled = torch.compile(kernels.quantize_mx_rows, fullgraph=True)
    for quantize in (kernels.quantize_mx_rows, compiled):
        for got, expected in zip(quantize(x[::2, ::2]), wanted, strict=True):
            assert_twin_bytes(got, expected)
