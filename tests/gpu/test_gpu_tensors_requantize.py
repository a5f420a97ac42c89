"""A captured graph that quantizes a weight again leaves it alone where the flag is set."""

import pytest
import torch

from format_cases import by_format, by_grouping, by_usage, parts, quantized
from host_reads import no_host_reads
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu


@by_format
@by_usage
@by_grouping
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_the_flag_is_read_at_each_replay(format, usage, ends, dtype):
    on_cpu = quantized(format, usage, ends)
    q = on_cpu.cuda()
    values, noop = torch.randn(q.shape, device="cuda"), torch.ones(1, device="cuda", dtype=dtype)
    q.requantize_(values, noop=noop)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.requantize_(values, noop=noop)
    for flag in (1, 0, 1, 1, 0):
        values.copy_(torch.randn(q.shape))
        with no_host_reads():
            noop.fill_(flag)
            graph.replay()
        if not flag:
            on_cpu.requantize_(values.cpu())
        for name, buffer in parts(on_cpu).items():
            assert_twin_bytes(parts(q)[name], buffer)
