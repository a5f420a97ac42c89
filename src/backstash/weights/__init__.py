"""Weights of which this process may hold only a part.

``protocol.py`` says what a module asks such a weight for, and asks it.
"""

from backstash.weights.protocol import (
    DistributedWeight,
    finalize_weight_grads,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)

__all__ = [
    "DistributedWeight",
    "finalize_weight_grads",
    "is_distributed_weight",
    "materialize_weight_for_backward",
    "materialize_weight_for_forward",
]
