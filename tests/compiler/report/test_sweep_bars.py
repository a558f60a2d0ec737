"""Rates of a sweep as bars."""

import io

from rich.console import Console
from support.programs.plans import rows_of_rates

from meshfold.report.sweep_bars import SweepBars


def test_a_bar_is_as_long_as_the_rate() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    Console(file=stream, width=42).print(SweepBars(rows_of_rates({8: 500, 16: 1000, 32: None})))
    stream.seek(0)
    assert [line.rstrip() for line in stream.read().splitlines()] == [
        "   8     500 tokens/s  " + "#" * 10,
        "  16  1.00 k tokens/s  " + "#" * 19,
        "  32",
    ]


def test_a_sweep_without_a_plan_has_no_bars() -> None:
    stream = io.StringIO()
    Console(file=stream, width=40).print(SweepBars(rows_of_rates({8: None})))
    assert stream.getvalue().strip() == "8"
