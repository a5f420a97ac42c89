"""NVFP4 casts: rounding boundaries, scales at their corners, and stochastic rounding."""

import numpy as np
import pytest
import torch

import definitions
import definitions_nvfp4 as nvfp4
from backstash import kernels
from quantizer_cases import INF, NAN, assert_same, matrix, values

# With this largest magnitude over all, a block whose own is 6 has a scale of exactly one.
AMAX = torch.tensor([448.0 * 6.0])
PAIR = torch.tensor([11, 12])


def unpack(codes, columns):
    """Nibbles of bytes, the lower first."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., :columns]


def test_values_on_and_beside_every_boundary_get_the_nearest_even_code():
    middle = nvfp4.MIDDLE.astype(np.float32)
    points = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, 9)])
    x = np.zeros((len(points), 16), np.float32)
    x[:, 2], x[:, 3], x[:, 15] = points, -points, 6.0
    codes, scales = kernels.quantize_nvfp4_rows(torch.from_numpy(x), AMAX)
    assert scales.unique().tolist() == [0x38]  # one
    assert_same(unpack(codes, 16), nvfp4.encode(x))
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert nvfp4.decode(nvfp4.encode(np.array(ties))).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_every_nibble_comes_back_as_itself():
    nibbles = torch.arange(16, dtype=torch.uint8)[None]
    codes, scales = nibbles[:, ::2] | nibbles[:, 1::2] << 4, torch.tensor([[0x38]]).byte()
    got = kernels.dequantize_nvfp4_rows(codes, scales, AMAX, 16, torch.float32)
    assert_same(got, nvfp4.decode(nibbles.numpy()))
    again, _ = kernels.quantize_nvfp4_rows(got, AMAX)
    assert torch.equal(again, codes)


def test_nan_is_six_infinity_is_the_largest_and_zeros_keep_their_sign():
    x = torch.tensor([[NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, 6.0]])
    codes, _ = kernels.quantize_nvfp4_rows(x, AMAX)
    assert unpack(codes, 6).tolist() == [[7, 7, 7, 15, 0, 8]]


def test_scales_are_the_definition_at_every_largest_magnitude():
    random = np.exp2(np.random.uniform(-40, 12, 400)).astype(np.float32)
    x = np.zeros((len(random), 16), np.float32)
    x[:, 4] = random
    for amax in (random.max(), 1e30, definitions.FLOAT32_MAX, 1e-40, 2.0**-149):
        whole = np.full(x.shape, np.float32(amax), np.float64)
        _, scales = kernels.quantize_nvfp4_rows(torch.from_numpy(x), torch.tensor([float(amax)]))
        wanted = nvfp4.quantize(x.astype(np.float64), (1, 16), whole)
        assert scales.flatten().tolist() == [wanted.scales[row, 0] for row in range(len(random))]


def test_an_odd_number_of_columns_ends_in_a_zero_nibble():
    codes, scales = kernels.quantize_nvfp4_rows(torch.full((2, 17), 6.0), AMAX)
    assert codes.shape == (2, 9)
    assert scales.shape == (2, 2)
    assert (codes[:, -1] == 7).all()


@pytest.mark.parametrize("rows", [1, 2, 31, 32])
def test_the_columns_of_a_matrix_are_the_rows_of_its_transpose(rows):
    x = values((rows, 19))
    amax = kernels.amax(x)
    codes, scales = kernels.quantize_nvfp4_columns(x, amax)
    row_codes, row_scales = kernels.quantize_nvfp4_rows(x.T, amax)
    assert torch.equal(codes, row_codes.flatten())
    assert torch.equal(scales, row_scales.T)


def test_the_transpose_has_the_same_tiles():
    x = values((50, 34))
    amax = kernels.amax(x)
    for four_over_six in (False, True):
        codes, scales = kernels.quantize_nvfp4_tiles(x, amax, four_over_six=four_over_six)
        got = kernels.dequantize_nvfp4_tiles(codes, scales, amax, 34, torch.float32)
        if four_over_six:
            continue  # the sum of errors goes along rows first, so near ties may fall otherwise
        codes, scales_T = kernels.quantize_nvfp4_tiles(x.T, amax)
        transposed = kernels.dequantize_nvfp4_tiles(codes, scales_T, amax, 50, torch.float32)
        assert torch.equal(got.T, transposed)
        assert torch.equal(scales.T, scales_T)


# --- four over six -----------------------------------------------------------------------------


def test_four_over_six_errs_less_in_every_block_that_it_changes():
    x = torch.randn(64, 160)
    amax = kernels.amax(x)
    errors, all_scales = [], []
    for four_over_six in (False, True):
        codes, scales = kernels.quantize_nvfp4_rows(x, amax, four_over_six=four_over_six)
        got = kernels.dequantize_nvfp4_rows(codes, scales, amax, 160, torch.float32)
        errors.append((got - x).square().unflatten(1, (-1, 16)).sum(-1))
        all_scales.append(scales)
    changed = all_scales[0] != all_scales[1]
    assert 0.1 < changed.float().mean() < 0.9
    assert (errors[1][changed] < errors[0][changed]).all()


def test_a_tie_of_four_and_six_goes_to_six():
    x = torch.zeros(1, 16)
    x[0, 0] = 6.0
    _, scales = kernels.quantize_nvfp4_rows(x, AMAX, four_over_six=True)
    assert scales.tolist() == [[0x38]]


# --- stochastic rounding -----------------------------------------------------------------------


def draws_of(value: float, seeds: int, width: int = 1600) -> torch.Tensor:
    """``value`` cast again and again; its blocks have a scale of one."""
    x = torch.full((1, width), value)
    x[:, ::16] = 6.0
    drawn = []
    for seed in range(seeds):
        codes, scales = kernels.quantize_nvfp4_rows(x, AMAX, None, torch.tensor([seed, 9]))
        assert scales.unique().tolist() == [0x38]
        got = kernels.dequantize_nvfp4_rows(codes, scales, AMAX, width, torch.float32)
        drawn.append(got.unflatten(1, (-1, 16))[..., 1:].flatten())
    return torch.cat(drawn)


@pytest.mark.parametrize("value", [0.1, 0.25, 0.6, 1.9, 2.2, 3.5, 4.25, 5.9, -0.3, -2.75, -5.0])
def test_every_draw_is_a_neighbour_and_the_mean_of_100000_is_the_value(value):
    drawn = draws_of(value, 67)
    assert len(drawn) > 100_000
    magnitudes = nvfp4.MAGNITUDES
    above = int(np.searchsorted(magnitudes, abs(value), side="right"))
    low, high = magnitudes[above - 1], magnitudes[above]
    assert drawn.abs().unique().tolist() == [low, high]
    assert (drawn.sign() * np.sign(value) >= 0).all()
    # Eight bits give the probability in steps of 1/256, rounded down.
    share = np.floor((abs(value) - low) / (high - low) * 256) / 256
    mean = low + share * (high - low)
    deviation = (high - low) * (share * (1 - share)) ** 0.5
    assert abs(drawn.abs().mean().item() - mean) < 5 * deviation / len(drawn) ** 0.5
    assert abs(drawn.mean().item() - value) < (high - low) / 256 + 5 * deviation / 300


@pytest.mark.parametrize("value", [0.0, 0.5, 1.5, 2.0, 3.0, 4.0, 6.0, -1.0, -6.0])
def test_a_value_that_has_a_code_always_gets_it(value):
    assert draws_of(value, 3).unique().tolist() == [value]


def test_the_same_seed_draws_the_same_and_another_seed_or_offset_does_not():
    x = torch.rand(8, 64)
    amax = kernels.amax(x)

    def cast(seed, offset):
        return kernels.quantize_nvfp4_rows(x, amax, None, torch.tensor([seed, offset]))[0]

    assert torch.equal(cast(1, 2), cast(1, 2))
    assert not torch.equal(cast(1, 2), cast(2, 2))
    assert not torch.equal(cast(1, 2), cast(1, 3))


def test_a_tensor_drawn_along_two_directions_gets_independent_draws():
    x = torch.full((64, 64), 0.25)
    x[::16, ::16] = 6.0
    x[:, 0], x[0] = 6.0, 6.0
    amax = kernels.amax(x)
    rows = kernels.quantize_nvfp4_rows(x, amax, None, PAIR)
    columns = kernels.quantize_nvfp4_columns(x.T.contiguous(), amax, None, None, PAIR)
    assert not torch.equal(rows[0].flatten(), columns[0])


def test_random_rounding_errs_more_than_the_nearest_but_less_in_the_mean():
    x = torch.rand(16, 256) * 4
    amax = kernels.amax(x)

    def cast(seed):
        codes, scales = kernels.quantize_nvfp4_rows(x, amax, None, seed)
        return kernels.dequantize_nvfp4_rows(codes, scales, amax, 256, torch.float32)

    nearest = (cast(None) - x).abs().mean()
    drawn = torch.stack([cast(torch.tensor([seed, 0])) for seed in range(64)])
    assert (drawn[0] - x).abs().mean() > nearest
    assert (drawn.mean(0) - x).abs().mean() < nearest / 2


def test_results_are_contiguous_and_the_same_from_any_strides():
    x, ends = values((65, 40)).T, torch.tensor([7, 40], dtype=torch.int32)
    rotation = kernels.hadamard_matrix(x.device)

    def quantize(x):
        one, two = kernels.amax(x), kernels.group_amax(x, ends)
        return (
            *kernels.quantize_nvfp4_rows(x, one, None, PAIR),
            *kernels.quantize_nvfp4_columns(x, one),
            *kernels.quantize_nvfp4_columns(x, two, ends, rotation, PAIR),
            *kernels.quantize_nvfp4_tiles(x, two, ends, PAIR, four_over_six=True),
        )

    for got, wanted in zip(quantize(x), quantize(x.contiguous()), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, wanted)


def test_random_tiles_are_the_definition():
    x = values((32, 20))
    amax = kernels.amax(x)
    codes, _ = kernels.quantize_nvfp4_tiles(x, amax, None, PAIR)
    whole = nvfp4.spread_amax(matrix(x), (1 << 60, 1 << 60), None)
    random = nvfp4.random_tiles((32, 20), (11, 12))
    wanted = nvfp4.quantize(matrix(x), (16, 16), whole, random=random)
    assert_same(codes, nvfp4.pack(wanted.nibbles))
