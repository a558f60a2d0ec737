"""JSON of others: what is read, what is refused, and that limits hold before anything expands."""

import json
import os
from pathlib import Path

import pytest

from meshfold.plan_file import json_input
from meshfold.plan_file.json_input import JsonFault, parse_json, read_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON (Expecting value"),
        ('{"a": 1, "b": 2, "a": 3}', "not JSON (the key 'a' is there twice)"),
        ('{"a": {"b": 1, "b": 1}}', "not JSON (the key 'b' is there twice)"),
        ("[NaN]", "not JSON (NaN is no number)"),
        ("[-Infinity]", "not JSON (-Infinity is no number)"),
        ("1e999", "not read (a number of 1e100 or more)"),
        ("1.5E+0100", "not read (a number of 1e100 or more)"),
        ("9" * 65, "not read (a number of over 64 characters)"),
        ("0." + "1" * 5000, "not read (a number of over 64 characters)"),
        ("[" * 65 + "]" * 65, "not read (nested more than 64 deep)"),
        ('{"a":' * 100_000, "not read (nested more than 64 deep)"),
        ("[" + "1," * 1_000_000 + "1]", "not read (over 1000000 values)"),
        ('"\\ud800"', "not JSON (a string has half of a surrogate pair)"),
        ('{"\\udfff": 1}', "not JSON (a string has half of a surrogate pair)"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(JsonFault) as caught:
        parse_json(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 64 + "]" * 64,
        "9" * 64,
        "[1e-300, 1e99, -0.1]",
        '"\\ud83d\\ude00 [[[{{{ 1e999 \\" ' + "9" * 100 + '"',
        '"\\\\ud800"',
        json.dumps(["[" * 100, '"' * 7, "\\" * 9, "é", "\x1b"]),
    ],
)
def test_what_is_within_the_limits_is_what_json_reads(text: str) -> None:
    assert parse_json(text) == json.loads(text)


def test_only_regular_files_of_bounded_size_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(JsonFault, match="no regular file"):
            read_json(path)
    with pytest.raises(JsonFault, match="cannot be read .No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(JsonFault, match="no path .*embedded null"):
        read_json(tmp_path / "a\x00b")
    monkeypatch.setattr(json_input, "MOST_BYTES", 4)
    path = tmp_path / "a.json"
    path.write_text("1234")
    assert read_json(path) == 1234
    path.write_text("12345")
    with pytest.raises(JsonFault, match="over 4 bytes"):
        read_json(path)
