"""Quantized tensors on a GPU: the bytes of the CPU, pinned memory, parts, and graphs."""

import dataclasses

import pytest
import torch

from backstash.errors import LayoutError
from backstash.formats import NVFP4, Usage
from backstash.tensors import GroupedTensor
from format_cases import FORMATS, assert_identical, by_format, by_usage, parts, quantized
from host_reads import no_host_reads
from quantizer_cases import values

pytestmark = pytest.mark.gpu

COUNTS = [[31, 0, 33, 64], [128, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 122], [0, 100, 28, 0]]


def grouped(format, x, ends, usage):
    scale = torch.full((len(ends),), 0.7, device=x.device) if format.stateful else None
    return format.quantize(GroupedTensor(x, ends), usage, scale=scale)


@by_format
@by_usage
@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (256, 272), (3, 50, 40), (0, 64)], ids=str)
def test_a_matrix_has_the_bytes_of_the_cpu(format, usage, shape):
    x = values(shape, torch.bfloat16)
    scale = torch.tensor([0.7]) if format.stateful else None
    wanted = format.quantize(x, usage, scale=scale)
    q = format.quantize(x.cuda(), usage, scale=None if scale is None else scale.cuda())
    assert_identical(q.cpu(), wanted)
    for side in usage:
        assert torch.equal(q.dequantize(side).cpu(), wanted.dequantize(side))
    assert_identical(q.cpu().cuda().cpu(), wanted)


@by_format
@by_usage
def test_groups_have_the_bytes_of_the_cpu(format, usage):
    x = values((130, 65), torch.bfloat16)
    for counts in COUNTS:
        ends = torch.tensor(counts).cumsum(0)
        wanted = grouped(format, x, ends, usage)
        on_gpu = x.cuda(), ends.cuda()
        with no_host_reads():
            q = grouped(format, *on_gpu, usage)
            read = [q.data.dequantize(side) for side in usage]
            valid = q.valid_bytes()
        for name, count in wanted.valid_bytes().items():
            assert int(valid[name]) == int(count)
            got, own = (
                t.data.buffers[name].cpu().contiguous().view(torch.uint8).flatten()
                for t in (q, wanted)
            )
            assert torch.equal(got[: int(count)], own[: int(count)])
        rows = sum(counts)
        for side, got in zip(usage, read, strict=True):
            assert torch.equal(got[:rows].cpu(), wanted.data.dequantize(side)[:rows])


@by_format
@by_usage
def test_a_graph_of_groups_follows_their_sizes(format, usage):
    x, ends = values((130, 65), torch.bfloat16).cuda(), torch.tensor(COUNTS[0]).cumsum(0).cuda()

    def step():
        q = grouped(format, x, ends, usage)
        return q.data.buffers, q.valid_bytes(), [q.data.dequantize(side) for side in usage]

    step()  # what is compiled is compiled before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers, valid, read = step()
    for counts in COUNTS:
        ends.copy_(torch.tensor(counts).cumsum(0))
        x.copy_(values((130, 65), torch.bfloat16))
        graph.replay()
        wanted, wanted_valid, wanted_read = step()
        rows = sum(counts)
        for name, count in wanted_valid.items():
            assert torch.equal(valid[name], count)
            got, own = (b[name].contiguous().view(torch.uint8).flatten() for b in (buffers, wanted))
            assert torch.equal(got[: int(count)], own[: int(count)])
        for got, own in zip(read, wanted_read, strict=True):
            assert torch.equal(got[:rows], own[:rows])


@pytest.mark.fresh_draws
@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.COLUMNWISE], ids=lambda u: u.name)
def test_each_replay_draws_anew(usage):
    format = dataclasses.replace(NVFP4, stochastic_rounding=True)
    x = torch.rand(64, 64, device="cuda")
    format.quantize(x, usage)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = format.quantize(x, usage).dequantize()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(read.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@by_format
def test_a_pinned_tensor_travels_without_waiting(format):
    wanted = quantized(format, ends=[31, 31, 33])
    pinned = wanted.pin_memory()
    assert pinned.is_pinned()
    assert not wanted.is_pinned()
    assert all(buffer.is_pinned() for buffer in parts(pinned).values())
    assert_identical(pinned, wanted)
    with no_host_reads():
        there = pinned.to("cuda", non_blocking=True)
        back = torch.empty_like(pinned, device="cpu")
    assert_identical(there.cpu(), wanted)
    assert back.device.type == "cpu"


@by_format
def test_arithmetic_and_copies_between_devices_are_those_of_the_cpu(format):
    q, x = quantized(format, shape=(64, 48)), torch.rand(64, 48)
    on_gpu = q.cuda()
    for change in (lambda t, x: t.mul_(0.5), lambda t, x: t.add_(x, alpha=-0.1)):
        change(q, x)
        change(on_gpu, x.cuda())
        assert_identical(on_gpu.cpu(), q)
    assert_identical(torch.empty_like(on_gpu).copy_(q).cpu(), q)
    assert_identical(torch.empty_like(q).copy_(on_gpu), q)


@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.BOTH], ids=lambda u: u.name)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_rows_are_read_and_written_where_they_lie(format, usage):
    q = quantized(format, usage, shape=(256, 48)).cuda()
    values_before = q.dequantize()
    try:
        one = q[128:256]
    except LayoutError:
        assert format.name in ("nvfp4", "hybrid")
        return
    with no_host_reads():
        read = one.dequantize()
    assert torch.equal(read, values_before[128:])
    if not one.shared:
        one.zero_()
        assert not q.dequantize()[128:].any()
        assert torch.equal(q.dequantize()[:128], values_before[:128])


@by_format
def test_rows_at_any_address_are_read_and_written(format):
    """Rows of 37 bytes begin where no wide load does."""
    q = quantized(format, Usage.ROWWISE, shape=(260, 37)).cuda()
    for rows in (slice(3, 133), slice(131, 132), slice(0, 260)):
        try:
            one = q[rows]
        except LayoutError:
            assert format.serves_both
            continue
        values_before = q.dequantize()
        assert torch.equal(one.dequantize(), values_before[rows])
        if not one.shared:
            x = torch.randn(one.shape)
            wanted = one.cpu().clone().copy_(x)
            one.copy_(x.cuda())
            assert_identical(one.cpu(), wanted)
            assert torch.equal(q.dequantize()[: rows.start], values_before[: rows.start])
            assert torch.equal(q.dequantize()[rows.stop :], values_before[rows.stop :])


@by_format
def test_a_compiled_graph_has_the_bytes_of_the_eager_one(format):
    x = torch.randn(33, 40, device="cuda")
    run = torch.compile(lambda x: format.quantize(x, Usage.BOTH), fullgraph=True, backend="eager")
    assert torch.equal(run(x), format.quantize(x, Usage.BOTH))
