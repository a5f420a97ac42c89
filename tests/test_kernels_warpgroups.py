"""Where the copy engine of a Hopper GPU finds rows that end inside a block."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")
warpgroups = pytest.importorskip("backstash.kernels.warpgroups")


def block_at(memory, description, place):
    """What the copy engine reads: zeros where a coordinate is outside its dimension."""
    size = description.block_shape
    block = torch.zeros(size, dtype=memory.dtype)
    for at in torch.cartesian_prod(*[torch.arange(length) for length in size]).tolist():
        where = [first + step for first, step in zip(place, at, strict=True)]
        if all(0 <= i < length for i, length in zip(where, description.shape, strict=True)):
            offset = sum(i * step for i, step in zip(where, description.strides, strict=True))
            block[tuple(at)] = memory[offset % 2**64]
    return block


@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("first", [0, 3, 12])
def test_the_first_rows_of_a_ragged_block_are_those_asked_for_and_the_others_zeros(first, count):
    x = torch.randn(20, 16).bfloat16()
    description = warpgroups.ragged(x, 8, 8)
    far = warpgroups.FAR.value
    block = block_at(x.flatten(), description, (far, first + count, far - count, 8))[0, 0]
    assert torch.equal(block[:count], x[first : first + count, 8:])
    assert not block[count:].any()


@pytest.mark.parametrize("count", [16, 48, 64])
@pytest.mark.parametrize("first", [0, 32, 80])
def test_the_first_columns_of_a_ragged_block_are_those_asked_for_and_the_others_zeros(first, count):
    x = torch.randint(0, 256, (12, 144), dtype=torch.uint8)
    description = warpgroups.ragged_columns(x.view(torch.float8_e4m3fn), 4, 64)
    far, unit = warpgroups.FAR.value, warpgroups.UNIT_BYTES
    place = (warpgroups.TURNS.value, (first + count) // unit, 8, far - count)
    block = block_at(x.flatten(), description, place)[0, 0]
    assert torch.equal(block[:, :count], x[8:, first : first + count])
    assert not block[:, count:].any()


def test_a_block_of_one_groups_matrix_has_nothing_of_the_next():
    w = torch.randn(3, 10, 16).bfloat16()
    block = block_at(w.flatten(), warpgroups.matrices(w, 8, 8), (1, 8, 8))[0]
    assert torch.equal(block[:2], w[1, 8:, 8:])
    assert not block[2:].any()


def test_rows_that_lie_whole_units_apart_are_aligned():
    x = torch.randn(4, 24).bfloat16()
    assert warpgroups.is_aligned(x)
    assert warpgroups.is_aligned(x[:, 8:16])
    assert not warpgroups.is_aligned(x[:, 1:9])
    assert not warpgroups.is_aligned(x.t())
    assert not warpgroups.is_aligned(x[:1].expand(4, 24))
    assert not warpgroups.is_aligned(torch.randn(4, 7).bfloat16())


@pytest.mark.parametrize("shape", [(4, 7), (4, 8), (2, 3, 9)], ids=str)
def test_a_new_aligned_matrix_has_the_shape_and_is_aligned(shape):
    for dtype in (None, torch.float32):
        matrix = warpgroups.new_aligned(shape, torch.zeros(0).bfloat16(), dtype)
        assert matrix.dtype is (dtype or torch.bfloat16)
        assert tuple(matrix.shape) == shape
        assert warpgroups.is_aligned(matrix)
