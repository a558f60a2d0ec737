"""Branches on a value, assertions and others. Not in a test file, whose assertions pytest writes
anew."""

import math
import warnings
from typing import Any

Value = Any


def asserted(x: Value) -> None:
    assert x < 3, f"{x} is too large"


def over_lines(x: Value) -> None:
    assert (
        x
        < 3
    ), "too large"  # fmt: skip


def raised(x: Value) -> None:
    if not x:
        text = "not finite"
        raise ValueError(text)


def raised_on_both_ways(x: Value, mode: int = 0) -> None:
    if x:
        if mode:
            raise ValueError
        else:
            raise TypeError


def raised_else(x: Value) -> None:
    if x:
        pass
    else:
        raise ValueError


def raised_after(x: Value) -> int:
    if x:
        return 1
    raise ValueError


def one_of_two(x: Value) -> None:
    if x or x < 3:
        raise ValueError


def both(x: Value) -> None:
    assert x and not (not x) and 0 < x < 3


def either(x: Value) -> None:
    assert x or x < 3


def of_all(x: Value) -> None:
    if not all(v < 3 for v in (x, x)):
        raise ValueError


def of_any(x: Value) -> None:
    if any([bool(x), bool(x)]):
        raise ValueError


def by_name(x: Value) -> None:
    ok = bool(x < 3)
    if not ok:
        raise ValueError(f"{ok}")


def warned(x: Value) -> None:
    if x:
        warnings.warn("x", stacklevel=1)


def changed(x: Value) -> int:
    y = 1
    if x:
        y = 2
    return y


def two_sides(x: Value) -> int:
    if x:
        return 1
    return 2


def chosen(x: Value) -> int:
    return 1 if x else 2


def looped(x: Value) -> None:
    while x:
        pass


def read_twice(x: Value) -> int:
    ok = bool(x)
    if not ok:
        raise ValueError
    return 1 if ok else 2


def assigned_twice(x: Value) -> None:
    ok = True
    ok = bool(x)
    assert ok


def returned(x: Value) -> bool:
    return bool(x)


def picked(x: Value) -> float:
    return math.sqrt(max(x, 3))  # type: ignore[type-var]
