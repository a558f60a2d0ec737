"""Sections and tables that every printed page has."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshfold.report.terminal import lines_view


def section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(), lines_view([title], style="bold"), body)


def table_of(*columns: str, right: Iterable[str] = (), fold: Iterable[str] = ()) -> Table:
    """A plain table; columns of `right` are figures, those of `fold` may break over lines."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    numbers, texts = set(right), set(fold)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in numbers else "left",
            overflow="fold",
            no_wrap=name not in texts,
        )
    return table


def indented(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2))
