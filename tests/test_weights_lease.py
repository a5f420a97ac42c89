"""Lent memory is out until its last reader is gone, and then at once no more."""

from __future__ import annotations

import torch

from backstash.weights.lease import Leases

CPU = torch.device("cpu")


def test_memory_is_out_until_the_last_view_of_it_is_gone() -> None:
    leases = Leases()
    lent = leases.lend((4, 2), torch.float32, CPU)
    reader = lent[:1].view(2)
    assert leases.bytes == 32
    del lent
    assert leases.bytes == 32
    del reader
    assert leases.bytes == 0


def test_no_bytes_are_lent_twice_while_somebody_reads_them() -> None:
    leases = Leases()
    held = [leases.lend((8,), torch.float32, CPU) for _ in range(20)]
    assert len({tensor.data_ptr() for tensor in held}) == 20


def test_the_peak_is_the_most_that_was_out_at_once() -> None:
    leases = Leases()
    for _ in range(3):
        pair = [leases.lend((8,), torch.uint8, CPU) for _ in range(2)]
        del pair
    assert leases.peak_bytes == 16
    held = leases.lend((4,), torch.uint8, CPU)
    leases.reset_peak()
    assert leases.peak_bytes == 4 == held.nbytes
