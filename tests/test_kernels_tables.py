"""Tables that are made together are those of each product, and no two products get one."""

from __future__ import annotations

import importlib
import threading

import pytest
import torch

from backstash import kernels
from backstash.kernels.reference.tables import shared_tables
from interpreter import by_device, run_interpreted
from quantizer_cases import by_counts

BLOCK = 32


@pytest.mark.slow
def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def file(name):
    return importlib.import_module(f"backstash.kernels.{name}")


def written(table):
    """What of a table of blocks is written: three numbers each, and two of the first entries."""
    return [table[:, :3].tolist(), int(table[0, 3]), int(table[1, 3]) if len(table) > 1 else 0]


@by_device
@by_counts
@pytest.mark.parametrize("products", [(1, 0), (1, 2), (3, 2)], ids=str)
def test_each_product_gets_the_table_it_would_have_made(counts, products, device):
    ends_G = torch.tensor(counts, device=device).cumsum(0).int()
    rows = sum(counts) + 40
    wanted = written(file("blocks").block_table(ends_G, rows, BLOCK))
    order = file("tiles").groups_by_size(ends_G, rows).tolist()
    with kernels.sharing_tables(ends_G, *products):
        row_tables = [file("tables").row_table(ends_G, rows, BLOCK) for _ in range(4)]
        orders = [file("tables").column_table(ends_G, rows) for _ in range(3)]
    assert [written(table) for table in row_tables] == [wanted] * 4
    assert [table.tolist() for table in orders] == [order] * 3
    assert len({table.data_ptr() for table in row_tables + orders}) == 7


@by_device
def test_one_launch_writes_all_that_is_expected(device, monkeypatch):
    tables, made = file("tables"), []
    make = tables._make
    monkeypatch.setattr(tables, "_make", lambda *given: made.append(given[1:]) or make(*given))
    ends_G = torch.tensor([40, 100], dtype=torch.int32, device=device)
    with kernels.sharing_tables(ends_G, row_products=2, column_products=2):
        for rows in (140, 150):
            for _ in range(2):
                tables.row_table(ends_G, rows, BLOCK)
                tables.column_table(ends_G, rows)
    assert made == [(140, BLOCK), (150, BLOCK)]


@by_device
def test_other_groups_have_tables_of_their_own(device):
    ends_G = torch.tensor([40, 100], dtype=torch.int32, device=device)
    others_G = torch.tensor([3, 5, 7], dtype=torch.int32, device=device)
    with kernels.sharing_tables(ends_G, row_products=2, column_products=2):
        file("tables").row_table(ends_G, 100, BLOCK)
        assert len(file("tables").column_table(others_G, 100)) == 3
        table = file("tables").row_table(others_G, 100, BLOCK)
    assert written(table) == written(file("blocks").block_table(others_G, 100, BLOCK))


def test_only_those_inside_share_and_only_on_their_thread():
    ends_G, others_G = torch.tensor([1]), torch.tensor([1])
    found = []
    with kernels.sharing_tables(ends_G, 1):
        outer = shared_tables(ends_G)
        assert shared_tables(others_G) is None
        with kernels.sharing_tables(others_G, 1):
            assert shared_tables(ends_G) is None
        assert shared_tables(ends_G) is outer
        thread = threading.Thread(target=lambda: found.append(shared_tables(ends_G)))
        thread.start()
        thread.join()
    assert outer is not None
    assert found == [None]
    assert shared_tables(ends_G) is None
