"""Objects beside a model, in its file or kept by it, that answer questions as no others do."""

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.programs.linears import Linears, captured_line, with_middle
from torch import Tensor


class Raises:
    """Compares, counts, iterates and prints nothing."""

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("never ask")

    __eq__ = __bool__ = __len__ = __iter__ = __repr__ = _refuse


class Fields(dict):  # type: ignore[type-arg]
    """A configuration whose missing attributes are KeyErrors."""

    __getattr__ = dict.__getitem__


class Endless:
    """Has every attribute, of its own kind; its comparisons are arrays."""

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__wrapped__":
            raise AttributeError(name)
        return Endless()

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])


class Compared(type):
    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("never ask")

    __hash__ = type.__hash__


class OfKind(metaclass=Compared):
    pass


ODD: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(6.0),
    "records": lambda: np.zeros(3, [("a", int)]),
    "objects": lambda: np.array([np.arange(2), None], object),
    "raises": Raises,
    "fields": lambda: Fields(width=3, inner=Fields(sizes=[1, 2])),
    "endless": Endless,
    "class": lambda: OfKind,
    "keys": lambda: torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    "in a list": lambda: [Raises(), np.arange(3)],
    "in a dict": lambda: {"a": np.arange(3), 1: Raises()},
    "partial": lambda: functools.partial(print, np.arange(3)),
    "mock": mock.MagicMock,
    "module": lambda: np,
    "lock": threading.Lock,
    "random": lambda: np.random.default_rng(0),
}


def doubled(model: Linears, h: Tensor) -> Tensor:
    return 2 * h


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", ["file", "model", "layers"])
def test_what_a_step_does_not_ask_is_no_matter(
    odd: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_middle(Linears, doubled)
    if place == "file":
        monkeypatch.setitem(globals(), "ODD_ONE", ODD[odd]())
    elif place == "model":
        model.kept = ODD[odd]()
    else:
        model.first.kept, model.last.kept = ODD[odd](), ODD[odd]()
    assert captured_line(model) == ""
