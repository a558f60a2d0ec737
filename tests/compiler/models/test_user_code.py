"""Code of the user: what it raises is one error, what it prints does not reach stdout."""

import sys

import pytest

from meshfold.errors import OptionError
from meshfold.models.user_code import one_line, user_code


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (ValueError(), "ValueError"),
        (SystemExit(0), "SystemExit: 0"),
        (BaseException("a"), "BaseException: a"),
        (GeneratorExit(), "GeneratorExit"),
        (RecursionError("deep"), "RecursionError: deep"),
        (Unprintable(), "Unprintable"),
    ],
)
def test_what_it_raises_is_one_error(
    error: BaseException, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError) as caught, user_code("m:f: the factory", remedy="correct it"):
        print("printed")
        raise error
    assert str(caught.value) == f"m:f: the factory raised {text}; correct it"
    assert one_line(error) == text
    assert capsys.readouterr() == ("", "")


def test_errors_of_ours_and_an_interrupt_pass() -> None:
    for error in (OptionError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, user_code("m:f", remedy="correct it"):
            raise error
        assert caught.value is error


def test_what_it_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with user_code("m:f", remedy="correct it"):
        print("one")
        print("two", file=sys.stderr)
    assert capsys.readouterr() == ("", "one\ntwo\n")
