"""A quantizer writes what it would return into buffers that are there, unless a flag is set."""

import pytest
import torch

from backstash import kernels
from backstash.errors import LayoutError
from quantizer_cases import grouped_values

CODE = torch.float8_e4m3fn
ENDS = torch.tensor([3, 3, 40], dtype=torch.int32)
QUANTIZERS = {
    "scaled": lambda x, **to: kernels.quantize_scaled(x, torch.ones(3), CODE, ENDS, **to),
    "mx-rows": lambda x, **to: kernels.quantize_mx_rows(x, **to),
    "mx-columns": lambda x, **to: kernels.quantize_mx_columns(x, ENDS, **to),
    "mx-columns-one-matrix": lambda x, **to: kernels.quantize_mx_columns(x, **to),
    "mx-both": lambda x, **to: kernels.quantize_mx_both(x, ENDS, **to),
    "mx-tiles": lambda x, **to: kernels.quantize_mx_tiles(x, ENDS, **to),
    "float8-rows": lambda x, **to: kernels.quantize_float8_rows(x, CODE, **to),
    "float8-columns": lambda x, **to: kernels.quantize_float8_columns(x, CODE, ENDS, **to),
    "block-rows": lambda x, **to: kernels.quantize_block_rows(x, CODE, **to),
    "block-columns": lambda x, **to: kernels.quantize_block_columns(x, CODE, ENDS, **to),
    "block-both": lambda x, **to: kernels.quantize_block_both(x, CODE, ENDS, **to),
    "block-tiles": lambda x, **to: kernels.quantize_block_tiles(x, CODE, ENDS, **to),
}
by_quantizer = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS.keys())
by_flag = pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
by_shape = pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)


def flat(outputs):
    """The tensors of nested tuples."""
    return [outputs] if isinstance(outputs, torch.Tensor) else [t for o in outputs for t in flat(o)]


def assert_buffers(buffers, wanted):
    for buffer, values in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer, values)


@by_quantizer
def test_the_buffers_come_back_with_what_would_be_fresh(quantize):
    x, y = (grouped_values([40], 70, 0)[0] for _ in range(2))
    buffers = flat(quantize(x))
    filled = flat(quantize(y, into=kernels.Into(tuple(buffers))))
    assert all(one is other for one, other in zip(filled, buffers, strict=True))
    assert_buffers(buffers, flat(quantize(y)))


@by_quantizer
@by_flag
@by_shape
def test_a_flag_that_is_set_leaves_them_as_they_are(quantize, dtype, shape):
    x, y = (grouped_values([40], 70, 0)[0] for _ in range(2))
    before, noop = flat(quantize(x)), torch.ones(shape, dtype=dtype)
    into = kernels.Into(tuple(buffer.clone() for buffer in before), noop)
    quantize(y, into=into)
    assert_buffers(into.buffers, before)
    noop.zero_()
    quantize(y, into=into)
    assert_buffers(into.buffers, flat(quantize(y)))


@by_flag
@by_shape
def test_a_largest_magnitude_is_zero_where_nothing_was_to_be_read(dtype, shape):
    x, noop = torch.randn(40, 70), torch.ones(shape, dtype=dtype)
    assert kernels.amax(x, noop=noop).tolist() == [0]
    assert kernels.group_amax(x, ENDS, noop=noop).tolist() == [0, 0, 0]
    noop.zero_()
    assert torch.equal(kernels.amax(x, noop=noop), kernels.amax(x))
    assert torch.equal(kernels.group_amax(x, ENDS, noop=noop), kernels.group_amax(x, ENDS))


def test_what_is_no_buffer_and_no_flag_is_refused():
    codes = torch.zeros(4, 6, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="contiguous"):
        kernels.Into((codes[:, :3],))
    for noop in (torch.zeros(2), torch.zeros(1, dtype=torch.bool), torch.zeros(1, device="meta")):
        with pytest.raises(LayoutError, match="one float32 or int32 number on cpu"):
            kernels.Into((codes,), noop)
