"""The arithmetic under everything else: plain tensors and ints in, plain tensors out.

Nothing here knows a class of this library, so each operation can be read, tested and
timed alone.  ``from backstash import kernels`` and then ``kernels.grouped_mm(...)``; the
meaning of each name is in :mod:`backstash.kernels.reference`.
"""

from backstash.kernels.binding import FLOAT8_GPU, by_device
from backstash.kernels.reference.activation import (
    ACTIVATIONS,
    ActivationGradients,
    activate,
    activate_backward,
    activate_slabs,
    activates_pages,
)
from backstash.kernels.reference.activation_float8 import (
    ActivationCodes,
    Scaling,
    activate_backward_float8,
    activate_float8,
)
from backstash.kernels.reference.blocks import block_ends, column_amax, row_amax
from backstash.kernels.reference.cast import (
    MX_BLOCK,
    amax,
    dequantize_mx_columns,
    dequantize_mx_rows,
    dequantize_mx_tiles,
    dequantize_scaled,
    group_amax,
    quantize_mx_both,
    quantize_mx_columns,
    quantize_mx_rows,
    quantize_mx_tiles,
    quantize_scaled,
    scale_from_amax,
)
from backstash.kernels.reference.float8_block import (
    FLOAT8_BLOCK,
    dequantize_block_columns,
    dequantize_block_rows,
    dequantize_block_tiles,
    quantize_block_both,
    quantize_block_columns,
    quantize_block_rows,
    quantize_block_tiles,
)
from backstash.kernels.reference.float8_mm import (
    FLOAT8_UNIT,
    Scaled,
    float8_gathered_mm,
    float8_grouped_mm,
    float8_grouped_mm_dw,
    float8_mm,
    transpose_groups,
)
from backstash.kernels.reference.float8_rowwise import (
    dequantize_float8_columns,
    dequantize_float8_rows,
    quantize_float8_columns,
    quantize_float8_rows,
)
from backstash.kernels.reference.float8_turned import (
    Turned,
    largest_of_parts,
    quantize_float8_rows_and_turned,
    quantize_float8_turned,
    quantize_float8_weight,
    quantize_float8_weight_rows,
)
from backstash.kernels.reference.gathered_mm import (
    gathered_mm,
    gathered_mm_dw_of_input,
    gathered_mm_dw_of_output,
    gathered_mm_dx,
)
from backstash.kernels.reference.group_ends import Fitted, fit_groups
from backstash.kernels.reference.grouped_mm import (
    add_group_bias,
    group_sum,
    grouped_mm,
    grouped_mm_dw,
    grouped_mm_dx,
    row_groups,
)
from backstash.kernels.reference.hadamard import hadamard_matrix, rotated_column_amax
from backstash.kernels.reference.into import Into
from backstash.kernels.reference.moves import Moves, carrying, finish_moves, new_moves
from backstash.kernels.reference.norm import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from backstash.kernels.reference.nvfp4 import (
    dequantize_nvfp4_columns,
    dequantize_nvfp4_rows,
    dequantize_nvfp4_tiles,
    quantize_nvfp4_both,
    quantize_nvfp4_columns,
    quantize_nvfp4_rows,
    quantize_nvfp4_tiles,
)
from backstash.kernels.reference.nvfp4_columns import (
    NVFP4_BLOCK,
    nvfp4_column_bytes,
    nvfp4_column_ends,
)
from backstash.kernels.reference.paged_rows import (
    InPages,
    PagedRows,
    grouped_mm_dw_of_pages,
    multiplies_pages,
    page_values,
)
from backstash.kernels.reference.pages import (
    MOST_BUFFERS,
    MOST_RELEASED,
    RECEIPT_HOST_SHIFT,
    RECEIPT_OVERFLOW,
    RECEIPT_PENDING,
    PoolState,
    new_pool_state,
    page_payload,
    release_pages,
    restore_pages,
    stash_pages,
    table_length,
)
from backstash.kernels.reference.permute import permute, sort_by_expert, unpermute
from backstash.kernels.reference.philox import draw_seed
from backstash.kernels.reference.quantized_mm import (
    Blocks,
    Codes,
    quantized_mm,
    quantized_mm_dw,
    quantized_mm_dx,
)
from backstash.kernels.reference.routing import (
    Tally,
    bfloat16_parts,
    count_experts,
    top_experts,
    weigh_experts,
    weigh_experts_backward,
)
from backstash.kernels.reference.row_weights import weights_to_copies, weights_to_rows
from backstash.kernels.reference.slabs import (
    Slabs,
    claim_slabs,
    grouped_mm_in_slabs,
    has_slabs,
    permute_into_slabs,
    slab_values,
    slab_width,
    slabs_for,
)
from backstash.kernels.reference.tables import sharing_tables
from backstash.kernels.reference.transpose import transpose_codes

