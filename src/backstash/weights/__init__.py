"""Weights of which this process may hold only a part.

``protocol.py`` says what a module asks such a weight for, and asks it.  The rest is one answer:
``shard_model.py`` turns the weights of a model into shards, ``sharded.py`` is such a shard,
``sharding.py`` moves all of them through a step.
"""

from backstash.weights.export import export_safetensors
from backstash.weights.norm import clip_gradients_, gradient_norm
from backstash.weights.options import ShardOptions
from backstash.weights.protocol import (
    DistributedWeight,
    finalize_weight_grads,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)
from backstash.weights.shard_model import shard_weights
from backstash.weights.sharded import ShardedWeight, sharded_weights
from backstash.weights.sharding import Sharding
from backstash.weights.state_dict import load_sharded_state, sharded_state
from backstash.weights.states import State

__all__ = [
    "DistributedWeight",
    "ShardOptions",
    "ShardedWeight",
    "Sharding",
    "State",
    "clip_gradients_",
    "export_safetensors",
    "finalize_weight_grads",
    "gradient_norm",
    "is_distributed_weight",
    "load_sharded_state",
    "materialize_weight_for_backward",
    "materialize_weight_for_forward",
    "shard_weights",
    "sharded_state",
    "sharded_weights",
]
