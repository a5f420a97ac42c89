"""Blocks of 128 of bfloat16 pairs on a GPU against the reference on the CPU, byte for byte.

Columns are a multiple of 32, which is what the kernel of pairs is for.
"""

import random

import pytest
import torch

from backstash import kernels
from backstash.kernels.reference.into import Into
from quantizer_cases import by_special, grouped_values, special_matrix, values
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
by_columns = pytest.mark.parametrize("columns", [32, 96, 544, 1056])
by_code = pytest.mark.parametrize("code", CODES, ids=["e4m3", "e5m2"])


def check(x, ends=None, rows=None, code=torch.float8_e4m3fn, **options):
    """Columns alone and both directions; of a grouped matrix the codes of its first ``rows``."""
    given = () if ends is None else (ends,)
    on_gpu = tuple(value.cuda() for value in given)
    codes, scale_inv = kernels.quantize_block_columns(x, code, *given, **options)
    got_codes, got_scale_inv = kernels.quantize_block_columns(x.cuda(), code, *on_gpu, **options)
    assert_twin_bytes(got_codes[:rows], codes[:rows])
    assert_twin_bytes(got_scale_inv, scale_inv)
    wanted = kernels.quantize_block_rows(x, code, **options)
    got_rows, got_columns = kernels.quantize_block_both(x.cuda(), code, *on_gpu, **options)
    assert_twin_bytes(got_columns[0][:rows], codes[:rows])
    assert_twin_bytes(got_columns[1], scale_inv)
    for got, want in zip(got_rows, wanted, strict=True):
        assert_twin_bytes(got[:rows], want[:rows])


@by_columns
@by_code
def test_strips_of_every_height_are_the_references(code, columns):
    counts = [128, 0, 1, 32, 33, 64, 65, 127, 129, 0, 300]
    x, ends = grouped_values(counts, columns)
    check(x.bfloat16(), ends, sum(counts), code)


@by_columns
@pytest.mark.parametrize("rows", [1, 33, 128, 200])
def test_a_matrix_is_the_references(rows, columns):
    check(values((rows, columns), torch.bfloat16))


@by_code
@by_special
def test_special_values_are_the_references(special, code):
    for shape in ((140, 160), (50, 544)):
        x = special_matrix(special, shape).bfloat16()
        check(x, code=code)
        check(x, code=code, epsilon=1e-3)


@by_code
def test_every_bfloat16_is_the_references(code):
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    check(every.view(2048, 32), code=code)
    shuffled = every[torch.randperm(2**16)].view(512, 128)
    check(shuffled, torch.tensor([31, 95, 95, 300, 512], dtype=torch.int32), code=code)


def test_a_hundred_random_splits_are_the_references():
    for _ in range(100):
        counts = [random.choice([0, random.randint(0, 260)]) for _ in range(random.randint(1, 20))]
        x, ends = grouped_values(counts, 160, random.choice([0, 1, 200]))
        check(x.bfloat16(), ends, sum(counts))


def test_rows_may_lie_apart_and_buffers_may_be_given():
    wide = values((300, 256), torch.bfloat16).cuda()
    x = wide[:, 64:224]
    buffers = kernels.quantize_block_both(x.contiguous(), CODES[0])
    noop = torch.zeros(1, dtype=torch.int32, device="cuda")
    filled = tuple(torch.empty_like(buffer) for pair in buffers for buffer in pair)
    got = kernels.quantize_block_both(x, CODES[0], into=Into(filled, noop))
    for pair, wanted in zip(got, buffers, strict=True):
        for one, other in zip(pair, wanted, strict=True):
            assert_twin_bytes(one, other)
