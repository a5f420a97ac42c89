"""The arithmetic under everything else: plain tensors and ints in, plain tensors out.

Nothing here knows a class of this library, so each operation can be read, tested and
timed alone.  ``from backstash import kernels`` and then ``kernels.grouped_mm(...)``; the
meaning of each name is in :mod:`backstash.kernels.reference`.
"""

from backstash.kernels.reference.activation import ACTIVATIONS, activate, activate_backward
from backstash.kernels.reference.grouped_mm import (
    add_group_bias,
    group_sum,
    grouped_mm,
    grouped_mm_dw,
    grouped_mm_dx,
    row_groups,
)
from backstash.kernels.reference.norm import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from backstash.kernels.reference.permute import permute, sort_by_expert, unpermute

__all__ = [
    "ACTIVATIONS",
    "activate",
    "activate_backward",
    "add_group_bias",
    "group_sum",
    "grouped_mm",
    "grouped_mm_dw",
    "grouped_mm_dx",
    "layer_norm",
    "layer_norm_backward",
    "permute",
    "rms_norm",
    "rms_norm_backward",
    "row_groups",
    "sort_by_expert",
    "unpermute",
]
