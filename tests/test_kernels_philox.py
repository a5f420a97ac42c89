"""Random bytes: the published numbers of Philox, and that every part of the counter counts."""

import pytest
import torch

import definitions_nvfp4 as definitions
from backstash import kernels
from backstash.kernels.reference.philox import philox, random_bytes

# From the generator's own tests: counter, key, and what comes out.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN, ids=["zeros", "ones", "pi"])
def test_the_published_numbers_come_out(counter, key, wanted):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    words = philox((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert [int(word) for word in words] == wanted
    assert definitions.philox(counter, key) == wanted


@pytest.mark.parametrize("seed", [(0, 0), (7, 5), (2**62 + 3, 2**40 + 1)], ids=str)
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_bytes_are_the_definition(seed, stream):
    found = random_bytes(torch.tensor(seed), 5, stream)
    assert found.tolist() == [definitions.random_bytes(seed, n, stream) for n in range(5)]


def test_all_bytes_come_equally_often():
    found = random_bytes(torch.tensor([3, 4]), 16_000, 0)
    counts = found.flatten().bincount(minlength=256)
    assert counts.shape == (256,)
    # A thousand each; the deviation is that of a binomial.
    assert (counts - 1000).abs().max() < 6 * 1000**0.5


@pytest.mark.fresh_draws
def test_a_seed_is_drawn_from_torchs_generator():
    device = torch.device("cpu")
    torch.manual_seed(5)
    first, second = kernels.draw_seed(device), kernels.draw_seed(device)
    torch.manual_seed(5)
    assert torch.equal(kernels.draw_seed(device), first)
    assert not torch.equal(first, second)
    assert first.dtype is torch.int64
