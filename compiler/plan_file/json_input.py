"""JSON that somebody else wrote: plan, cluster and configuration files, bounded before they are
expanded. Limits are in docs/limits.md.
"""

import json
import os
import re
import stat
from itertools import accumulate
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 2**20
MOST_VALUES = 1_000_000
MOST_DEPTH = 64
MOST_DIGITS = 64
"""Characters of one number."""

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_LONG_NUMBER = re.compile(rf"[-+.0-9eE]{{{MOST_DIGITS + 1}}}")
_HUGE_NUMBER = re.compile(r"[0-9.][eE]\+?0*[1-9][0-9]{2}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonFault(ValueError):
    """What is wrong with a JSON text or file; its name is not in the message."""


def read_json(path: Path) -> Any:
    """What a regular file of JSON holds. Raises JsonFault."""
    try:
        # A pipe would block here without O_NONBLOCK, and a device has no end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise JsonFault("cannot be read (it is no regular file)")
            with open(handle, "rb", closefd=False) as stream:
                data = stream.read(MOST_BYTES + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise JsonFault(f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise error if isinstance(error, JsonFault) else JsonFault(f"no path ({error})") from error
    if len(data) > MOST_BYTES:
        raise JsonFault(f"cannot be read (over {MOST_BYTES} bytes)")
    try:
        return parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise JsonFault("cannot be read (not UTF-8 text)") from error


def parse_json(text: str) -> Any:
    """What json.loads gives. Raises JsonFault for what is no JSON, has a key twice, lone surrogates
    or numbers that are not finite, or goes beyond the limits."""
    _check_limits(_STRING.sub("", text))
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        if not text.isascii() or _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise JsonFault("not JSON (a string has half of a surrogate pair)") from error
    except json.JSONDecodeError as error:
        raise JsonFault(f"not JSON ({error})") from error
    return found


def _check_limits(bare: str) -> None:
    """bare: the text without its strings."""
    if sum(map(bare.count, ",[{")) > MOST_VALUES:
        raise JsonFault(f"not read (over {MOST_VALUES} values)")
    steps = (1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(bare))
    if max(accumulate(steps), default=0) > MOST_DEPTH:
        raise JsonFault(f"not read (nested more than {MOST_DEPTH} deep)")
    if _LONG_NUMBER.search(bare):
        raise JsonFault(f"not read (a number of over {MOST_DIGITS} characters)")
    if _HUGE_NUMBER.search(bare):
        raise JsonFault("not read (a number of 1e100 or more)")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonFault(f"not JSON (the key {twice!r} is there twice)")
    return found


def _no_number(constant: str) -> Any:
    raise JsonFault(f"not JSON ({constant} is no number)")
