"""What a snapshot sees and puts back, one kind of state at a time."""

import contextvars
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.capture.python_state.snapshots import Snapshot, attributes_of

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("a variable of a model", default=0)


class Registry:
    """A user's object, with state of its class."""

    entries: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.count = 0


def _closure() -> tuple[Callable[[], None], Callable[[], int]]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add, lambda: count


def _cases() -> dict[str, tuple[Any, Callable[[], Any], Callable[[], Any]]]:
    """By name: a root, what changes it, and what reads the change."""
    table: dict[str, list[int]] = {"a": [1]}
    registry, space, (add, count) = Registry(), SimpleNamespace(x=1), _closure()
    return {
        "an entry": ({"t": table}, lambda: table.update(b=[2]), lambda: dict(table)),
        "a list inside": ({"t": table}, lambda: table["a"].append(2), lambda: list(table["a"])),
        "an attribute": (registry, lambda: setattr(registry, "count", 1), lambda: registry.count),
        "a class": (
            Registry,
            lambda: Registry.entries.update(a=1),
            lambda: dict(Registry.entries),
        ),
        "a namespace": (space, lambda: setattr(space, "x", 2), lambda: space.x),
        "a closure": (add, add, count),
    }


@pytest.mark.parametrize("name", _cases())
def test_a_change_is_seen_and_put_back(name: str) -> None:
    root, change, read = _cases()[name]
    before = read()
    snapshot = Snapshot({"root": root})
    assert snapshot.change() == ""
    change()
    assert read() != before
    assert snapshot.change().startswith("root")
    snapshot.restore()
    assert read() == before
    assert snapshot.change() == ""


def test_context_variables_are_followed_where_asked() -> None:
    snapshot = Snapshot({}, context=True)
    token = VARIABLE.set(3)
    try:
        assert "context variable" in snapshot.change()
    finally:
        VARIABLE.reset(token)


def test_an_equal_value_and_a_cached_call_are_no_change() -> None:
    @functools.lru_cache
    def doubled(x: int) -> int:
        return 2 * x

    state = {"x": [1, 2], "f": doubled}
    snapshot = Snapshot({"state": state})
    state["x"] = [1, 2]
    doubled(4)
    assert snapshot.change() == ""


def test_a_tensor_that_is_written_is_seen() -> None:
    model = nn.Linear(2, 2)
    snapshot = Snapshot(attributes_of(model))
    with torch.no_grad():
        model.weight.zero_()
    assert "weight" in snapshot.change()
