"""The NVFP4 format on a GPU: no host reads, fresh draws, and what many draws come to."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import definitions_nvfp4
from backstash import kernels
from backstash.formats import NVFP4, Usage
from backstash.tensors import GroupedTensor
from host_reads import no_host_reads
from quantizer_cases import grouped_values, values
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu

OPTIONS = [
    (),
    ("row_scaled",),
    ("hadamard", "stochastic_rounding"),
    ("row_scaled", "hadamard", "stochastic_rounding", "four_over_six"),
    ("two_d",),
    ("two_d", "stochastic_rounding", "four_over_six"),
]
FORMATS = [dataclasses.replace(NVFP4, **dict.fromkeys(on, True)) for on in OPTIONS]
by_format = pytest.mark.parametrize("format", FORMATS, ids=map("-".join, OPTIONS))
RANDOM = dataclasses.replace(NVFP4, stochastic_rounding=True)


def to_gpu(x):
    if isinstance(x, GroupedTensor):
        return GroupedTensor(x.data.cuda(non_blocking=True), x.ends_G.cuda(non_blocking=True))
    return x.cuda(non_blocking=True)


@by_format
@pytest.mark.parametrize("grouped", [False, True], ids=["3-D", "groups"])
def test_every_combination_of_options_is_the_cpus(format, grouped):
    x = values((3, 11, 40), torch.bfloat16)
    if grouped:
        data, ends = grouped_values([17, 0, 33, 1], 40)
        x = GroupedTensor(data.bfloat16(), ends)
    wanted = format.quantize(x, Usage.BOTH)
    with no_host_reads():
        got = format.quantize(to_gpu(x), Usage.BOTH)
        got = got.data if grouped else got
        found = [got.dequantize(usage) for usage in (Usage.ROWWISE, Usage.COLUMNWISE)]
    wanted, rows = (wanted.data, 51) if grouped else (wanted, 33)
    for name, buffer in got.buffers.items():
        # Along rows, what is past the last group is unspecified.
        valid = rows if name in ("codes", "row_codes", "row_scales", "row_amax") else None
        assert_twin_bytes(buffer[:valid], wanted.buffers[name][:valid])
    for usage, values_MK in zip((Usage.ROWWISE, Usage.COLUMNWISE), found, strict=True):
        reading = wanted.dequantize(usage)
        assert_twin_bytes(values_MK.flatten(0, -2)[:rows], reading.flatten(0, -2)[:rows])


@pytest.mark.fresh_draws
@pytest.mark.parametrize("two_d", [False, True])
def test_draws_differ_from_call_to_call_and_from_replay_to_replay(two_d):
    format = dataclasses.replace(RANDOM, two_d=two_d)
    x = torch.rand(64, 96, device="cuda", dtype=torch.bfloat16)
    first, second = format.quantize(x, Usage.BOTH), format.quantize(x, Usage.BOTH)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = format.quantize(x, Usage.BOTH)
    drawn = [first, second]
    for _ in range(3):
        graph.replay()
        drawn.append(captured.clone())
    for name in first.buffers:
        if "codes" in name:
            for one, other in itertools.combinations(drawn, 2):
                assert not torch.equal(one.buffers[name], other.buffers[name])


@pytest.mark.parametrize("value", [0.1, 0.25, 0.6, 1.9, 2.2, 3.5, 4.25, 5.9, -0.3, -2.75, -5.0])
@pytest.mark.parametrize("direction", ["rows", "columns", "tiles"])
def test_every_draw_is_a_neighbour_and_the_mean_of_many_is_the_value(value, direction):
    x = torch.full((1024, 1024), value, device="cuda", dtype=torch.float32)
    x[::16, ::16] = 6.0  # with the largest magnitude below, a tile's scale is one
    if direction == "rows":
        x[:, ::16] = 6.0
    elif direction == "columns":
        x[::16] = 6.0
    amax, seed = torch.full((1,), 448.0 * 6.0, device="cuda"), torch.tensor([3, 4]).cuda()
    arguments = [None, seed] if direction != "columns" else [None, None, seed]
    codes, scales = getattr(kernels, f"quantize_nvfp4_{direction}")(x, amax, *arguments)
    assert scales.unique().tolist() == [0x38]
    size = len(x) if direction == "columns" else x.shape[1]
    read = getattr(kernels, f"dequantize_nvfp4_{direction}")
    drawn = read(codes, scales, amax, size, torch.float32)[x == value]
    assert len(drawn) > 100_000
    magnitudes = definitions_nvfp4.MAGNITUDES
    above = int(np.searchsorted(magnitudes, abs(value), side="right"))
    low, high = magnitudes[above - 1], magnitudes[above]
    assert drawn.abs().unique().tolist() == [low, high]
    assert (drawn.sign() * np.sign(value) >= 0).all()
    # Eight bits give the probability in steps of 1/256, rounded down.
    share = np.floor((abs(value) - low) / (high - low) * 256) / 256
    deviation = (high - low) * (share * (1 - share) / len(drawn)) ** 0.5
    assert abs(drawn.abs().double().mean().item() - low - share * (high - low)) < 5 * deviation
