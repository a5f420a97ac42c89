"""What the pages and the examples show runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

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
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page_id(page)} links to {target}"
