"""A factory is found by the name of its module, or of its file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfold.errors import OptionError
from meshfold.models.factory import find_factory

SOURCE = """
from dataclasses import dataclass
from beside_for_test import NUMBER

@dataclass
class Made:  # which looks for its module in sys.modules
    number: int

def made():
    return Made(NUMBER)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a dot in its name, beneath the working one, with two modules."""
    folder = tmp_path / "exp.v2"
    folder.mkdir()
    (folder / "made-for-test.py").write_text(SOURCE)
    (folder / "beside_for_test.py").write_text("NUMBER = 3\n")
    (folder / "json.py").write_text("def made(): pass\n")
    (folder / "syntax_for_test.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in ("made-for-test", "beside_for_test"):
        sys.modules.pop(name, None)


def test_of_a_file(folder: Path) -> None:
    factory = find_factory("exp.v2/made-for-test.py:made")
    assert factory().number == 3
    assert find_factory(f"{folder}/made-for-test.py:made") is factory, "it is imported once"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("exp.v2/none.py:made", "no file '.*none.py'; correct the path"),
        ("exp.v2/made-for-test.py:other", "module 'exp.v2/made-for-test.py' has no function"),
        ("exp.v2/made-for-test.py:", "write package.module:factory"),
        ("exp.v2/json.py:made", "there is another module 'json', which is in use; rename the file"),
        ("exp.v2/syntax_for_test.py:made", "importing it raised SyntaxError.*correct the module"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(folder: Path, argument: str, message: str) -> None:
    for _ in range(2):
        with pytest.raises(OptionError, match=message):
            find_factory(argument)
    assert "syntax_for_test" not in sys.modules
