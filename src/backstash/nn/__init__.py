"""Layers: the least is saved, in the recipe's format, and weights by reference."""

from backstash.nn.grouped_linear import GroupedLinear
from backstash.nn.grouped_mlp import GroupedMLP
from backstash.nn.layer import Layer
from backstash.nn.layernorm_linear import LayerNormLinear
from backstash.nn.layernorm_mlp import LayerNormMLP
from backstash.nn.linear import Linear
from backstash.nn.row_map import RowMap

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "Layer",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RowMap",
]
