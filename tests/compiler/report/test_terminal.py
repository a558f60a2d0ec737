"""What goes to a terminal: no control character of a file, no markup, lines of bounded length."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group

from meshfold.report.tables import section, table_of
from meshfold.report.terminal import (
    MOST_CHARACTERS,
    error_line,
    escaped,
    escaped_json,
    escaped_lines,
    lines_view,
    print_view,
)

TEXTS = st.text(alphabet=st.characters(exclude_categories=()), max_size=40)


@given(TEXTS)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = (escaped(text), *escaped_lines(text).split("\n"), error_line(text))
    hidden = {chr(c) for c in (*range(32), *range(127, 160), 0x202E, 0x2028, 0x2066)}
    for line in shown:
        assert not hidden & set(line)
        line.encode("utf-8")


@given(TEXTS)
def test_json_keeps_its_value(text: str) -> None:
    document = json.dumps([text], ensure_ascii=False)
    assert json.loads(escaped_json(document)) == [text]
    assert "\x9b" not in escaped_json(document)


def test_a_long_line_loses_its_middle() -> None:
    assert error_line("a  b\n c") == "a b c"
    line = error_line("start " + "x" * 5000 + " end")
    assert len(line) <= MOST_CHARACTERS
    assert line.startswith("start x") and line.endswith("x end") and " ... " in line


@pytest.mark.parametrize("name", ["[/]", "[red]x[/red]", ":smile:", "a\x1b[31mb", "a\nb", "\ud800"])
def test_names_are_shown_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of("", name)
    table.add_row("", name)
    print_view(Group(section(name, table), lines_view([name]), name))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [escaped(name)] * 5
