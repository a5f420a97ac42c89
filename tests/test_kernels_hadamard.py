"""The Hadamard transform: the published matrix, its inverse, and its definition bit for bit."""

import numpy as np
import pytest
import torch

import definitions
import definitions_nvfp4
from backstash import kernels
from backstash.kernels.reference.hadamard import rotate, rotate_back
from quantizer_cases import (
    assert_same,
    by_counts,
    by_dtype,
    by_special,
    grouped_values,
    matrix,
    special_matrix,
    values,
)

R = kernels.hadamard_matrix(torch.device("cpu"))


def test_the_matrix_is_the_published_one_and_its_transpose_undoes_it():
    assert R.dtype is torch.bfloat16
    assert_same(R, definitions_nvfp4.hadamard())
    assert torch.equal(R.float() @ R.float().T, torch.eye(16))
    assert torch.equal(R.float().T @ R.float(), torch.eye(16))
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert (R[:, 0] * 4).tolist() == signs


@by_dtype
def test_rows_are_mixed_and_unmixed_as_defined(dtype):
    x = values((3 * 16, 7), dtype)
    wanted = definitions_nvfp4.rotate(matrix(x))
    found = rotate(x.float().unflatten(0, (3, 16)), R)
    assert_same(found, wanted)
    assert_same(rotate_back(found, R), definitions_nvfp4.rotate_back(wanted))


@by_special
def test_special_values_are_mixed_as_defined(special):
    x = special_matrix(special, (16, 21))
    assert_same(rotate(x[None], R), definitions_nvfp4.rotate(matrix(x)))


def test_small_whole_numbers_come_back_exactly():
    x = torch.randint(-8, 9, (2, 16, 5)).float()
    assert torch.equal(rotate_back(rotate(x, R), R), x)


def test_one_large_value_is_spread_over_its_block():
    x = torch.zeros(1, 16, 1)
    x[0, 3] = 64.0
    assert rotate(x, R).abs().flatten().tolist() == [16.0] * 16


@by_counts
def test_the_largest_magnitudes_are_those_after_the_transform(counts):
    x, ends = grouped_values(counts, 5)
    padded, sizes = definitions_nvfp4.padded_groups(matrix(x), counts)
    groups = np.split(definitions_nvfp4.rotate(padded), np.cumsum(sizes)[:-1])
    wanted = [[definitions.amax(column) for column in group.T] for group in groups]
    assert kernels.rotated_column_amax(x, R, ends).tolist() == wanted


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
def test_one_matrix_is_one_group(rows):
    x = values((rows, 3))
    ends = torch.tensor([rows], dtype=torch.int32)
    one = kernels.rotated_column_amax(x, R)
    assert torch.equal(one, kernels.rotated_column_amax(x, R, ends))
