"""What the pages and the examples show runs as it stands."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from backstash import cli
from backstash.bench import Options
from backstash.stash import Statistics
from backstash.train.config import TrainConfig
from backstash.train.folder import RunFolder
from backstash.train.generate import GenerateConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST_EXAMPLE = 60


def code_of(page: Path) -> str:
    """The Python blocks of a page, as one program on the lines where they stand."""
    lines = []
    in_code = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            in_code = line == "```python"
            line = ""
        lines.append(line if in_code else "")
    return "\n".join(lines)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    program = compile(code_of(page), str(page), "exec")
    exec(program, {"__name__": "page"})


@pytest.mark.parametrize("example", EXAMPLES, ids=page_id)
def test_an_example_runs_and_says_something(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out
    assert len(example.read_text().splitlines()) < LONGEST_EXAMPLE


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", text_of(page)):
        other = page.parent / target if target else page
        assert other.exists(), f"{page_id(page)} links to {target}"
        if page.is_relative_to(ROOT / "docs"):
            # ``make docs`` puts no other file into the pages, and refuses a link to one.
            assert other.resolve().is_relative_to(ROOT / "docs"), f"{target} is no page"
        if anchor:
            assert anchor in anchors(other), f"{page_id(page)} links to {target}#{anchor}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """What the headings of a page are linked by."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).lower().split() for heading in headings)
    return {"-".join(each) for each in words}


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command of ours that a page shows."""
    blocks = re.findall(r"```bash\n(.*?)```", text_of(page), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("backstash") + 1 :] for line in words if "backstash" in line]


COMMANDS = [(page, words) for page in PAGES for words in commands_of(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page_id(page)}: {' '.join(w)}" for page, w in COMMANDS]
)
def test_a_command_of_a_page_has_options_that_there_are(
    page: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *rest = words
    if command in ("train", "estimate"):
        # A run that is gone on with need not be here.
        monkeypatch.setattr(RunFolder, "read_config", lambda folder: TrainConfig())
        assert isinstance(cli._train_config(command, rest), TrainConfig)
    elif rest and "--help" not in rest:
        kinds: dict[str, Any] = {"generate": GenerateConfig, "bench": Options}
        assert isinstance(tyro.cli(kinds[command], args=rest), kinds[command])
    else:
        assert command in cli.COMMANDS


def test_the_pages_show_every_command() -> None:
    assert {words[0] for _, words in COMMANDS} >= {"train", "generate", "estimate"}


def test_the_guide_of_the_stash_explains_every_number_of_its_statistics() -> None:
    text = text_of(ROOT / "docs" / "guides" / "stash.md")
    table = text[text.index("## Read the statistics") :]
    missing = [f.name for f in dataclasses.fields(Statistics) if f"`{f.name}`" not in table]
    assert not missing
