"""What goes to a terminal: control characters of files and arguments are escaped in all of it."""

import re
from collections.abc import Iterable
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

MOST_CHARACTERS = 2000
"""Of a line of error."""

# C0 and C1 controls, line separators, marks that turn the direction of text, lone surrogates.
_HIDDEN = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(rf"[\x00-\x1f{_HIDDEN}]")
_CONTROL_IN_LINES = re.compile(rf"[\x00-\x09\x0b-\x1f{_HIDDEN}]")
_HIDDEN_IN_JSON = re.compile(rf"[{_HIDDEN}]")


def escaped(text: str) -> str:
    r"""The text on one line, as Python would write it: a newline becomes \n, an escape \x1b."""
    return _CONTROL.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """The same for text of several lines."""
    return _CONTROL_IN_LINES.sub(_escape, text)


def escaped_json(text: str) -> str:
    """JSON of the same value, without the control characters that JSON leaves in strings."""
    return _HIDDEN_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def error_line(text: str) -> str:
    """A message on one line of at most MOST_CHARACTERS; what is longer loses its middle."""
    line = escaped(" ".join(text.split()))
    if len(line) <= MOST_CHARACTERS:
        return line
    half = (MOST_CHARACTERS - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"


class _Terminal(Console):
    """A console that takes every text as it is: no markup, no emoji codes, no control codes."""

    def render_str(self, text: str, **style: Any) -> Text:
        plain = {"markup": False, "emoji": False, "highlight": False, "highlighter": None}
        return super().render_str(escaped(text), **style | plain)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_safe = segment.control or not _CONTROL_IN_LINES.search(segment.text)
            yield segment if is_safe else segment._replace(text=escaped_lines(segment.text))

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def print_view(view: RenderableType) -> None:
    """Prints a page on stdout."""
    _Terminal().print(view)


def lines_view(lines: Iterable[str], style: str = "") -> Text:
    """Lines of text, each of which stays one."""
    return Text("\n".join(map(escaped, lines)), style=style)


def progress(text: str) -> Status:
    """A spinner on stderr while something long runs; nothing where stderr is no terminal."""
    return Console(stderr=True).status(lines_view([text]))
