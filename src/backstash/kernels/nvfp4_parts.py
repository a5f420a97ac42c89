"""The transposed bytes of NVFP4's blocks of rows on their way to memory, on a GPU.

A column of a group is as many bytes as half of its rows, so a block may begin at any byte.  Bytes
are stored as words at multiples of four: a word has the last bytes of one block and the first of
the next.  Which words, and which bytes where no neighbour has the rest of a word, depends on how
far a block begins before a word.  It is the same for all columns but for that, so it is found
once for each block.

Letters: K columns, NB blocks of rows and BK columns of a program.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

# Blocks of rows of a program.
BLOCKS = tl.constexpr(8)


@triton.jit
def parts_of(i_block, left, before):
    """Which parts of the bytes of a block are stored, for words that begin after 0 to 3 of them.

    A word is stored with the block that has its first byte; its last ones are the first of the
    next block.  Where no block of the program and the group is before a word, or after one,
    bytes are stored.  Of eight bits for each begin of words, from the lowest: the first word,
    the second; the first byte, two bytes before the first word, the former of these alone; two
    bytes after the last word, one, the third.
    """
    is_first, is_last = i_block % BLOCKS == 0, i_block % BLOCKS == BLOCKS - 1
    parts = i_block * 0
    for skipped in tl.static_range(4):
        rest = tl.minimum(left, 8) - skipped
        second = ((is_last == 0) & (left - 8 >= skipped)) | (rest >= 8)
        stored = (rest >= 4).to(tl.int32) + 2 * second.to(tl.int32)
        if skipped > 0:
            begins = is_first | (before == 0) | (rest < 0)
            stored += 4 * (begins & ((skipped % 2 == 1) | (rest < 0))).to(tl.int32)
            if skipped > 1:
                stored += 8 * (begins & (rest >= 0)).to(tl.int32)
            if skipped == 3:
                stored += 16 * (rest == -1).to(tl.int32)
        size = tl.where(second | (rest < 0), 0, rest & 3)
        stored += 32 * (size >= 2).to(tl.int32) + 64 * (size == 1).to(tl.int32)
        parts |= (stored + 128 * (size == 3).to(tl.int32)) << (8 * skipped)
    return tl.where(left > 0, parts, 0)


@triton.jit
def load_parts(p_table, i_block, blocks, left, before):
    """What the table says of the parts of some blocks that are stored; without one, the same."""
    if p_table is None:
        parts = parts_of(i_block, left, before)
    else:
        parts = tl.load(p_table + i_block * 8 + 6, mask=i_block < blocks, other=0)
    return parts


@triton.jit
def store_blocks(p_codes, place, words, mask):
    """Eight bytes of each block to places ``(NB, BK)`` that are multiples of eight."""
    block = words[0].to(tl.uint64) | (words[1].to(tl.uint64) << 32)
    p_blocks = p_codes.to(tl.pointer_type(tl.uint64)) + (place >> 3)
    tl.store(p_blocks, block, mask=mask)


@triton.jit
def shifted_down(lower, upper, bits):
    """The lower word of two after a shift to the right by fewer than 32 bits."""
    return (lower >> bits) | ((upper << 1) << (bits ^ 31))


@triton.jit
def store_shifted(p_codes, place, words, mask, parts, PAIRS: tl.constexpr):
    """The same to any places, of each block as many bytes as are left of its group.

    Words lie at multiples of four; ``parts`` says which parts of a block are stored.
    """
    NB: tl.constexpr = place.shape[0]
    i_next = tl.broadcast_to(tl.minimum(tl.arange(0, NB) + 1, NB - 1)[:, None], place.shape)
    following = tl.gather(words[0], i_next, 0)
    parts = tl.where(mask, parts[:, None], 0).to(tl.uint32)
    if PAIRS:
        _store_parts(p_codes + place, words, following, parts)
    else:
        _store_parts_slowly(p_codes + place, words, following, parts)


@triton.jit
def _store_parts_slowly(p_bytes, words, following, parts):
    """What :func:`_store_parts` does, for matrices of any type and without assembly."""
    skipped = -p_bytes.to(tl.int64).to(tl.int32) & 3
    bits = (8 * skipped).to(tl.uint32)
    first = shifted_down(words[0], words[1], bits)
    second = shifted_down(words[1], following, bits)
    stored = parts >> bits
    p_first = p_bytes + skipped
    p_words = p_first.to(tl.pointer_type(tl.uint32))
    tl.store(p_words, first, mask=(stored & 1) != 0)
    tl.store(p_words + 1, second, mask=(stored & 2) != 0)
    tl.store(p_bytes, words[0].to(tl.uint8), mask=(stored & 4) != 0)
    two = words[0] >> tl.where(skipped == 3, 8, 0).to(tl.uint32)
    p_two = p_first.to(tl.pointer_type(tl.uint16)) - 1
    tl.store(p_two, two.to(tl.uint16), mask=(stored & 8) != 0)
    tl.store(p_first - 2, two.to(tl.uint8), mask=(stored & 16) != 0)
    end = tl.where((stored & 1) != 0, second, first)
    p_end = p_first + ((stored & 1) * 4).to(tl.int32)
    tl.store(p_end.to(tl.pointer_type(tl.uint16)), end.to(tl.uint16), mask=(stored & 32) != 0)
    tl.store(p_end, end.to(tl.uint8), mask=(stored & 64) != 0)
    tl.store(p_end + 2, (end >> 16).to(tl.uint8), mask=(stored & 128) != 0)


@triton.jit
def _store_parts(p_bytes, words, following, parts):
    """Those of the eight bytes of blocks that ``parts`` names, and of the next words' first.

    Written out, because the compiler would put the bits of ``parts`` together anew.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .b32 skipped, bits, first, second, two, end, stored, t;
        .reg .b64 at;
        .reg .pred is_first, p;
        cvt.u32.u64 skipped, $1;
        neg.s32 skipped, skipped;
        and.b32 skipped, skipped, 3;
        shl.b32 bits, skipped, 3;
        shr.u32 stored, $5, bits;
        shf.r.wrap.b32 first, $2, $3, bits;
        shf.r.wrap.b32 second, $3, $4, bits;
        cvt.u64.u32 at, skipped;
        add.s64 at, at, $1;
        and.b32 t, stored, 4;
        setp.ne.u32 p, t, 0;
        @p st.global.u8 [$1], $2;
        sub.u32 bits, bits, 16;
        shr.u32 two, $2, bits;
        and.b32 t, stored, 8;
        setp.ne.u32 p, t, 0;
        @p st.global.u16 [at + -2], two;
        and.b32 t, stored, 16;
        setp.ne.u32 p, t, 0;
        @p st.global.u8 [at + -2], two;
        and.b32 t, stored, 1;
        setp.ne.u32 is_first, t, 0;
        @is_first st.global.u32 [at], first;
        and.b32 t, stored, 2;
        setp.ne.u32 p, t, 0;
        @p st.global.u32 [at + 4], second;
        selp.b32 end, second, first, is_first;
        @is_first add.s64 at, at, 4;
        and.b32 t, stored, 32;
        setp.ne.u32 p, t, 0;
        @p st.global.u16 [at], end;
        and.b32 t, stored, 64;
        setp.ne.u32 p, t, 0;
        @p st.global.u8 [at], end;
        and.b32 t, stored, 128;
        setp.ne.u32 p, t, 0;
        shr.u32 end, end, 16;
        @p st.global.u8 [at + 2], end;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r,r",
        [p_bytes.to(tl.uint64), words[0], words[1], following, parts],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def clear_blocks(p_codes, place, mask, left):
    """Zeros in place of the bytes of each block, as many as are ``left``."""
    zeros = tl.zeros(place.shape, tl.uint8)
    for i in range(tl.max(left, 0)):
        tl.store(p_codes + (place + i), zeros, mask=mask & (i < left)[:, None])
