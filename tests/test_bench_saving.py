"""The benchmark compares before it times, and writes what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash import bench
from backstash.bench import saving
from backstash.errors import ConfigError
from backstash.formats import MXFP8
from backstash.saving import prepare_for_saving, restore_from_saved, slots

ROWS = 9


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstash.bench.timing.BATCH_S", 1e-6)


@pytest.mark.usefixtures("quick")
def test_a_run_prints_the_ratio_first_and_appends_a_line_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["saving", "--results", str(tmp_path), "--repeats", "3"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "saving.jsonl").read_text().splitlines()]
    assert [line["values"] for line in lines] == [64, 64, 128, 8, 128, 256, 34, 34, 34]
    assert len(lines) == ROWS
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "quartiles" in line)
    assert header.index("ratio") < header.index("ours")


@pytest.mark.parametrize("values", [[], [None], [None, torch.ones(2), None]], ids=len)
def test_the_loop_gives_back_what_it_was_given(values: list[Any]) -> None:
    tensors, objects = saving.loop_prepare(*values)
    restored = saving.loop_restore(objects, tuple(tensors))
    assert all(one is other for one, other in zip(restored, values, strict=True))


def test_the_loop_gives_the_buffers_of_a_quantized_value_back() -> None:
    quantized = MXFP8.quantize(torch.randn(32, 32))
    emptied = saving.Emptied(quantized)
    buffers = list(emptied.buffers)
    tensors, objects = saving.loop_prepare(torch.ones(1), emptied, None)
    assert emptied.buffers == []
    saving.loop_restore(objects, tuple(tensors))
    assert all(one is other for one, other in zip(emptied.buffers, buffers, strict=True))


def test_nothing_is_timed_when_the_outputs_disagree() -> None:
    one, other = torch.ones(1), torch.ones(1)
    with pytest.raises(RuntimeError, match="value 1 did not come back"):
        saving.check_outputs([one, other], [one, one])


def test_saving_without_the_question_gives_plain_weights_back() -> None:
    values = saving.grouped_values(torch.nn.Parameter)
    tensors, records = saving.without_question()(*values)
    saving.check_same(values, restore_from_saved(records, tensors))


def test_saving_without_the_question_knows_no_distributed_weights() -> None:
    unaware: Any = saving.without_question()
    assert slots.layout_of((saving.Shard,)).common
    assert not unaware.__globals__["layout_of"]((saving.Shard,)).common
    assert unaware.__globals__["layout_of"]((torch.nn.Parameter,)).common


def test_a_distributed_weight_is_seen_by_no_hook() -> None:
    values = saving.grouped_values(saving.Shard)
    tensors, _ = prepare_for_saving(*values)
    assert len(tensors) == len(values) - saving.EXPERTS


@pytest.mark.parametrize(
    ("case", "repeats", "message"),
    [("stashing", 3, "one of the cases"), ("saving", 0, "repeats"), ("saving", -1, "repeats")],
)
def test_a_case_or_count_that_means_nothing_is_refused(
    case: str, repeats: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.Options(case, repeats=repeats)


def test_without_a_case_the_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    assert "saving     What it costs to save" in printed
    assert "moe        What a Mixture-of-Experts layer costs" in printed
