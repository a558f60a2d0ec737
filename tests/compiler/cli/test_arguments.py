"""Arguments: whole numbers in ASCII, and files that a command may write."""

from pathlib import Path

import click
import pytest

from meshfold.cli.arguments import FilePath, Number, check_output, parse_pins
from meshfold.errors import OptionError


@pytest.mark.parametrize("text", ["²", "٣", "1_0", "+1", " 1", "1.0", "", "9" * 5000, "2147483648"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Number().convert(text, None, None)
    assert parse_pins((f"tp={text}",))["tp"] == text if text not in ("", "2147483648") else True


@pytest.mark.parametrize("text", ["0", "-1", "007", "2147483647"])
def test_numbers(text: str) -> None:
    assert Number().convert(text, None, None) == parse_pins((f"tp={text}",))["tp"] == int(text)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
def test_what_no_path_can_be_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no path"):
        FilePath().convert(text, None, None)


@pytest.mark.parametrize("text", ["", "none/none", "/dev/null", "\udcff", "a" * 300])
def test_paths(text: str) -> None:
    assert FilePath().convert(text, None, None) == Path(text)


@pytest.mark.parametrize("one", ["c.json", "mine.models:f", "mine:f"])
def test_inputs_are_no_outputs(one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    package = "mine"
    for name in ("c.json", f"{package}/models.py", f"{package}/__init__.py"):
        Path(name).touch()
    target = {"c.json": "c.json", "mine:f": f"{package}/__init__.py"}.get(
        one, f"{package}/models.py"
    )
    with pytest.raises(OptionError, match=f"-o {target}: is an input of this command"):
        check_output("-o", Path(target), None, one)
    check_output("-o", Path("other.json"), None, one)
    check_output("-o", None, one)
