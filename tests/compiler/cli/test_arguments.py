"""Arguments: whole numbers in ASCII, and files that a command may write."""

from pathlib import Path

import click
import pytest

from meshfold.cli.arguments import (
    Counts,
    FilePath,
    Number,
    Price,
    check_output,
    parse_over,
    parse_pins,
)
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


@pytest.mark.parametrize("one", ["c.json", "mine.models:f", "mine:f", "mine/models.py:f"])
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


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", (8,)),
        ("0", (0,)),
        ("8..64", (8, 16, 32, 64)),
        ("8..100", (8, 16, 32, 64, 100)),
        ("8..8", (8,)),
        ("24,8,24", (8, 24)),
    ],
)
def test_counts_double_up_to_the_end_of_a_range(text: str, counts: tuple[int, ...]) -> None:
    assert Counts().convert(text, None, None) == counts
    assert Counts().convert(counts, None, None) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64..8", "write the smaller first"),
        ("8..", "'' is no whole number"),
        ("0..8", "'0' is no whole number from 1"),
        ("8,x", "'x' is no whole number"),
        ("2²..8", "'2²' is no whole number"),
        (",".join(map(str, range(1, 66))), "more than 64 points"),
        ("x", "not a valid integer"),
    ],
)
def test_what_is_no_range_is_refused(text: str, message: str) -> None:
    with pytest.raises(click.BadParameter, match=message):
        Counts().convert(text, None, None)


def test_over_names_what_is_swept_and_its_points() -> None:
    assert parse_over("memory=16GB..40GB") == ("memory", (16 * 10**9, 32 * 10**9, 40 * 10**9))
    assert parse_over("batch=64,96") == ("batch", (64, 96))
    assert parse_over("seq=2048") == ("seq", (2048,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=1..8", "--over tp=1..8: cannot be swept; write memory=16GB..80GB, batch="),
        ("batch", "--over batch: cannot be swept; write"),
        ("memory=16..80", "--over '16' is no amount of memory"),
        ("memory=0B..1GB", "no range"),
        ("seq=8..4", "--over 8..4: no range"),
    ],
)
def test_what_cannot_be_swept_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_over(text)


def test_prices() -> None:
    assert Price().convert("2.50", None, None) == 2.5
    for text in ("0", "nan", "inf", "-1", "1e3", "²", ""):
        with pytest.raises(click.BadParameter, match="is no price above 0"):
            Price().convert(text, None, None)
