"""Every row is the work of a program that knows its group, whatever the groups are."""

import pytest
import torch

from backstash import kernels
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu


def test_every_row_is_written_with_its_groups_number_and_the_tail_with_zero():
    for counts, tail in random_counts(300):
        number_G1 = torch.arange(1, len(counts) + 1.0)[:, None]
        ends = torch.tensor(counts).cumsum(0).int().cuda()
        x = torch.zeros(sum(counts) + tail, 1, device="cuda")
        got = kernels.add_group_bias(x, number_G1.cuda(), ends)
        wanted = number_G1.repeat_interleave(torch.tensor(counts), dim=0)
        assert torch.equal(got.cpu(), torch.cat([wanted, torch.zeros(tail, 1)]))


@pytest.mark.parametrize("ends", [[10, 50, 90], [40, 41], [2**31 - 1]], ids=str)
def test_ends_past_the_buffer_are_its_own(ends):
    # Rows around the buffer would be seen by their magnitude, and seen written.
    room = torch.full((80, 40), 1e6)
    room[20:60] = torch.randn(40, 40)
    there, ends = room.cuda(), torch.tensor(ends, dtype=torch.int32)
    x, cut = room[20:60], ends.clamp(0, 40)
    got = kernels.quantize_mx_columns(there[20:60], ends.cuda())
    wanted = kernels.quantize_mx_columns(x, cut)
    assert_twin_bytes(kernels.group_amax(there[20:60], ends.cuda()), kernels.group_amax(x, cut))
    assert torch.equal(got[0][: cut[-1]].cpu(), wanted[0][: cut[-1]])
    assert_twin_bytes(got[1], wanted[1])
    assert_twin_bytes(
        kernels.dequantize_mx_columns(*got, torch.float32, ends.cuda()),
        kernels.dequantize_mx_columns(*wanted, torch.float32, cut),
    )


@pytest.mark.parametrize("ends", [[40, 10, 40], [-5, 7, 40]], ids=str)
def test_ends_in_no_order_or_below_zero_address_nothing_outside_the_buffer(ends):
    x, ends = torch.ones(40, 3).cuda(), torch.tensor(ends, dtype=torch.int32).cuda()
    assert (kernels.group_amax(x, ends) <= 1).all()
    codes, exponents = kernels.quantize_mx_columns(x, ends)
    kernels.dequantize_mx_columns(codes, exponents, torch.float32, ends)
    torch.cuda.synchronize()
