"""The arithmetic under everything else: plain tensors and ints in, plain tensors out.

Nothing here knows a class of this library, so each operation can be read, tested and
timed alone.  ``from backstash import kernels`` and then ``kernels.grouped_mm(...)``; the
meaning of each name is in :mod:`backstash.kernels.reference`.
"""

from backstash.kernels.binding import by_device
from backstash.kernels.reference.activation import ACTIVATIONS, activate, activate_backward
from backstash.kernels.reference.cast import (
    MX_BLOCK,
    amax,
    dequantize_mx_columns,
    dequantize_mx_rows,
    dequantize_scaled,
    group_amax,
    mx_block_ends,
    quantize_mx_columns,
    quantize_mx_rows,
    quantize_scaled,
    scale_from_amax,
)
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
from backstash.kernels.reference.pages import (
    MOST_BUFFERS,
    RECEIPT_HOST_SHIFT,
    RECEIPT_OVERFLOW,
    RECEIPT_PENDING,
    PoolState,
    new_pool_state,
    release_pages,
    restore_pages,
    stash_pages,
    table_length,
)
from backstash.kernels.reference.permute import permute, sort_by_expert, unpermute

release_pages = by_device(release_pages, "pages")
restore_pages = by_device(restore_pages, "pages")
stash_pages = by_device(stash_pages, "pages")

__all__ = [
    "ACTIVATIONS",
    "MOST_BUFFERS",
    "MX_BLOCK",
    "RECEIPT_HOST_SHIFT",
    "RECEIPT_OVERFLOW",
    "RECEIPT_PENDING",
    "PoolState",
    "activate",
    "activate_backward",
    "add_group_bias",
    "amax",
    "dequantize_mx_columns",
    "dequantize_mx_rows",
    "dequantize_scaled",
    "group_amax",
    "group_sum",
    "grouped_mm",
    "grouped_mm_dw",
    "grouped_mm_dx",
    "layer_norm",
    "layer_norm_backward",
    "mx_block_ends",
    "new_pool_state",
    "permute",
    "quantize_mx_columns",
    "quantize_mx_rows",
    "quantize_scaled",
    "release_pages",
    "restore_pages",
    "rms_norm",
    "rms_norm_backward",
    "row_groups",
    "scale_from_amax",
    "sort_by_expert",
    "stash_pages",
    "table_length",
    "unpermute",
]