# Each operation with a Triton twin, and the file of that twin.
activate = by_device(activate, "activation")
activate_backward = by_device(activate_backward, "activation")
activate_slabs = by_device(activate_slabs, "slab_activation")
activates_pages = by_device(activates_pages, "activation")
activate_backward_float8 = by_device(
    activate_backward_float8, "activation_float8_backward", FLOAT8_GPU
)
activate_float8 = by_device(activate_float8, "activation_float8", FLOAT8_GPU)
add_group_bias = by_device(add_group_bias, "grouped_matmul")
amax = by_device(amax, "cast", FLOAT8_GPU)
bfloat16_parts = by_device(bfloat16_parts, "routing")
claim_slabs = by_device(claim_slabs, "slabs")
column_amax = by_device(column_amax, "float8_rowwise", FLOAT8_GPU)
count_experts = by_device(count_experts, "sorting")
dequantize_block_columns = by_device(dequantize_block_columns, "float8_block", FLOAT8_GPU)
dequantize_block_rows = by_device(dequantize_block_rows, "float8_block", FLOAT8_GPU)
dequantize_block_tiles = by_device(dequantize_block_tiles, "float8_block", FLOAT8_GPU)
dequantize_float8_columns = by_device(dequantize_float8_columns, "float8_rowwise", FLOAT8_GPU)
dequantize_float8_rows = by_device(dequantize_float8_rows, "float8_rowwise", FLOAT8_GPU)
dequantize_mx_columns = by_device(dequantize_mx_columns, "cast", FLOAT8_GPU)
dequantize_mx_rows = by_device(dequantize_mx_rows, "cast", FLOAT8_GPU)
dequantize_mx_tiles = by_device(dequantize_mx_tiles, "cast", FLOAT8_GPU)
dequantize_nvfp4_columns = by_device(dequantize_nvfp4_columns, "nvfp4_values", FLOAT8_GPU)
dequantize_nvfp4_rows = by_device(dequantize_nvfp4_rows, "nvfp4_values", FLOAT8_GPU)
dequantize_nvfp4_tiles = by_device(dequantize_nvfp4_tiles, "nvfp4_values", FLOAT8_GPU)
dequantize_scaled = by_device(dequantize_scaled, "cast", FLOAT8_GPU)
fit_groups = by_device(fit_groups, "group_ends")
finish_moves = by_device(finish_moves, "moves")
float8_gathered_mm = by_device(float8_gathered_mm, "float8_matmul", FLOAT8_GPU)
float8_grouped_mm = by_device(float8_grouped_mm, "float8_matmul", FLOAT8_GPU)
float8_grouped_mm_dw = by_device(float8_grouped_mm_dw, "float8_matmul", FLOAT8_GPU)
float8_mm = by_device(float8_mm, "float8_matmul", FLOAT8_GPU)
gathered_mm = by_device(gathered_mm, "gathered_matmul")
gathered_mm_dw_of_input = by_device(gathered_mm_dw_of_input, "gathered_matmul")
gathered_mm_dw_of_output = by_device(gathered_mm_dw_of_output, "gathered_matmul")
gathered_mm_dx = by_device(gathered_mm_dx, "gathered_matmul")
group_amax = by_device(group_amax, "cast", FLOAT8_GPU)
group_sum = by_device(group_sum, "grouped_matmul")
grouped_mm = by_device(grouped_mm, "grouped_matmul")
grouped_mm_dw = by_device(grouped_mm_dw, "grouped_matmul")
grouped_mm_dw_of_pages = by_device(grouped_mm_dw_of_pages, "gathered_matmul")
grouped_mm_in_slabs = by_device(grouped_mm_in_slabs, "slabs")
grouped_mm_dx = by_device(grouped_mm_dx, "grouped_matmul")
has_slabs = by_device(has_slabs, "slabs")
largest_of_parts = by_device(largest_of_parts, "float8_weights", FLOAT8_GPU)
layer_norm = by_device(layer_norm, "norm")
layer_norm_backward = by_device(layer_norm_backward, "norm")
multiplies_pages = by_device(multiplies_pages, "gathered_matmul")
permute = by_device(permute, "permutation")
permute_into_slabs = by_device(permute_into_slabs, "slabs")
quantize_block_both = by_device(quantize_block_both, "float8_block", FLOAT8_GPU)
quantize_block_columns = by_device(quantize_block_columns, "float8_block", FLOAT8_GPU)
quantize_block_rows = by_device(quantize_block_rows, "float8_block", FLOAT8_GPU)
quantize_block_tiles = by_device(quantize_block_tiles, "float8_block", FLOAT8_GPU)
quantize_float8_columns = by_device(quantize_float8_columns, "float8_rowwise", FLOAT8_GPU)
quantize_float8_rows = by_device(quantize_float8_rows, "float8_rowwise", FLOAT8_GPU)
quantize_float8_rows_and_turned = by_device(
    quantize_float8_rows_and_turned, "float8_turned", FLOAT8_GPU
)
quantize_float8_turned = by_device(quantize_float8_turned, "float8_turned", FLOAT8_GPU)
quantize_float8_weight = by_device(quantize_float8_weight, "float8_weights", FLOAT8_GPU)
quantize_float8_weight_rows = by_device(quantize_float8_weight_rows, "float8_weights", FLOAT8_GPU)
quantize_mx_both = by_device(quantize_mx_both, "cast", FLOAT8_GPU)
quantize_mx_columns = by_device(quantize_mx_columns, "cast", FLOAT8_GPU)
quantize_mx_rows = by_device(quantize_mx_rows, "cast", FLOAT8_GPU)
quantize_mx_tiles = by_device(quantize_mx_tiles, "cast", FLOAT8_GPU)
quantize_nvfp4_both = by_device(quantize_nvfp4_both, "nvfp4_both", FLOAT8_GPU)
quantize_nvfp4_columns = by_device(quantize_nvfp4_columns, "nvfp4_columns", FLOAT8_GPU)
quantize_nvfp4_rows = by_device(quantize_nvfp4_rows, "nvfp4", FLOAT8_GPU)
quantize_nvfp4_tiles = by_device(quantize_nvfp4_tiles, "nvfp4", FLOAT8_GPU)
quantize_scaled = by_device(quantize_scaled, "cast", FLOAT8_GPU)
quantized_mm = by_device(quantized_mm, "quantized_matmul", FLOAT8_GPU)
quantized_mm_dw = by_device(quantized_mm_dw, "quantized_matmul", FLOAT8_GPU)
quantized_mm_dx = by_device(quantized_mm_dx, "quantized_matmul", FLOAT8_GPU)
release_pages = by_device(release_pages, "pages")
restore_pages = by_device(restore_pages, "pages")
rms_norm = by_device(rms_norm, "norm")
rms_norm_backward = by_device(rms_norm_backward, "norm")
rotated_column_amax = by_device(rotated_column_amax, "hadamard", FLOAT8_GPU)
row_amax = by_device(row_amax, "float8_rowwise", FLOAT8_GPU)
scale_from_amax = by_device(scale_from_amax, "cast", FLOAT8_GPU)
sort_by_expert = by_device(sort_by_expert, "sorting")
stash_pages = by_device(stash_pages, "pages")
top_experts = by_device(top_experts, "routing")
transpose_codes = by_device(transpose_codes, "transposition")
transpose_groups = by_device(transpose_groups, "float8_matmul", FLOAT8_GPU)
unpermute = by_device(unpermute, "permutation")
weigh_experts = by_device(weigh_experts, "routing")
weigh_experts_backward = by_device(weigh_experts_backward, "routing")
weights_to_copies = by_device(weights_to_copies, "row_weights")
weights_to_rows = by_device(weights_to_rows, "row_weights")

