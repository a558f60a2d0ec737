"""Bars of parts of a total."""

import io

from rich.console import Console

from meshfold.report.waterfall import Waterfall


def page(view: Waterfall, width: int, encoding: str = "utf-8") -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=stream, width=width).print(view)
    stream.seek(0)
    return [line.rstrip() for line in stream.read().splitlines()]


def test_a_waterfall_starts_each_bar_where_the_one_before_ended() -> None:
    parts = (("forward", 1.0, "1 s"), ("backward", 2.0, "2 s"), ("nothing", 0.0, "0 s"))
    assert page(Waterfall(parts), width=29) == [
        "  forward   1 s  ####".replace("#", "█"),
        "  backward  2 s      ########".replace("#", "█"),
        "  nothing   0 s",
    ]


def test_a_waterfall_shows_small_parts_and_what_is_free() -> None:
    parts = (("a", 1.0, "1"), ("b", 0.001, "0"), ("c", 4.0, "4"))
    assert page(Waterfall(parts, capacity=10.0), width=28, encoding="ascii") == [
        "  a  1  ##",
        "  b  0    |",
        "  c  4    ########",
    ]
