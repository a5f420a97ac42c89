"""Rows gathered and added up on a GPU are those of the reference, to the last bit."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from quantizer_cases import by_dtype, values
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu


@by_dtype
@pytest.mark.parametrize("columns", [1, 63, 300, 2048])
@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_rows_are_the_references(tokens, columns, dtype):
    source_R, slots_TK, _ = kernels.sort_by_expert(torch.randint(0, 5, (tokens, 3)), 5)
    x = values((tokens, columns), dtype)
    rows = kernels.permute(x, source_R)
    with no_host_reads():
        on_gpu = [v.cuda(non_blocking=True) for v in (x, source_R, rows, slots_TK)]
        got_rows = kernels.permute(on_gpu[0], on_gpu[1])
        got_sums = kernels.unpermute(on_gpu[2], on_gpu[3])
    assert_twin_bytes(got_rows, rows)
    assert_twin_bytes(got_sums, kernels.unpermute(rows, slots_TK))
    room = got_sums.new_full((tokens, columns + 7), float("nan"))
    kernels.unpermute(on_gpu[2], on_gpu[3], out=room[:, 3:-4])
    assert torch.equal(room[:, 3:-4], got_sums)
    assert room[:, :3].isnan().all()
    assert room[:, -4:].isnan().all()


def test_a_gradient_that_is_one_row_repeated_is_gathered():
    x = values((1, 40)).expand(9, 40)
    source = torch.randint(0, 9, (20,))
    got = kernels.permute(x.cuda()[:1].expand(9, 40), source.cuda())
    assert_twin_bytes(got, kernels.permute(x, source))
