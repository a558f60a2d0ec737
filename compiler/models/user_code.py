"""Code of the user as it runs: what it raises is one error, what it prints is held back."""

import contextlib
import io
import sys
from collections.abc import Iterator

from meshfold.errors import MeshfoldError, OptionError


@contextlib.contextmanager
def user_code(what: str, *, remedy: str) -> Iterator[None]:
    """Whatever is raised inside, sys.exit included, becomes OptionError(f"{what} raised ...;
    {remedy}"). What is printed goes to stderr, and nowhere if it fails: results are on stdout, and
    a failure is one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    except (MeshfoldError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise OptionError(f"{what} raised {one_line(error)}; {remedy}") from error
    sys.stderr.write(printed.getvalue())


def one_line(error: BaseException) -> str:
    """The type of an exception and the first line of its text."""
    try:
        text = str(error).strip().splitlines()
    except Exception:
        text = []
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
