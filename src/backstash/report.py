"""A run as one page: a loss curve and a table in a single HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Point = tuple[float, float]
Place = Callable[[float, float], Point]

_WIDTH, _HEIGHT, _MARGIN = 720, 300, 44
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #c9d1d9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto;
       padding: 0 1rem; color: var(--ink); background: var(--paper); }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid var(--line); padding: .35rem .5rem; }
td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: 1rem; font-size: .85rem; }
svg { width: 100%; height: auto; font-size: 12px; }
svg text { fill: var(--ink); }
"""


def write_page(
    path: Path,
    *,
    title: str,
    rows: Sequence[tuple[str, str]],
    curves: Mapping[str, Sequence[Point]],
    level: tuple[str, float],
    sample: str,
) -> None:
    """Write the page.

    Args:
        path: file to write.
        title: heading.
        rows: names and values of the table.
        curves: points ``(step, loss)`` by name.
        level: name and height of a horizontal line to compare the curves with.
        sample: text that the model wrote.
    """
    cells = "\n".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
<h1>{html.escape(title)}</h1>
{loss_curves(curves, level)}
<table>
{cells}
</table>
<h2>What the model writes</h2>
<pre>{html.escape(sample)}</pre>
</html>
""",
        encoding="utf-8",
    )


def loss_curves(curves: Mapping[str, Sequence[Point]], level: tuple[str, float]) -> str:
    """Return an SVG of the curves over their steps, with a dashed line at ``level``."""
    points = [point for curve in curves.values() for point in curve]
    right = max((x for x, _ in points), default=1.0) or 1.0
    top = max([y for _, y in points] + [level[1]]) * 1.05

    def place(x: float, y: float) -> tuple[float, float]:
        across = _MARGIN + x / right * (_WIDTH - 2 * _MARGIN)
        return across, _HEIGHT - _MARGIN - y / top * (_HEIGHT - 2 * _MARGIN)

    parts = [*_axes(right, top, place), _level(level, right, place)]
    for curve, color in zip(curves.values(), ("#6e7781", "#0969da"), strict=False):
        if not curve:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        x, y = place(*curve[-1])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
    parts.append(_legend(list(curves)))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="loss over steps">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _axes(right: float, top: float, place: Place) -> list[str]:
    parts = []
    for tick in range(int(top) + 1):
        x, y = place(0, tick)
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
        parts.append(
            f'<line x1="{x:.1f}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="var(--line)" stroke-width="0.5"/>'
        )
    for part in range(5):
        x, y = place(right * part / 4, 0)
        parts.append(
            f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{right * part / 4:g}</text>'
        )
    return parts


def _level(level: tuple[str, float], right: float, place: Place) -> str:
    name, height = level
    (x1, y), (x2, _) = place(0, height), place(right, height)
    return (
        f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#cf222e" '
        f'stroke-dasharray="6 4"/><text x="{x2:.1f}" y="{y - 6:.1f}" text-anchor="end">'
        f"{html.escape(name)} {height:.2f}</text>"
    )


def _legend(names: list[str]) -> str:
    parts = []
    for index, (name, color) in enumerate(zip(names, ("#6e7781", "#0969da"), strict=False)):
        x, y = _WIDTH - _MARGIN - 150, 20 + 18 * index
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{y - 3}">{html.escape(name)}</text>')
    return "\n".join(parts)
