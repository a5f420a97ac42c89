"""Where tiles of products on codes lie: random groups, tails, and graphs with other groups."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from quantized_mm_cases import (
    COLUMNS,
    KINDS,
    ROWS,
    TILES,
    codes_of,
    multiplied_on_gpu,
    on_gpu,
    products,
    signs,
)
from twin_cases import random_counts

pytestmark = pytest.mark.gpu
by_format = pytest.mark.parametrize("kind", ["mxfp8", "blocks"])


@by_format
def test_twenty_random_splits_leave_no_byte_unwritten_and_read_no_tail(kind):
    for counts, _ in random_counts(20):
        counts = [3 * count for count in counts]
        for product in products(KINDS[kind], (counts, (48, 80)), "tiles", signs):
            got = multiplied_on_gpu(product, torch.float32)
            assert torch.equal(got.cpu().double(), product.exact)


@by_format
def test_a_captured_graph_multiplies_the_groups_of_its_replay(kind):
    rows, N, K = 200, 64, 96
    first, second = torch.tensor([200, 200]).int(), torch.tensor([33, 150]).int()
    ends = first.cuda()
    x, dy, w = (signs(*shape).cuda() for shape in ((rows, K), (rows, N), (2 * N, K)))
    weight_ends = (N * torch.arange(1, 3)).int().cuda()
    w_rows = codes_of(KINDS[kind], TILES, w, weight_ends)

    def multiply():
        x_rows = codes_of(KINDS[kind], ROWS, x, ends)
        dy_rows = codes_of(KINDS[kind], ROWS, dy, ends)
        x_columns = codes_of(KINDS[kind], COLUMNS, x, ends)
        dy_columns = codes_of(KINDS[kind], COLUMNS, dy, ends)
        return (
            kernels.quantized_mm(x_rows, w_rows, ends, torch.float32),
            kernels.quantized_mm_dx(dy_rows, w_rows, ends, torch.float32),
            kernels.quantized_mm_dw(dy_columns, x_columns, ends, torch.float32),
        )

    multiply()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_host_reads():
        captured = multiply()
    for value in captured:
        value.fill_(torch.nan)
    ends.copy_(second)
    graph.replay()
    w_GNK = w.view(2, N, K)
    wanted = (
        kernels.grouped_mm(x.cpu(), w_GNK.cpu(), second),
        kernels.grouped_mm_dx(dy.cpu(), w_GNK.cpu(), second),
        kernels.grouped_mm_dw(dy.cpu(), x.cpu(), second),
    )
    for got, want in zip(captured, wanted, strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("kind", ["mxfp8", "blocks", "nvfp4-rotated"])
def test_the_same_product_twice_is_the_same_to_the_bit(kind):
    for product in products(KINDS[kind], ([300, 0, 41], (40, 96)), "tiles"):
        first = multiplied_on_gpu(product, torch.float32)
        assert torch.equal(first, multiplied_on_gpu(product, torch.float32))


def test_operands_of_two_formats_multiply_as_the_reference_does():
    x, w = signs(40, 96), signs(33, 96)
    mixed = codes_of(KINDS["mxfp8"], ROWS, x, None), codes_of(KINDS["blocks"], ROWS, w, None)
    got = kernels.quantized_mm(on_gpu(mixed[0]), on_gpu(mixed[1]), None, torch.bfloat16)
    assert torch.equal(got.cpu(), (x @ w.t()).bfloat16())


def test_rows_that_one_side_alone_mixed_are_unmixed():
    dy, x = signs(40, 32), signs(40, 48)
    rotated = codes_of(KINDS["nvfp4-rotated"], COLUMNS, dy, None)
    plain = codes_of(KINDS["nvfp4"], COLUMNS, x, None)
    got = kernels.quantized_mm_dw(on_gpu(rotated), on_gpu(plain), None, torch.float32)
    wanted = kernels.quantized_mm_dw(rotated, plain, None, torch.float32)
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(got.cpu(), wanted, rtol=8 * eps, atol=16 * len(dy) * eps)
