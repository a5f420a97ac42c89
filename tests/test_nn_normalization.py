"""A normalization is a value: the same rows give the same bits again."""

from __future__ import annotations

import pytest
import torch

from backstash.errors import ConfigError
from backstash.nn.normalization import Kind, Normalization, make_neutral_
from nn_cases import ROWS, H
from nn_references import assert_gradients, double, normalize


@pytest.mark.parametrize("kind", Kind)
def test_it_and_its_gradients_are_those_of_the_definition(kind: Kind) -> None:
    normalization = Normalization(kind, 1e-5)
    x, weight, dy = torch.randn(ROWS, H), torch.rand(H), torch.randn(ROWS, H)
    bias = torch.rand(H) if kind is Kind.LAYER_NORM else None
    y, statistics = normalization.forward(x, weight, bias)
    again, _ = normalization.forward(x, weight, bias)
    assert torch.equal(y, again)
    leaves = double(x, weight, bias)
    expected = normalize(leaves[0], leaves[1], leaves[2] if bias is not None else None, 1e-5)
    expected.backward(dy.double())
    grads = normalization.backward(dy, x, weight, statistics)
    assert_gradients([y], [expected])
    assert_gradients([g for g in grads if g is not None], [leaf.grad for leaf in leaves])
    assert (statistics.mean is None) == (kind is Kind.RMS_NORM)


def test_kinds_go_by_the_names_of_the_field() -> None:
    assert Kind.named("LayerNorm") is Kind.LAYER_NORM
    assert Kind.named("RMSNorm") is Kind.RMS_NORM
    with pytest.raises(ConfigError, match="one of LayerNorm, RMSNorm, got 'rmsnorm'"):
        Kind.named("rmsnorm")


@pytest.mark.parametrize("kind", Kind)
def test_new_parameters_are_neutral_once_they_are_made_so(kind: Kind) -> None:
    normalization = Normalization(kind, 1e-5)
    weight, bias = normalization.new_parameters(H, dtype=torch.float64)
    make_neutral_(weight, bias)
    assert (bias is None) == (kind is Kind.RMS_NORM)
    x = torch.randn(ROWS, H, dtype=torch.float64)
    y, _ = normalization.forward(x, weight, bias)
    assert torch.equal(y, normalization.forward(x, torch.ones_like(weight), None)[0])
