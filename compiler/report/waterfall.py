"""Parts of a total as bars."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

COLOURS = ("cyan", "blue", "magenta", "green", "yellow", "bright_blue", "red", "white")


@dataclass(frozen=True)
class Waterfall:
    """Labelled parts of a total, one line each, every bar starting where the one before ended.

    `capacity`, where given, is the full width; else `sum(parts)` is.
    """

    parts: tuple[tuple[str, float, str], ...]
    """(label, amount, amount as text)"""
    capacity: float = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        labels = max(len(label) for label, _, _ in self.parts)
        figures = max(len(text) for _, _, text in self.parts)
        width = max(10, min(options.max_width - labels - figures - 6, 72))
        total = sum(amount for _, amount, _ in self.parts)
        full = max(total, self.capacity) or 1.0
        block = "#" if options.ascii_only else "█"
        start = 0.0
        for k, (label, amount, text) in enumerate(self.parts):
            first, last = round(start / full * width), round((start + amount) / full * width)
            start += amount
            yield Segment(f"  {label:<{labels}}  {text:>{figures}}  {' ' * first}")
            bar = block * (last - first) if last > first or not amount else "|"
            yield Segment(bar, Style.parse(COLOURS[k % len(COLOURS)]))
            yield Segment.line()
