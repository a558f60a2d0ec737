"""A sweep as a drawing: tokens (or samples) a second over what is swept, in plain SVG.

The horizontal axis is logarithmic, since sweeps double; the vertical one starts at 0. Every plan is
a point with its strategy above it; a setting without a plan is a cross on the axis.
"""

import math
from html import escape

from meshfold.report.plan_rows import PlanRow, RowTable, rate_text

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 40, 40, 60
"""Margins, in pixels as the two above."""


def sweep_svg(table: RowTable, title: str) -> str:
    """The drawing, ending in a newline. title: what was planned."""
    rates = [row.figures.rate for row in table.rows if row.figures]
    most = max(rates, default=1.0)
    points = [(_x(table, row), _y(row, most), row) for row in table.rows]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, row in points if row.figures)
    floor = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, f"{title}: {table.unit} per second", size=14),
        f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="black"/>',
        _text(LEFT - 6, TOP + 4, _rate(most), anchor="end"),
        _text(LEFT - 6, floor + 4, "0", anchor="end"),
        f'<polyline points="{line}" fill="none" stroke="steelblue" stroke-width="2"/>',
        *(part for x, y, row in points for part in _point(table, x, y, row)),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, table.over, anchor="middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(table: RowTable, row: PlanRow) -> float:
    values = [math.log(table.value(r)) for r in table.rows]
    least, most = min(values), max(values)
    share = (math.log(table.value(row)) - least) / (most - least) if most > least else 0.5
    return LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 40)


def _y(row: PlanRow, most: float) -> float:
    share = row.figures.rate / most if row.figures else 0.0
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _point(table: RowTable, x: float, y: float, row: PlanRow) -> list[str]:
    below = _text(x, HEIGHT - BOTTOM + 18, table.label(row), anchor="middle")
    if row.figures is None:
        cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8M{x - 4:.1f} {y + 4:.1f}l8 -8"
        return [f'<path d="{cross}" stroke="firebrick" fill="none"/>', below]
    name = f"{row.figures.strategy}, {rate_text(row.figures)}"
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="steelblue"/>',
        _text(x, y - 8, name, anchor="middle", size=9),
        below,
    ]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"
