"""Float8 with one scale: current and delayed scaling against the definition."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import definitions
from backstash.errors import RecipeError, ShapeError
from backstash.formats import FLOAT8_CURRENT, FLOAT8_DELAYED, Code, Usage
from backstash.recipes.scaling import DelayedScaling
from backstash.tensors import GroupedTensor
from quantizer_cases import (
    INF,
    NAN,
    TINY,
    assert_same,
    by_code,
    by_counts,
    by_dtype,
    by_shape,
    by_special,
    grouped_values,
    matrix,
    special_matrix,
    values,
)


def define_current(x, code, *, power_of_two=False, epsilon=0.0):
    """Codes, inverse scale and float32 values of current scaling."""
    scale = definitions.scale_from_amax(
        definitions.amax(x), definitions.LARGEST[code], epsilon=epsilon
    )
    scale = definitions.power_of_two_below(scale) if power_of_two else scale
    return (*define_scaled(x, scale, code),)


def define_scaled(x, scale, code):
    codes, scale_inv = definitions.float8(x, scale, code), definitions.inverse(scale)
    return codes, scale_inv, definitions.float8_values(codes, scale_inv, code)


def assert_is(q, defined):
    codes, scale_inv, wanted = defined
    assert_same(q.codes, codes)
    assert q.scale_inv.tolist() == [scale_inv]
    assert_same(q.dequantize(), definitions.rounded(wanted, str(q.dtype)[6:]))


@by_code
@by_dtype
@by_shape
def test_current_scaling_is_the_definition(shape, dtype, code):
    x = values(shape, dtype)
    q = dataclasses.replace(FLOAT8_CURRENT, code=Code(code)).quantize(x)
    assert (q.shape, q.dtype) == (x.shape, dtype)
    assert_is(q, define_current(matrix(x), code))


@by_code
@by_dtype
@by_special
def test_current_scaling_of_special_values_is_the_definition(special, dtype, code):
    x = special_matrix(special).to(dtype)
    q = dataclasses.replace(FLOAT8_CURRENT, code=Code(code)).quantize(x)
    assert_is(q, define_current(matrix(x), code))


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 2.0**-140], ids=["no-epsilon", "1e-3", "tiny"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power-of-two"])
@pytest.mark.parametrize("largest", [0.0, TINY, 1e-5, 3.1, 1e38, INF, NAN], ids=str)
def test_the_options_of_current_scaling_are_the_definition(largest, power_of_two, epsilon):
    x = special_matrix([largest, largest / 3, -largest / 7])
    options = {"power_of_two": power_of_two, "epsilon": epsilon}
    q = dataclasses.replace(FLOAT8_CURRENT, **options).quantize(x)
    assert_is(q, define_current(matrix(x), "e4m3", **options))


@by_dtype
def test_a_round_trip_keeps_the_tolerance_of_the_code(dtype):
    x = torch.randn(65, 33).to(dtype)
    for code in Code:
        format = dataclasses.replace(FLOAT8_CURRENT, code=code)
        torch.testing.assert_close(
            format.quantize(x).dequantize(), x, rtol=format.rtol, atol=format.atol
        )


def test_one_set_of_codes_serves_both_usages():
    x = values((33, 65))
    q = FLOAT8_CURRENT.quantize(x, Usage.BOTH)
    assert torch.equal(q.dequantize(Usage.ROWWISE), q.dequantize(Usage.COLUMNWISE))
    assert q.nbytes == FLOAT8_CURRENT.quantize(x).nbytes == 33 * 65 + 4


@by_counts
@by_code
def test_every_group_has_its_own_scale(counts, code):
    x, ends = grouped_values(counts, 9)
    grouped = dataclasses.replace(FLOAT8_CURRENT, code=Code(code)).quantize(GroupedTensor(x, ends))
    got = grouped.dequantize().data
    start = 0
    for group, count in enumerate(counts):
        rows = slice(start, start + count)
        codes, scale_inv, wanted = define_current(matrix(x[rows]), code)
        assert_same(grouped.data.codes[rows], codes)
        assert grouped.data.scale_inv[group] == scale_inv
        assert_same(got[rows], wanted)
        start += count


# --- delayed scaling ---------------------------------------------------------------------------


@by_code
@by_special
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**100], ids=str)
def test_delayed_scaling_casts_with_the_scale_given(special, scale, code):
    x = special_matrix(special)
    format = dataclasses.replace(FLOAT8_DELAYED, code=Code(code))
    q = format.quantize(x, scale=torch.tensor([scale]))
    assert_is(q, define_scaled(matrix(x), float(np.float32(scale)), code))


def test_delayed_scaling_starts_with_a_scale_of_one():
    x = values((3, 5))
    assert_is(FLOAT8_DELAYED.quantize(x), define_scaled(matrix(x), 1.0, "e4m3"))


def test_a_later_scale_changes_no_tensor_that_exists():
    scale, x = torch.tensor([2.0]), torch.ones(2, 3)
    q = FLOAT8_DELAYED.quantize(x, scale=scale)
    scale.fill_(64.0)
    assert torch.equal(q.dequantize(), x)


STEPS = [
    0.0,
    3.0,
    0.0,
    100.0,
    7.0,
    5.0,
    INF,
    2.0,
    1.0,
    0.5,
    TINY,
    TINY,
    TINY,
    TINY,
    TINY,
    TINY,
    3.0,
]


@pytest.mark.parametrize("most_recent", [False, True], ids=["largest", "most-recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("history", [1, 2, 5])
@by_code
def test_history_and_scale_move_as_defined(code, history, margin, most_recent):
    format = dataclasses.replace(
        FLOAT8_DELAYED, code=Code(code), history=history, margin=margin, most_recent=most_recent
    )
    scaling = DelayedScaling(format, 1, torch.device("cpu"))
    wanted, scale = [0.0] * history, 1.0
    largest = math.ldexp(definitions.LARGEST[code], -margin)
    for step in STEPS:
        amax = float(np.float32(step))
        scaling.update(torch.tensor([amax]))
        wanted, scale = definitions.delayed_update(
            wanted, scale, amax, largest, most_recent=most_recent
        )
        assert scaling.history_LG[:, 0].tolist() == wanted
        assert scaling.scale_G.tolist() == [scale]


def test_the_maximum_is_taken_before_slot_zero_is_cleared():
    scaling = DelayedScaling(dataclasses.replace(FLOAT8_DELAYED, history=3), 1, torch.device("cpu"))
    for amax in (7.0, 1.0, 1.0):
        scaling.update(torch.tensor([amax]))
    # The 7 has reached slot 0, which is cleared, and it counted once more on its way out.
    assert scaling.history_LG[:, 0].tolist() == [0.0, 1.0, 1.0]
    assert scaling.scale_G.tolist() == [448.0 / 7.0]


def test_groups_learn_their_scales_apart():
    scaling = DelayedScaling(FLOAT8_DELAYED, 3, torch.device("cpu"))
    scaling.update(torch.tensor([0.0, 2.0, INF]))
    assert scaling.scale_G.tolist() == [1.0, 224.0, 1.0]


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale",
    [torch.ones(2), torch.ones(1, dtype=torch.float64), torch.tensor(1.0)],
    ids=["two-for-one", "float64", "no-dimension"],
)
def test_a_scale_that_does_not_fit_is_refused(scale):
    with pytest.raises(ShapeError, match=r"float32 scale of shape \(1,\).*reshape or convert"):
        FLOAT8_DELAYED.quantize(torch.ones(2, 3), scale=scale)


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        (FLOAT8_CURRENT, {"code": "e4m3"}, "must be Code.E4M3 or Code.E5M2, got 'e4m3'"),
        (FLOAT8_CURRENT, {"epsilon": -1.0}, "not negative, got -1.0; use 0"),
        (FLOAT8_CURRENT, {"epsilon": NAN}, "finite"),
        (FLOAT8_DELAYED, {"history": 0}, "at least 1, got 0; use FLOAT8_CURRENT"),
        (FLOAT8_DELAYED, {"code": torch.float8_e5m2}, "must be Code"),
    ],
    ids=lambda part: part if isinstance(part, str) else getattr(part, "name", ""),
)
def test_an_option_that_means_nothing_is_refused(format, options, message):
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(format, **options)
