"""Powers of two on a GPU: every byte read, and every magnitude near one of them written."""

import numpy as np
import pytest
import torch

import definitions
from backstash import kernels
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu


def test_every_exponent_is_read_as_the_references():
    exponents = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    wanted = kernels.dequantize_mx_rows(codes, exponents, torch.float32)
    got = kernels.dequantize_mx_rows(codes.cuda(), exponents.cuda(), torch.float32)
    assert_twin_bytes(got, wanted)


def test_an_exponent_is_rounded_up_beside_every_power_of_two_as_in_the_reference():
    scaled = (448.0 * definitions.POWERS)[:-9].astype(np.float32)
    with np.errstate(under="ignore"):
        below, above = (np.nextafter(scaled, np.float32(end)) for end in (0, np.inf))
    subnormal = (np.arange(1, 600) * 2.0**-149).astype(np.float32)
    x = np.concatenate([scaled, below, above, subnormal, [np.inf, definitions.FLOAT32_MAX, 0]])
    block = torch.zeros(len(x), 32)
    block[:, 17] = torch.from_numpy(x.astype(np.float32))
    for quantize, given in (
        (kernels.quantize_mx_rows, block),
        (kernels.quantize_mx_columns, block.T.contiguous()),
    ):
        for got, wanted in zip(quantize(given.cuda()), quantize(given), strict=True):
            assert_twin_bytes(got, wanted)
