"""Writing into a quantized tensor: decode, change in float32, quantize into the same bytes."""

# pyright: reportPrivateImportUsage=false

import pytest
import torch

from backstash.errors import LayoutError, UnsupportedOpError
from backstash.formats import FLOAT8_CURRENT, FLOAT8_DELAYED, MXFP8, Usage
from format_cases import assert_identical, by_format, by_grouping, by_usage, pointers, quantized
from quantizer_cases import INF, NAN

SHAPE = (33, 40)
X, Y = torch.rand(SHAPE) + 0.5, torch.rand(SHAPE) + 0.5
ARITHMETIC = {
    "add": lambda t: t.add_(X, alpha=-0.1),
    "add-number": lambda t: t.add_(0.25),
    "sub": lambda t: t.sub_(X),
    "mul": lambda t: t.mul_(0.99),
    "mul-tensor": lambda t: t.mul_(X),
    "div": lambda t: t.div_(3),
    "addcmul": lambda t: t.addcmul_(X, Y, value=0.5),
    "addcdiv": lambda t: t.addcdiv_(X, Y, value=-0.5),
    "lerp": lambda t: t.lerp_(X, 0.1),
    "zero": lambda t: t.zero_(),
    "fill": lambda t: t.fill_(2.5),
    "clamp": lambda t: t.clamp_(-0.5, 0.5),
    "operator": lambda t: t.__iadd__(X),
}
FOREACH = {
    "add": lambda ts: torch._foreach_add_(ts, [X] * 2, alpha=-0.1),
    "add-number": lambda ts: torch._foreach_add_(ts, 0.25),
    "sub": lambda ts: torch._foreach_sub_(ts, [X] * 2),
    "mul": lambda ts: torch._foreach_mul_(ts, 0.99),
    "mul-numbers": lambda ts: torch._foreach_mul_(ts, [0.5, 0.7]),
    "mul-tensor": lambda ts: torch._foreach_mul_(ts, torch.tensor(0.9)),
    "div": lambda ts: torch._foreach_div_(ts, [X] * 2),
    "addcmul": lambda ts: torch._foreach_addcmul_(ts, [X] * 2, [Y] * 2, 0.5),
    "addcmul-default": lambda ts: torch._foreach_addcmul_(ts, [X] * 2, [Y] * 2),
    "addcdiv": lambda ts: torch._foreach_addcdiv_(ts, [X] * 2, [Y] * 2, -0.5),
    "addcdiv-numbers": lambda ts: torch._foreach_addcdiv_(ts, [X] * 2, [Y] * 2, [-0.5, 0.1]),
    "lerp": lambda ts: torch._foreach_lerp_(ts, [X] * 2, 0.1),
    "copy": lambda ts: torch._foreach_copy_(ts, [X, Y]),
    "zero": lambda ts: torch._foreach_zero_(ts),
}


@by_format
@by_usage
@by_grouping
@pytest.mark.parametrize("change", ARITHMETIC.values(), ids=ARITHMETIC.keys())
def test_in_place_arithmetic_is_that_of_the_values_quantized_again(format, usage, ends, change):
    q = quantized(format, usage, ends)
    before, version, values = pointers(q), q._version, q.dequantize()
    wanted = q.clone().copy_(change(values))
    assert change(q) is q
    assert_identical(q, wanted)
    assert pointers(q) == before
    assert q._version > version


@by_format
@pytest.mark.parametrize("change", FOREACH.values(), ids=FOREACH.keys())
def test_foreach_arithmetic_is_that_of_each_tensor(format, change):
    q, plain = quantized(format), torch.randn(SHAPE)
    values = [q.dequantize(), plain.clone()]
    versions = q._version, plain._version
    change(values)
    wanted = q.clone().copy_(values[0])
    change([q, plain])
    assert_identical(q, wanted)
    assert torch.equal(plain, values[1])
    assert q._version > versions[0]
    assert plain._version > versions[1]


@by_format
@pytest.mark.parametrize("change", ["add_", "mul_", "div_", "sub_"])
def test_another_quantized_tensor_is_read_as_its_values(format, change):
    q, other = quantized(format), quantized(MXFP8)
    wanted = getattr(q.clone(), change)(other.dequantize())
    assert_identical(getattr(q, change)(other), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_values_are_changed_in_float32(dtype):
    q, x = FLOAT8_CURRENT.quantize(torch.ones(SHAPE).to(dtype)), X.to(dtype)
    wanted = FLOAT8_CURRENT.quantize(torch.ones(SHAPE).lerp_(x.float(), 0.001)).codes
    assert torch.equal(q.lerp_(x, 0.001).codes, wanted)
    assert q.dtype is dtype


init = torch.nn.init
STARTS = (
    *(init.normal_, init.uniform_, init.zeros_, init.ones_, init.eye_),
    *(init.xavier_normal_, init.xavier_uniform_, init.kaiming_normal_, init.kaiming_uniform_),
    lambda t: init.constant_(t, 0.3),
)


@by_format
def test_a_start_is_that_of_plain_values(format):
    for change in (
        lambda t: t.normal_(0.0, 0.02),
        lambda t: t.uniform_(-0.1, 0.1),
        *STARTS,
    ):
        q, plain = quantized(format), torch.empty(SHAPE)
        torch.manual_seed(7)
        wanted = q.clone().copy_(change(plain))
        torch.manual_seed(7)
        assert_identical(change(q), wanted)


@pytest.mark.parametrize("value", [INF, NAN, 0.0], ids=str)
@pytest.mark.parametrize("format", [FLOAT8_CURRENT, MXFP8], ids=lambda format: format.name)
def test_a_tensor_recovers_from_any_values(format, value):
    q, x = quantized(format), torch.randn(SHAPE)
    q.fill_(value)
    assert_identical(q.copy_(x), format.quantize(x, Usage.BOTH))


def test_a_learnt_scale_stays_with_its_tensor():
    q = FLOAT8_DELAYED.quantize(torch.ones(SHAPE), scale=torch.tensor([3.7]))
    scale_inv = q.scale_inv.clone()
    q.mul_(2).add_(X).copy_(torch.randn(SHAPE)).zero_()
    assert torch.equal(q.scale_inv, scale_inv)


@by_format
def test_an_orthogonal_start_is_rounded_when_it_is_written_and_when_it_is_scaled(format):
    q, plain = quantized(format), torch.empty(SHAPE)
    torch.manual_seed(7)
    init.orthogonal_(plain, gain=1.5)
    torch.manual_seed(7)
    init.orthogonal_(q, gain=1.5)
    torch.testing.assert_close(q.dequantize(), plain, rtol=2 * format.rtol, atol=2 * format.atol)


@by_format
@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (-0.1, 0.1)], ids=str)
def test_a_start_that_looks_at_what_it_drew_is_refused_with_the_remedy(format, bounds):
    q = quantized(format)
    with pytest.raises(UnsupportedOpError, match=r"q\.copy_\(torch\.nn\.init\.trunc_normal_"):
        init.trunc_normal_(q, 0.0, 1.0, *bounds)
    with pytest.raises(LayoutError, match="or dequantize"):
        init.sparse_(q, 0.5)
    x = init.trunc_normal_(torch.empty(q.shape), 0.0, 1.0, *bounds)
    assert_identical(q.copy_(x), quantized(format).copy_(x))
