"""Which files are the user's: the lines that messages name."""

import linecache
from pathlib import Path

import pytest
import torch

import meshfold
from meshfold.torch_compat.source_lines import is_user_file, line_in

PACKAGE = Path(meshfold.__file__).parents[1]
MODULES = sorted(str(path) for path in PACKAGE.rglob("*.py"))


def test_no_file_of_meshfold_is_the_users_however_deep_its_folder() -> None:
    assert len(MODULES) > 100
    assert [name for name in MODULES if is_user_file(name)] == []


@pytest.mark.parametrize("name", [torch.nn.__file__, linecache.__file__, "<string>"])
def test_libraries_are_not_the_users(name: str) -> None:
    assert not is_user_file(name)


def test_the_innermost_line_of_the_user_is_named() -> None:
    inside = MODULES[0]
    trace = "\n".join(
        f'  File "{name}", line {line}, in forward'
        for name, line in (("/home/me/train.py", 3), ("/home/me/model.py", 7), (inside, 11))
    )
    assert line_in(trace) == "/home/me/model.py:7"
