"""Quantize and dequantize on a GPU: the Triton twins of ``backstash.kernels.reference.cast``.

Every twin gives the bytes of its reference.  They are as fast as memory: each value is read
once for each pass that its scale needs, and written once.
"""

from backstash.kernels.cast.mx import (
    dequantize_mx_columns,
    dequantize_mx_rows,
    dequantize_mx_tiles,
    quantize_mx_both,
    quantize_mx_columns,
    quantize_mx_rows,
    quantize_mx_tiles,
)
from backstash.kernels.cast.scaled import (
    amax,
    dequantize_scaled,
    group_amax,
    quantize_scaled,
    scale_from_amax,
)

__all__ = [
    "amax",
    "dequantize_mx_columns",
    "dequantize_mx_rows",
    "dequantize_mx_tiles",
    "dequantize_scaled",
    "group_amax",
    "quantize_mx_both",
    "quantize_mx_columns",
    "quantize_mx_rows",
    "quantize_mx_tiles",
    "quantize_scaled",
    "scale_from_amax",
]
