"""The case compares with fully_shard before it times, and counts the bytes of both alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from backstash import bench
from backstash.bench import weights
from backstash.bench.weights_contest import Contest, Setting, Shape

CPU = torch.device("cpu")
SHAPE = Shape(blocks=2, hidden=64, ffn=96, tokens=8, dtype=torch.float32)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    store = dist.HashStore()  # pyright: ignore
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.distributed
def test_two_processes_print_the_ratio_first_and_append_a_line_a_gather(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert bench.main(["weights", "--results", str(tmp_path), "--repeats", "1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "weights.jsonl").read_text().splitlines()]
    settings = [
        Setting(
            gather=line["gather"],
            recipe=line["recipe"],
            parts=32 // line["tokens"],
            carrier=line["carrier"],
        )
        for line in lines
    ]
    assert settings == list(weights.SETTINGS)
    for line in lines:
        assert line["ranks"] == 2
        assert line["values"] == 2 * 2 * 64 * 128
        assert line["fully_shard"]["wire_bytes"] == 3 * 4 * line["values"]
        assert line["ours"]["part_bytes"] == line["fully_shard"]["part_bytes"] == 2 * line["values"]
        assert line["ours"]["peak_bytes"] is None
        assert line["ours"]["overlap"] is None
    assert lines[0]["ours"]["wire_bytes"] == lines[0]["fully_shard"]["wire_bytes"]
    assert lines[2]["ours"]["wire_bytes"] == (4 + 2 + 2 / 32) * lines[2]["values"]
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "ratio" in line)
    assert header.split("┃")[1].strip() == "ratio"


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("setting", weights.SETTINGS, ids=str)
def test_a_group_of_one_is_measured_too_and_sends_nothing(setting: Setting) -> None:
    row = weights.measure_contest(Contest(setting, SHAPE, CPU), repeats=2)
    assert row.ranks == 1
    assert row.pair.repeats == 2
    assert row.ours.wire_bytes == row.fully_shard.wire_bytes == 0
    assert row.ours.part_bytes == row.values * 4
    assert set(row.errors) == {"loss", "gradient"}
    if setting.gather == "high_precision":
        assert max(row.errors.values()) < 1e-6


def test_ranks_without_rows_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    weights.show([])
    assert capsys.readouterr().out == ""
