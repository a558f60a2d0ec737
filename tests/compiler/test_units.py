"""Texts of bytes, seconds and counts."""

import pytest

from meshfold.errors import OptionError
from meshfold.units import bytes_text, count_text, parse_bytes, seconds_text, three_digits


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GB", 16_000_000_000),
        ("16 gib", 16 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("512MiB", 2**29),
        ("80 B", 80),
    ],
)
def test_parse_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "16", "GB", "-1GB", "16 parsecs", "1e3GB"])
def test_no_amount_of_memory(text: str) -> None:
    with pytest.raises(OptionError, match="write for example 16GB or 16GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00123, "0.0012"),
        (0.25, "0.250"),
        (0.9996, "1.00"),
        (3.1, "3.10"),
        (9.996, "10.0"),
        (31, "31.0"),
        (99.96, "100"),
        (1234.5, "1234"),
    ],
)
def test_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_scales_meet_without_a_gap() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 999_600, 12.9e9)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "12.9 GB",
    ]
    assert [seconds_text(s) for s in (0, 3e-20, 15e-6, 0.99999e-3, 0.341, 0.9999, 75)] == [
        "0 ms",
        "0 ms",
        "15.0 us",
        "1.00 ms",
        "341 ms",
        "1.00 s",
        "75.0 s",
    ]
    assert [count_text(n) for n in (62, 2114, 110_000_000, 8_030_261_248)] == [
        "62",
        "2.11 k",
        "110 M",
        "8.03 B",
    ]
