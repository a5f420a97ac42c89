"""The optimizers of torch step quantized parameters, each in every way that it knows."""

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import backstash as bs
from backstash.errors import UnsupportedOpError
from backstash.formats import HIGH_PRECISION, MXFP8
from format_cases import by_format, quantized
from optimizer_cases import OPTIMIZERS, PAIRS, SHAPE, WAYS, by_pair, check_one_step, has_way, steps


@by_format
@by_pair
def test_an_optimizer_steps_a_quantized_parameter(format, name, way):
    check_one_step(name, way, format)


@by_format
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_ways_step_alike(format, name):
    first = torch.nn.Parameter(quantized(format, dtype=torch.float64))
    plain = torch.nn.Parameter(first.dequantize())
    start, values = copy.deepcopy(first), copy.deepcopy(plain)
    steps(name, "for-loop", first)
    steps(name, "for-loop", plain)
    for way in WAYS.keys() - {"for-loop"}:
        if not has_way(OPTIMIZERS[name], way):
            continue
        q, other = copy.deepcopy(start), copy.deepcopy(values)
        steps(name, way, q)
        steps(name, way, other)
        # The ways of some optimizers round differently for plain values too; and a fused step
        # is rounded once to the format, where one by one decay and step are each rounded.
        torchs_own = (plain - other).abs().max().item()
        roundings = 3 if way == "fused" else 1
        torch.testing.assert_close(
            q.dequantize(),
            first.dequantize(),
            rtol=roundings * format.rtol,
            atol=roundings * format.atol + torchs_own,
        )


@pytest.mark.parametrize("way", WAYS)
def test_plain_values_step_exactly_as_a_plain_parameter(way):
    q = torch.nn.Parameter(quantized(HIGH_PRECISION))
    plain = torch.nn.Parameter(q.dequantize())
    for name, make in OPTIMIZERS.items():
        if has_way(make, way):
            steps(name, way, q)
            steps(name, way, plain)
    assert torch.equal(q.dequantize(), plain)


def test_a_fused_step_counts_as_a_write_of_plain_parameters_beside_quantized_ones():
    q, plain = torch.nn.Parameter(quantized(MXFP8)), torch.nn.Parameter(torch.randn(7))
    for parameter in (q, plain):
        parameter.grad = torch.ones(parameter.shape)
    before, version = plain.detach().clone(), plain._version
    torch.optim.AdamW([q, plain], lr=0.1, fused=True).step()
    assert plain._version > version
    alone = torch.nn.Parameter(before)
    alone.grad = torch.ones(7)
    torch.optim.AdamW([alone], lr=0.1, fused=True).step()
    assert torch.equal(plain, alone)


def test_averages_are_plain_and_follow_a_quantized_parameter():
    q = torch.nn.Parameter(quantized(MXFP8))
    plain = torch.nn.Parameter(q.dequantize())
    averages = []
    for parameter in (q, plain):
        optimizer = torch.optim.ASGD([parameter], lr=0.01, t0=1, foreach=True)
        for _ in range(4):
            parameter.grad = torch.ones(SHAPE)
            optimizer.step()
        averages.append(optimizer.state[parameter]["ax"])
    assert type(averages[0]) is torch.Tensor
    torch.testing.assert_close(*averages, rtol=4 * MXFP8.rtol, atol=4 * MXFP8.atol)


def test_averages_one_by_one_are_refused_with_the_remedy():
    q = torch.nn.Parameter(quantized(MXFP8))
    optimizer = torch.optim.ASGD([q], lr=0.01, t0=1)
    for _ in range(3):
        q.grad = torch.ones(SHAPE)
        optimizer.step()
    with pytest.raises(UnsupportedOpError, match="ASGD pass foreach=True"):
        optimizer.step()


def test_a_moving_average_of_a_model_follows_its_quantized_weights():
    with bs.quantized_model_init("mxfp8"):
        layer = bs.Linear(40, 33)
    averages = [
        AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
        AveragedModel(layer),
    ]
    for average in averages:
        average.update_parameters(layer)
    before = layer.weight.dequantize()
    with torch.no_grad():
        layer.weight.add_(torch.ones(33, 40))
    averages[0].update_parameters(layer)
    wanted = (before + layer.weight.dequantize()) / 2
    followed: Any = averages[0].module
    got = followed.weight.dequantize()
    torch.testing.assert_close(got, wanted, rtol=MXFP8.rtol, atol=2 * MXFP8.atol)
    with pytest.raises(UnsupportedOpError, match="AveragedModel a multi_avg_fn"):
        averages[1].update_parameters(layer)


def test_a_line_search_steps_a_layer_whose_weight_is_quantized():
    with bs.quantized_model_init("mxfp8"):
        layer = bs.Linear(40, 33, bias=False)
    x, wanted = torch.randn(64, 40), torch.randn(64, 33)
    optimizer = torch.optim.LBFGS(
        layer.parameters(), lr=1.0, max_iter=8, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = (layer(x) - wanted).square().mean()
        loss.backward()
        return loss

    before = closure().item()
    for _ in range(3):
        optimizer.step(closure)
    assert closure().item() < before


def test_every_optimizer_of_torch_for_dense_gradients_is_tried():
    named = {make.func.__name__ for make in OPTIMIZERS.values()} | {"LBFGS", "SparseAdam"}
    there = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert there - {"Optimizer"} <= named
    assert ("adamw", "fused") in PAIRS
