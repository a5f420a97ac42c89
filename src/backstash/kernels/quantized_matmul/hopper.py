"""What the products on codes share on a Hopper GPU: a ring of blocks that are fetched ahead.

A program stays on its processor and takes every n-th tile.  Its warps go in step: they wait
for a block of both operands, multiply it, and meanwhile ask the copy engine for the block that
comes a ring's length later, in this tile or in the next that adds up anything.  While the tensor
cores multiply, the warps do the arithmetic that a format needs besides: that is why the products
of a format are written here a second time, in a language in which one can say so.

Rows that a tile has too many are read and not stored.  The copy engine reads zeros past the end
of an operand.

Letters: as in ``places``; BK of a block along what is added up.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backstash.kernels.warpgroups import CODES, UNIT_BYTES

# Triton 3.9 has another name for it.
wait_for_all = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def row_place(p_table, i_tile, sizes, BM: gl.constexpr, BN: gl.constexpr):
    """Of ``y`` or ``dx``: first row, rows to write, group, first column, and what to add up.

    The tail adds up nothing, and so is written as zeros; its weight is that of the last group.
    """
    groups, rows, length, _, columns, _ = sizes
    chunks = (columns + BN - 1) // BN
    if p_table is None:
        first = i_tile // chunks * BM
        end = gl.minimum(first + BM, rows)
        group = first * 0
    else:
        p_entry = p_table + i_tile // chunks * 4
        first = gl.load(p_entry)
        end = gl.load(p_entry + 1)
        group = gl.load(p_entry + 2)
    length = gl.where(group < groups, length, 0)
    return first, end - first, gl.minimum(group, groups - 1), i_tile % chunks * BN, length


@gluon.jit
def group_place(p_table, i_tile, sizes, BM: gl.constexpr, BN: gl.constexpr):
    """Of ``dw``: first row, rows to add up, group, and the tile's first row and column."""
    _, rows, _, M, columns, _ = sizes
    chunks = (columns + BN - 1) // BN
    i_strip = i_tile // chunks
    if p_table is None:
        first = i_strip * 0
        count = rows
        group = first
        m0 = i_strip * BM
    else:
        strips = (M + BM - 1) // BM
        p_entry = p_table + i_strip // strips * 4
        first = gl.load(p_entry)
        count = gl.load(p_entry + 1) - first
        group = gl.load(p_entry + 2)
        m0 = i_strip % strips * BM
    return first, count, group, m0, i_tile % chunks * BN


@gluon.jit
def units_before(p_ends, rows, group, UNIT: gl.constexpr, BG: gl.constexpr):
    """How many blocks of UNIT rows all groups before ``group`` have."""
    if p_ends is None:
        units = group * 0  # there is one group
    else:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        i_group = gl.arange(0, BG, layout=layout)
        m_group = i_group < group
        ends = gl.load(p_ends + i_group, mask=m_group, other=0)
        ends = gl.minimum(gl.maximum(ends, 0), rows).to(gl.int32)
        before = gl.load(p_ends + i_group - 1, mask=m_group & (i_group > 0), other=0)
        before = gl.minimum(gl.maximum(before, 0), rows).to(gl.int32)
        units = gl.sum((gl.maximum(ends - before, 0) + UNIT - 1) // UNIT, 0)
    return units


@gluon.jit
def tile_place(
    p_table, p_ends, i_tile, sizes, blocks, IS_DW: gl.constexpr, UNIT, BM, BN, BG: gl.constexpr
):
    """The place of a tile in the result, and the first block of scales of its group.

    Gives the first row and how many there are to write, the group, the first column, what to
    add up, and as 64 bits the block and where the tile begins in the result.
    """
    _, rows, _, M, columns, _ = sizes
    if IS_DW:
        _, J, group, first, n0 = group_place(p_table, i_tile, sizes, BM, BN)
        left = M - first
        block = units_before(p_ends, rows, group, UNIT, BG).to(gl.int64)
        o_out = (group.to(gl.int64) * M + first) * columns + n0
    else:
        first, left, group, n0, J = row_place(p_table, i_tile, sizes, BM, BN)
        block = group.to(gl.int64) * blocks
        o_out = first.to(gl.int64) * columns + n0
    return first, left, group, n0, J, block, o_out


@gluon.jit
def new_ring(STAGES: gl.constexpr):
    """Barriers that open when a block has arrived."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return full


@gluon.jit
def store_sums(p_tile, ld, rows, columns, total, BM: gl.constexpr, BN: gl.constexpr):
    """Round the sums of a tile, once, to the dtype of the result; the first rows and columns."""
    lanes: gl.constexpr = BN // 8 if BN < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0]
    )
    i_m = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    i_n = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    value = gl.convert_layout(total.to(p_tile.dtype.element_ty), layout)
    mask = (i_m < rows).expand_dims(1) & (i_n < columns).expand_dims(0)
    gl.store(p_tile + i_m.expand_dims(1) * ld + i_n.expand_dims(0), value, mask=mask)


def is_whole(codes_MK: Tensor) -> bool:
    """Say if the copy engine can read a matrix of codes: its rows are whole units."""
    return codes_MK.shape[-1] % UNIT_BYTES == 0 and codes_MK.data_ptr() % UNIT_BYTES == 0


def blocks_of(codes_MK: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix of codes, which the copy engine reads in blocks of ``rows`` times ``columns``."""
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, CODES[codes_MK.dtype])
    return TensorDescriptor(codes_MK, list(codes_MK.shape), list(codes_MK.stride()), block, layout)
