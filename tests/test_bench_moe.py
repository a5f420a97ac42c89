"""The layers of the benchmark agree before they are timed, and its rates and bytes are formulas."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash import bench
from backstash.bench import moe
from backstash.bench.moe import Case, Contest, Shape
from backstash.bench.workloads import IMBALANCES, Load
from backstash.errors import ConfigError
from backstash.recipes import recipe_names

CPU = torch.device("cpu")
LOAD = Load(tokens=32, experts=4, top_k=2, ranks=2)
SHAPE = Shape(name="tiny", load=LOAD, hidden=32, ffn=16, dtype=torch.float32)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstash.bench.timing.BATCH_S", 1e-6)
    monkeypatch.setattr(moe, "SHAPES", {"cpu": (SHAPE,)})
    monkeypatch.setattr(moe, "default_device", lambda: CPU)
    monkeypatch.setattr(moe, "recipe_names", lambda: ("mxfp8", "high_precision"))


@pytest.mark.usefixtures("tiny")
def test_a_run_prints_the_ratio_first_and_appends_a_line_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["moe", "--results", str(tmp_path), "--repeats", "1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "moe.jsonl").read_text().splitlines()]
    assert [line["recipe"] for line in lines[:2]] == ["high_precision", "mxfp8"]
    assert [line["imbalance"] for line in lines[1:]] == list(IMBALANCES)
    header = next(line for line in capsys.readouterr().out.splitlines() if "TFLOP/s" in line)
    assert header.split()[1] == "ratio"
    for line in lines:
        assert line["values"] == 32 * 2
        assert line["load"] == {"tokens": 32, "experts": 4, "top_k": 2, "ranks": 2}
        assert (line["hidden"], line["ffn"], line["dtype"]) == (32, 16, "float32")
        assert set(line["errors"]) == {"y", "x", "router", "fc1", "fc2"}
        assert line["device"]
        assert line["ours"]["peak_bytes"] is None
        assert line["queued"] is None
        for who, time in (("ours", "ours_us"), ("plain", "theirs_us")):
            for factor, pair, rate in ((6, "forward", "forward"), (18, "pair", "step")):
                flop = factor * 32 * 2 * 32 * 16
                wanted = flop / (line[pair][time] * 1e-6) / 1e12
                assert math.isclose(line[who][f"{rate}_tflops"], wanted, rel_tol=1e-9)


@pytest.mark.usefixtures("tiny")
def test_only_the_chosen_rows_are_measured(tmp_path: Path) -> None:
    chosen = ["--only", "mxfp8", "hot_rank"]
    assert bench.main(["moe", "--results", str(tmp_path), "--repeats", "1", *chosen]) == 0
    lines = [json.loads(line) for line in (tmp_path / "moe.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == [
        "tiny, mxfp8, balanced",
        "tiny, high_precision, hot_rank",
    ]
    with pytest.raises(ConfigError, match="no row's name contains 'lukewarm'"):
        moe.measure(1, ["lukewarm"])


@pytest.mark.parametrize("imbalance", IMBALANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_layers_agree_at_every_imbalance(imbalance: str, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    errors = Contest(Case(shape=shape, imbalance=imbalance), CPU).check_outputs()
    assert all(error <= moe.ROUNDINGS * torch.finfo(dtype).eps for error in errors.values())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_agrees_within_the_tolerance_of_its_formats(name: str) -> None:
    case = Case(shape=SHAPE, recipe=name)
    errors = Contest(case, CPU).check_outputs()
    assert max(errors.values()) <= moe.tolerance(case) < 1


@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_nothing_is_timed_when_the_outputs_disagree(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = Contest(Case(shape=SHAPE), CPU)
    forward = contest.plain.forward
    monkeypatch.setattr(contest.plain, "forward", lambda x_TH: forward(x_TH) * factor)
    with pytest.raises(RuntimeError, match="y in recipe high_precision differs"):
        contest.check_outputs()


def test_the_bytes_that_plain_pytorch_saves_grow_with_every_row_and_ours_with_the_tokens() -> None:
    contest = Contest(Case(shape=SHAPE), CPU)
    ours, plain = (
        contest.cost(forward, 1.0, 1.0).saved_bytes
        for forward in (contest.forward_ours, contest.forward_plain)
    )
    tokens, rows, hidden, ffn, item = 32, 64, 32, 16, 4
    # Choice and weight, the weight again in its row's place, source and slot; ends.
    routing = rows * (8 + 4 + 4 + 8 + 8) + 4 * 4
    assert ours == (tokens * hidden + rows * 2 * ffn) * item + routing
    # The rows, both halves of the pre-activation and what is made of them, the outputs.
    assert plain > (rows * hidden + rows * 4 * ffn + rows * hidden) * item


def test_every_recipe_and_every_imbalance_and_every_shape_is_a_case() -> None:
    for device, shapes in moe.SHAPES.items():
        cases = moe.cases(device)
        assert {case.recipe for case in cases} == set(recipe_names())
        assert {case.imbalance for case in cases} == set(IMBALANCES)
        assert {case.shape for case in cases} == set(shapes)
        assert len(cases) == len(set(cases))


def test_only_the_large_shape_on_a_gpu_is_promised_anything() -> None:
    large = moe.SHAPES["cuda"][0]
    sizes: dict[str, Any] = dataclasses.asdict(large.load)
    assert sizes == {"tokens": 32768, "experts": 128, "top_k": 8, "ranks": 8}
    assert (large.hidden, large.ffn) == (2048, 768)
    promised = [case for case in moe.cases("cuda") if case.target is not None]
    assert {case.shape for case in promised} == {large}
    assert {case.imbalance for case in promised} == {"balanced"}
    assert all(case.target is None for case in moe.cases("cpu"))


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_timed_to_its_end_and_its_peak_is_known() -> None:
    shape = dataclasses.replace(SHAPE, dtype=torch.bfloat16)
    row = moe.measure_case(Case(shape=shape), torch.device("cuda"), repeats=2)
    assert row.queued is not None
    assert row.queued.ours_us > 0
    assert row.queued.theirs_us > 0
    for cost in (row.ours, row.plain):
        assert cost.peak_bytes is not None
        assert cost.peak_bytes > cost.saved_bytes
