"""Lines of the user's code, for messages: files that are not torch, meshfold or Python itself."""

import inspect
import os
import re
import sysconfig
from collections.abc import Iterable
from tokenize import TokenError
from types import FrameType

import torch

import meshfold

_LIBRARIES = tuple(
    os.path.dirname(library.__file__ or "") + os.sep for library in (torch, meshfold)
)
_DISTRIBUTIONS = _LIBRARIES[0] + "distributions" + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """ "file:line" of the first frame outside torch, meshfold and the standard library, "" if
    there is none. `frames` start with the innermost."""
    for frame, line in frames:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return ""


def is_own_file(name: str) -> bool:
    return name.startswith(_LIBRARIES[1])


def is_user_file(name: str) -> bool:
    standard = name.startswith(_STANDARD) and "site-packages" not in name
    return not (standard or name.startswith(_LIBRARIES) or name.startswith("<"))


def validates_arguments(name: str) -> bool:
    """Whether a file is of torch.distributions, which check their arguments for the user."""
    return name.startswith(_DISTRIBUTIONS)


def line_in(stack_trace: str) -> str:
    """The innermost line of the user's code in the text of a stack trace."""
    for name, line in reversed(_FRAME.findall(stack_trace)):
        if is_user_file(name):
            return f"{name}:{line}"
    return ""


def definition(function: type) -> str:
    """ "file:line" of a class, "" without source."""
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError, TokenError):
        return ""