__all__ = [
    "ACTIVATIONS",
    "FLOAT8_BLOCK",
    "FLOAT8_UNIT",
    "MOST_BUFFERS",
    "MOST_RELEASED",
    "MX_BLOCK",
    "NVFP4_BLOCK",
    "RECEIPT_HOST_SHIFT",
    "RECEIPT_OVERFLOW",
    "RECEIPT_PENDING",
    "ActivationCodes",
    "ActivationGradients",
    "Blocks",
    "Codes",
    "Fitted",
    "InPages",
    "Into",
    "Moves",
    "PagedRows",
    "PoolState",
    "Scaled",
    "Scaling",
    "Slabs",
    "Tally",
    "Turned",
    "activate",
    "activate_backward",
    "activate_backward_float8",
    "activate_float8",
    "activate_slabs",
    "activates_pages",
    "add_group_bias",
    "amax",
    "bfloat16_parts",
    "block_ends",
    "carrying",
    "claim_slabs",
    "column_amax",
    "count_experts",
    "dequantize_block_columns",
    "dequantize_block_rows",
    "dequantize_block_tiles",
    "dequantize_float8_columns",
    "dequantize_float8_rows",
    "dequantize_mx_columns",
    "dequantize_mx_rows",
    "dequantize_mx_tiles",
    "dequantize_nvfp4_columns",
    "dequantize_nvfp4_rows",
    "dequantize_nvfp4_tiles",
    "dequantize_scaled",
    "draw_seed",
    "finish_moves",
    "fit_groups",
    "float8_gathered_mm",
    "float8_grouped_mm",
    "float8_grouped_mm_dw",
    "float8_mm",
    "gathered_mm",
    "gathered_mm_dw_of_input",
    "gathered_mm_dw_of_output",
    "gathered_mm_dx",
    "group_amax",
    "group_sum",
    "grouped_mm",
    "grouped_mm_dw",
    "grouped_mm_dw_of_pages",
    "grouped_mm_dx",
    "grouped_mm_in_slabs",
    "hadamard_matrix",
    "has_slabs",
    "largest_of_parts",
    "layer_norm",
    "layer_norm_backward",
    "multiplies_pages",
    "new_moves",
    "new_pool_state",
    "nvfp4_column_bytes",
    "nvfp4_column_ends",
    "page_payload",
    "page_values",
    "permute",
    "permute_into_slabs",
    "quantize_block_both",
    "quantize_block_columns",
    "quantize_block_rows",
    "quantize_block_tiles",
    "quantize_float8_columns",
    "quantize_float8_rows",
    "quantize_float8_rows_and_turned",
    "quantize_float8_turned",
    "quantize_float8_weight",
    "quantize_float8_weight_rows",
    "quantize_mx_both",
    "quantize_mx_columns",
    "quantize_mx_rows",
    "quantize_mx_tiles",
    "quantize_nvfp4_both",
    "quantize_nvfp4_columns",
    "quantize_nvfp4_rows",
    "quantize_nvfp4_tiles",
    "quantize_scaled",
    "quantized_mm",
    "quantized_mm_dw",
    "quantized_mm_dx",
    "release_pages",
    "restore_pages",
    "rms_norm",
    "rms_norm_backward",
    "rotated_column_amax",
    "row_amax",
    "row_groups",
    "scale_from_amax",
    "sharing_tables",
    "slab_values",
    "slab_width",
    "slabs_for",
    "sort_by_expert",
    "stash_pages",
    "table_length",
    "top_experts",
    "transpose_codes",
    "transpose_groups",
    "unpermute",
    "weigh_experts",
    "weigh_experts_backward",
    "weights_to_copies",
    "weights_to_rows",
]
