"""Units that people read and write: texts of bytes, seconds and counts for people, and back.

GB is 1e9 bytes and GiB is 2**30 bytes, here and in everything that meshfold prints.
"""

import re

from meshfold.errors import OptionError

BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_BYTES = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]{1,3})\s*")
_MOST_BYTES = 2**63 - 1
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def is_bytes(text: str) -> bool:
    """Whether parse_bytes takes it."""
    return _bytes(text) is not None


def parse_bytes(text: str) -> int:
    """Bytes in "16GB", "512 MiB", "1.5TB" (case does not matter). Raises OptionError."""
    found = _bytes(text)
    if found is None:
        raise OptionError(f"{text!r} is no amount of memory; write for example 16GB or 16GiB")
    return found


def _bytes(text: str) -> int | None:
    match = _BYTES.fullmatch(text)
    if match is None or match[2].upper() not in BYTE_UNITS:
        return None
    found = round(float(match[1]) * BYTE_UNITS[match[2].upper()])
    return found if found <= _MOST_BYTES else None


def three_digits(value: float) -> str:
    """A figure with three significant digits and no exponent: "0.25", "3.10", "31.0", "310"."""
    if value == 0:
        return "0"
    for bound, decimals in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if abs(value) >= bound * (1 - 0.5 * 10 ** -(2 + (bound < 1))):
            return f"{value:.{decimals}f}"
    return f"{value:.2g}"


def bytes_text(num_bytes: float) -> str:
    """ "12.9 GB", "310 MB", "512 B"."""
    for scale, prefix in _SCALES:
        if num_bytes >= scale * 0.9995:
            return f"{three_digits(num_bytes / scale)} {prefix}B"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """ "341 ms", "1.20 s", "15.0 us"; what is shorter than a nanosecond is nothing."""
    if seconds < 1e-9:
        return "0 ms"
    if seconds >= 0.9995:
        return f"{three_digits(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{three_digits(seconds * 1e3)} ms"
    return f"{three_digits(seconds * 1e6)} us"


def count_text(count: int) -> str:
    """ "8.03 B" for 8.03e9, "110 M", "62"."""
    for scale, suffix in _COUNTS:
        if count >= scale * 0.9995:
            return f"{three_digits(count / scale)} {suffix}"
    return str(count)
