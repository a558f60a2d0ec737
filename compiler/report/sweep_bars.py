"""Rates of a sweep as bars in a terminal."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from meshfold.report.plan_rows import RowTable, rate_text

MOST_COLUMNS = 72


@dataclass(frozen=True)
class SweepBars:
    """One bar per row, as long as its rate; a row without a plan has none."""

    table: RowTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.table.rows
        labels = [self.table.label(row) for row in rows]
        texts = [f"{rate_text(r.figures)} {self.table.unit}/s" if r.figures else "" for r in rows]
        of_label, of_text = max(map(len, labels)), max(map(len, texts))
        width = max(10, min(options.max_width - of_label - of_text - 6, MOST_COLUMNS))
        most = max((row.figures.rate for row in rows if row.figures), default=1.0)
        block = "#" if options.ascii_only else "█"
        for row, label, text in zip(rows, labels, texts, strict=True):
            yield Segment(f"  {label:>{of_label}}  {text:>{of_text}}  ")
            if row.figures:
                length = max(1, round(row.figures.rate / most * width))
                yield Segment(block * length, Style.parse("cyan"))
            yield Segment.line()
