"""What the matmuls of a Hopper GPU share: one warp that fetches, two warpgroups that multiply.

A program stays on its processor until all tiles are done.  One warp asks for a tile, tells the
others which, and lets the copy engine bring blocks of both operands into a ring of shared
memory, as far ahead as the ring is deep: into the next tile while this one is still being
stored.  The two warpgroups multiply the upper and the lower half of a tile; each waits for
a block, multiplies it and hands its place back.  Where a half has no rows, its warpgroup hands
the places back without multiplying, and the other one has the tensor cores for itself.

Tiles are given out by a counter, as tickets: a program that was slow, or whose tile was long, or
that began late because other work had its processor, asks for the next one later.  Who computes
a tile changes nothing in it: the blocks of a sum are always added in their order.

Rows that end inside a block need no mask.  The copy engine reads zeros past the end of a tensor
and writes nothing there, so the rows of a group are shown to it as a tensor that ends where the
group does: :func:`ragged` tells how.

Float8 codes are multiplied as they are, and their scales onto the finished sum.  A matrix unit
adds up float8 products in a register with fewer bits than float32, which the sums of gradients
are too long for: there each block's sum goes to float32 by itself (:func:`multiply_exactly`).

Letters: HALF rows of a tile for a warpgroup, BN columns of a tile, BK of a block along the sum.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.9 has other names for the two.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
#: The copy engine wants every stride, and every address, to be whole units.
UNIT_BYTES = 16
UNIT = gl.constexpr(UNIT_BYTES)
#: More rows than a matrix has.
FAR = gl.constexpr(2**30)
#: Into how many steps the way back is cut that a block of ragged columns takes.
TURNS = gl.constexpr(2**26)
# Values after which an address is the same again, for a value of any size.
_WRAP = 2**64
#: Dtypes of the operands, and of codes, and what Gluon calls them.
DTYPES: dict[torch.dtype, Any] = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
CODES: dict[torch.dtype, Any] = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
_NAMES: dict[torch.dtype, Any] = {torch.float32: gl.float32, **DTYPES, **CODES}
_BLOCK_BYTES = 128
# By dtype and block, of which a kernel has a few: Triton takes longer to find one than to launch.
_LAYOUTS: dict[tuple[Any, ...], Any] = {}


@gluon.jit
def give_ticket(tickets, given, taken, n, ticket, WARPS: gl.constexpr):
    """Tell both warpgroups the n-th tile of this program, from the warps that fetch."""
    slot = n % 2
    mbarrier.wait(taken.index(slot), (n // 2 & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tickets.index(slot).store(gl.full([1], ticket, gl.int32, layout))
    mbarrier.arrive(given.index(slot))


@gluon.jit
def take_ticket(tickets, given, taken, n):
    """The n-th tile of this program, in a warpgroup that multiplies."""
    slot = n % 2
    mbarrier.wait(given.index(slot), n // 2 & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ticket = gl.max(tickets.index(slot).load(layout), 0)
    mbarrier.arrive(taken.index(slot))
    return ticket


@gluon.jit
def multiply(
    a_smem,
    b_smem,
    full,
    empty,
    i,
    steps,
    half: gl.constexpr,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    BY_THREADS: gl.constexpr,
):
    """Multiply the next ``steps`` blocks of the ring and add them up, in float32.

    A block of an operand with ``ROWS`` has the sum along its rows, else down its columns.  What
    threads have fetched, and not the copy engine, has to be made visible to the tensor cores.
    """
    deep: gl.constexpr = 256 // a_smem.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, deep])
    total = gl.zeros([HALF, BN], gl.float32, layout)
    for step in range(steps):
        stage = (i + step) % STAGES
        mbarrier.wait(full.index(stage), (i + step) // STAGES & 1)
        if BY_THREADS:
            fence_async_shared()
        if A_ROWS:
            a = a_smem.index(2 * stage + half).reshape([HALF, BK])
        else:
            a = a_smem.index(2 * stage + half).reshape([BK, HALF]).permute((1, 0))
        if B_ROWS:
            b = b_smem.index(stage).reshape([BN, BK]).permute((1, 0))
        else:
            b = b_smem.index(stage).reshape([BK, BN])
        total = warpgroup_mma(a, b, total, use_acc=step > 0, is_async=True)
        # The product of the block before is done: its place is free.
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(empty.index((i + step + STAGES - 1) % STAGES), pred=step > 0)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index((i + steps + STAGES - 1) % STAGES), pred=steps > 0)
    return total


@gluon.jit
def multiply_exactly(
    a_smem,
    b_smem,
    full,
    empty,
    i,
    steps,
    half: gl.constexpr,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    BY_THREADS: gl.constexpr,
):
    """The same of float8 codes along rows, with each block's sum added in float32.

    The halves of the columns take turns: there are registers for the whole sum and for half of a
    block's own.  While one warpgroup adds, the other has the tensor cores.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 32])
    low = gl.zeros([HALF, BN // 2], gl.float32, layout)
    high = gl.zeros([HALF, BN // 2], gl.float32, layout)
    own = gl.zeros([HALF, BN // 2], gl.float32, layout)
    for step in range(steps):
        stage = (i + step) % STAGES
        mbarrier.wait(full.index(stage), (i + step) // STAGES & 1)
        if BY_THREADS:
            fence_async_shared()
        a = a_smem.index(2 * stage + half).reshape([HALF, BK])
        b = b_smem.index(stage).reshape([BN, BK])
        b_low = b.slice(0, BN // 2).permute((1, 0))
        b_high = b.slice(BN // 2, BN // 2).permute((1, 0))
        own = warpgroup_mma(a, b_low, own, use_acc=False, is_async=True)
        own = warpgroup_mma_wait(0, deps=(own,))
        low += own
        own = warpgroup_mma(a, b_high, own, use_acc=False, is_async=True)
        own = warpgroup_mma_wait(0, deps=(own,))
        mbarrier.arrive(empty.index(stage))
        high += own
    return gl.join(low, high).permute(0, 2, 1).reshape([HALF, BN])


@gluon.jit
def load_scales(p_scale, left, B: gl.constexpr):
    """The first ``left`` of B scales, loaded long before they are needed."""
    i = gl.arange(0, B, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(p_scale + i, mask=i < left, other=0.0)


@gluon.jit
def load_row_scales(p_scale, p_source, first, left, B: gl.constexpr):
    """The same of the rows from ``first``; with a map, those of the rows that it names."""
    if p_source is None:
        scale = load_scales(p_scale + first, left, B)
    else:
        i = gl.arange(0, B, layout=gl.BlockedLayout([1], [32], [4], [0]))
        source = gl.load(p_source + first + i, mask=i < left, other=0)
        scale = gl.load(p_scale + source, mask=i < left, other=0.0)
    return scale


@gluon.jit
def multiply_by_scales(total, a_scale, b_scale):
    """Multiply scales of rows and of columns onto a finished sum."""
    layout: gl.constexpr = total.type.layout
    a_scale = gl.convert_layout(a_scale, gl.SliceLayout(1, layout))
    b_scale = gl.convert_layout(b_scale, gl.SliceLayout(0, layout))
    return total * a_scale.expand_dims(1) * b_scale.expand_dims(0)


@gluon.jit
def pass_over(full, empty, i, steps, STAGES: gl.constexpr):
    """Hand back the places of the next ``steps`` blocks without multiplying."""
    for step in range(i, i + steps):
        mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
        mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def store_rows(c_desc, c_smem, total, end, rows, column, HALF: gl.constexpr, BN: gl.constexpr):
    """Store the first ``rows`` rows of a warpgroup's part of a tile: those before row ``end``."""
    low, high = _halves(total.to(c_desc.dtype), HALF, BN)
    tma.store_wait(0)
    c_smem.store(low.reshape([1, 1, HALF, BN // 2]))
    fence_async_shared()
    async_store(c_desc, [FAR, end, FAR - rows, column], c_smem)
    tma.store_wait(0)
    c_smem.store(high.reshape([1, 1, HALF, BN // 2]))
    fence_async_shared()
    async_store(c_desc, [FAR, end, FAR - rows, column + BN // 2], c_smem)


@gluon.jit
def store_block(c_desc, c_smem, total, group, row, column, HALF: gl.constexpr, BN: gl.constexpr):
    """Store a warpgroup's part of a tile into a group's matrix.

    Where its blocks have as many columns as the part has rows, the part is stored turned.
    """
    low, high = _halves(total.to(c_desc.dtype), HALF, BN)
    if c_desc.type.block_type.shape[2] == HALF:
        tma.store_wait(0)
        c_smem.store(low.permute(1, 0).reshape([1, BN // 2, HALF]))
        fence_async_shared()
        async_store(c_desc, [group, column, row], c_smem)
        tma.store_wait(0)
        c_smem.store(high.permute(1, 0).reshape([1, BN // 2, HALF]))
        fence_async_shared()
        async_store(c_desc, [group, column + BN // 2, row], c_smem)
    else:
        tma.store_wait(0)
        c_smem.store(low.reshape([1, HALF, BN // 2]))
        fence_async_shared()
        async_store(c_desc, [group, row, column], c_smem)
        tma.store_wait(0)
        c_smem.store(high.reshape([1, HALF, BN // 2]))
        fence_async_shared()
        async_store(c_desc, [group, row, column + BN // 2], c_smem)


@gluon.jit
def store_slab(c_desc, c_smem, total, row, column, HALF: gl.constexpr, BN: gl.constexpr):
    """Store a warpgroup's part of a tile into a slab, all of its rows."""
    low, high = _halves(total.to(c_desc.dtype), HALF, BN)
    tma.store_wait(0)
    c_smem.store(low)
    fence_async_shared()
    async_store(c_desc, [row, column], c_smem)
    tma.store_wait(0)
    c_smem.store(high)
    fence_async_shared()
    async_store(c_desc, [row, column + BN // 2], c_smem)


@gluon.jit
def _halves(value, HALF: gl.constexpr, BN: gl.constexpr):
    """The left and the right half of the columns: there is room in shared memory for one."""
    return value.reshape([HALF, 2, BN // 2]).permute(0, 2, 1).split()


@gluon.jit
def _new_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that open when ``COUNT`` have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def new_ring(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """What the warps of a program tell each other with.

    Barriers for a block that is there, when so many of those who fetch have arrived, and for a
    place that is free; tickets, and barriers for one that is given and one that is taken.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tickets = gl.allocate_shared_memory(gl.int32, [2, 1], flat)
    full = _new_barriers(STAGES, ARRIVALS)
    empty = _new_barriers(STAGES, 2)
    given = _new_barriers(2, 1)
    taken = _new_barriers(2, 2)
    fence_async_shared()
    return full, empty, tickets, given, taken


def values_a_block(x: Tensor) -> int:
    """How many values of an operand a block has along the sum."""
    return _BLOCK_BYTES // x.element_size()


def stages_for(result: Tensor, tile: dict[str, Any]) -> dict[str, Any]:
    """A tile whose ring leaves room in shared memory for the result, twice as much in float32."""
    return tile if result.element_size() == 2 else {**tile, "STAGES": tile["STAGES"] - 1}


def is_aligned(x: Tensor) -> bool:
    """Say if the copy engine can read ``x``: rows of neighbours, whole units apart."""
    unit = UNIT_BYTES // x.element_size()
    steps = x.stride()[:-1]
    is_apart = all(step % unit == 0 and step >= x.shape[-1] for step in steps)
    return is_apart and x.stride(-1) == 1 and x.data_ptr() % UNIT_BYTES == 0


def aligned(x: Tensor) -> Tensor:
    """``x`` as it is where the copy engine can read it, else a copy that it can."""
    return x if is_aligned(x) else new_aligned(x.shape, x).copy_(x)


def new_aligned(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A matrix that nobody has written yet, or one for each group, for the copy engine."""
    dtype = like.dtype if dtype is None else dtype
    unit = UNIT_BYTES // dtype.itemsize
    whole = like.new_empty(*shape[:-1], -(-shape[-1] // unit) * unit, dtype=dtype)
    return whole if tuple(whole.shape) == tuple(shape) else whole[..., : shape[-1]]


def ragged(x_TK: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Rows of a matrix in blocks of ``rows`` times ``columns``, of which only the first m count.

    The copy engine sees ``(FAR + 1, T + 1, FAR, K)``, in which the second and the third dimension
    both step from row to row.  The block at ``[FAR, e, FAR - m, k]`` begins m rows before row e:
    the first dimension takes FAR rows back, because addresses wrap at 64 bits, and the third gives
    all but m of them.  What follows its first m rows is past the end of the third dimension, so
    it is read as zeros and not written.  (A place before the beginning of a dimension would do as
    well, with fewer dimensions, but the engine refuses to store at one.)
    """
    T, K = x_TK.shape
    step = x_TK.stride(0)
    far = FAR.value
    shape, steps = (far + 1, T + 1, far, K), (_WRAP // far - step, step, step, 1)
    return _describe(x_TK, shape, steps, [1, 1, rows, columns])


def ragged_columns(x_KP: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Columns of a matrix of codes in blocks, of which only the first m count: whole units.

    Like :func:`ragged`, with the columns before FAR as those that count: the engine sees
    ``(TURNS + 1, P / 16 + 1, K, FAR)``, and the block at ``[TURNS, e / 16, k, FAR - m]`` begins m
    columns before column e.
    """
    K, P = x_KP.shape
    far, turns = FAR.value, TURNS.value
    shape = (turns + 1, P // UNIT_BYTES + 1, K, far)
    steps = (_WRAP // turns - far // turns, UNIT_BYTES, x_KP.stride(0), 1)
    return _describe(x_KP, shape, steps, [1, 1, rows, columns])


def matrix(x_TK: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix, read in blocks of ``rows`` times ``columns``."""
    return _describe(x_TK, x_TK.shape, x_TK.stride(), [rows, columns])


def matrices(w_GNK: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix for each group, in blocks of ``rows`` times ``columns`` of one of them."""
    return _describe(w_GNK, w_GNK.shape, w_GNK.stride(), [1, rows, columns])


def shared_layout(x: Tensor, block: list[int]) -> Any:
    """How a block of ``x`` lies in shared memory for the tensor cores."""
    key = (x.dtype, *block)
    if key not in _LAYOUTS:
        _LAYOUTS[key] = gl.NVMMASharedLayout.get_default_for(block, _NAMES[x.dtype])
    return _LAYOUTS[key]


class _Described(TensorDescriptor):
    """A descriptor whose address and steps are known to be aligned: nothing is checked again."""

    def __post_init__(self) -> None:
        pass

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a kernel is compiled for: the layout follows from these."""
        return (self.base.dtype, *self.block_shape)


def _describe(x: Tensor, shape: Any, strides: Any, block: list[int]) -> TensorDescriptor:
    return _Described(x, list(shape), list(strides), block, shared_layout(x, block))
