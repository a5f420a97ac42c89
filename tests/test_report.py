"""A page is one well-formed file that shows every number and needs nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from backstash.report import Point, loss_curves, write_page

CURVES: dict[str, list[Point]] = {
    "training": [(1, 5.5), (2, 4.0), (3, 3.0)],
    "held out": [(0, 5.6), (3, 3.1)],
}


def page(path: Path) -> str:
    write_page(
        path,
        title="a <run>",
        rows=[("tokens/s", "1,234"), ("<script>", "&")],
        curves=CURVES,
        level=("unigram entropy", 3.3),
        sample="if a < b and c > d:\n    pass",
    )
    return path.read_text(encoding="utf-8")


def test_a_page_shows_title_rows_curve_and_sample(tmp_path: Path) -> None:
    text = page(tmp_path / "index.html")
    assert "<h1>a &lt;run&gt;</h1>" in text
    assert "<tr><td>tokens/s</td><td>1,234</td></tr>" in text
    assert "if a &lt; b and c &gt; d:" in text
    assert text.count("<polyline") == 2
    assert "unigram entropy 3.30" in text


def test_text_cannot_become_markup(tmp_path: Path) -> None:
    assert "<script>" not in page(tmp_path / "index.html")


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = page(tmp_path / "index.html")
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)


@pytest.mark.parametrize(
    "curves", [CURVES, {}, {"training": []}, {"training": [(0, 0.0)]}], ids=str
)
def test_the_curve_is_well_formed_and_inside_its_frame(curves: dict[str, list[Point]]) -> None:
    svg = ElementTree.fromstring(loss_curves(curves, ("level", 3.3)).replace("var(--line)", "gray"))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for line in svg.iter("polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_a_lower_loss_is_drawn_lower() -> None:
    svg = ElementTree.fromstring(loss_curves(CURVES, ("level", 1.0)))
    heights = [float(p.split(",")[1]) for p in next(svg.iter("polyline")).attrib["points"].split()]
    assert heights == sorted(heights)
