"""Every row is the work of a program that knows its group, whatever the groups are."""

import pytest
import torch

from backstash import kernels
from twin_cases import random_counts

pytestmark = pytest.mark.gpu


def test_every_row_is_written_with_its_groups_number_and_the_tail_with_zero():
    for counts, tail in random_counts(300):
        number_G1 = torch.arange(1, len(counts) + 1.0)[:, None]
        ends = torch.tensor(counts).cumsum(0).int().cuda()
        x = torch.zeros(sum(counts) + tail, 1, device="cuda")
        got = kernels.add_group_bias(x, number_G1.cuda(), ends)
        wanted = number_G1.repeat_interleave(torch.tensor(counts), dim=0)
        assert torch.equal(got.cpu(), torch.cat([wanted, torch.zeros(tail, 1)]))


def test_ends_past_the_buffer_or_below_zero_address_nothing_outside_it():
    x = torch.ones(40, 3, device="cuda")
    for ends in ([10, 50, 90], [-5, 7, 40], [40, 10, 40]):
        ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
        assert kernels.group_amax(x, ends).isfinite().all()
        codes, exponents = kernels.quantize_mx_columns(x, ends)
        kernels.dequantize_mx_columns(codes, exponents, torch.float32, ends)
    torch.cuda.synchronize()
