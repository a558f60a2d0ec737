"""Which branches are assertions, and what they want of a value."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.models import branches

from meshfold.capture.trace.assertions import Assertion, Sources


class Refused(Exception):
    """Nothing is asserted of the value."""


class Value:
    """Asks what is wanted of it whenever it is tested, and says that."""

    def __init__(self, asked: list[Assertion]) -> None:
        self.asked = asked

    def __bool__(self) -> bool:
        found = Sources().assertion(sys._getframe(1), False)
        if found is None:
            raise Refused
        self.asked.append(found)
        return found.holds

    def __lt__(self, _: object) -> Any:
        return self

    def __gt__(self, _: object) -> Any:
        return self


@pytest.mark.parametrize(
    ("check", "answers", "text"),
    [
        (branches.asserted, [True], "assert x < 3"),
        (branches.over_lines, [True], "assert x < 3"),
        (branches.raised, [True], "if not x: raise"),
        (branches.raised_on_both_ways, [False], "if x: raise"),
        (branches.raised_else, [True], "if x: ... else: raise"),
        (branches.raised_after, [True], "if x: ... else: raise"),
        (branches.one_of_two, [False, False], "if x or x < 3: raise"),
        (branches.both, [True] * 4, "assert x and (not not x) and (0 < x < 3)"),
        (branches.of_all, [True, True], "if not all((v < 3 for v in (x, x))): raise"),
        (branches.of_any, [False, False], "if any([bool(x), bool(x)]): raise"),
        (branches.by_name, [True], "if not ok: raise"),
    ],
)
def test_what_an_assertion_wants(
    check: Callable[[Value], object], answers: list[bool], text: str
) -> None:
    asked: list[Assertion] = []
    check(Value(asked))
    assert [found.holds for found in asked] == answers
    assert {found.text for found in asked} == {text}
    line = check.__code__.co_firstlineno
    assert all(line < int(found.source.rpartition(":")[2]) < line + 5 for found in asked)
    assert asked[0].note.startswith("branches.py:")
    assert all(found.kind == "check" for found in asked)


def test_a_branch_that_only_warns_is_told_apart() -> None:
    asked: list[Assertion] = []
    branches.warned(Value(asked))
    assert [(found.holds, found.kind) for found in asked] == [(False, "warning")]


def test_the_first_of_two_that_may_hold_does_not_decide_alone() -> None:
    asked: list[Assertion] = []
    branches.either(Value(asked))
    assert [(found.holds, found.is_all) for found in asked] == [(True, False)]


@pytest.mark.parametrize(
    "branch",
    [
        branches.changed,
        branches.two_sides,
        branches.chosen,
        branches.looped,
        branches.read_twice,
        branches.assigned_twice,
        branches.returned,
        branches.picked,
    ],
)
def test_a_branch_of_which_both_sides_compute_is_none(branch: Callable[[Value], object]) -> None:
    with pytest.raises(Refused):
        branch(Value([]))


def test_code_without_a_source_asserts_nothing() -> None:
    space: dict[str, Any] = {}
    exec("def check(x):\n    assert x", space)
    with pytest.raises(Refused):
        space["check"](Value([]))
