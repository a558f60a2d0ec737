"""What forward asks of the world outside: random generators, their seeds, and the time."""

import datetime
import inspect
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from meshfold.errors import CaptureError
from meshfold.torch_compat.source_lines import is_user_file


@contextmanager
def refuse_seeding() -> Iterator[None]:
    """Raises CaptureError where torch's generator is seeded inside: draws of a program are of the
    plan's seed and the step."""
    generator, state = torch.default_generator, torch.get_rng_state()
    # One that no model sets, and another in every trace (refuse_questions).
    unlikely = int.from_bytes(os.urandom(6))
    generator.manual_seed(unlikely)
    try:
        yield
        if generator.initial_seed() != unlikely:
            raise CaptureError(
                "forward seeds torch's random numbers, which would be lost in a graph; seed them "
                "outside of the model, or pass what it draws as an input tensor",
                op="torch.manual_seed",
            )
    finally:
        torch.set_rng_state(state)


@contextmanager
def refuse_hidden_draws(rerun: Callable[[], object]) -> Iterator[None]:
    """Refuse draws from Python's or numpy's generator: they would become constants."""
    before = _generator_states()
    yield
    if _generator_states() != before:
        raise CaptureError(
            "the model draws random numbers outside torch, which would be frozen into the graph; "
            "draw with torch, or pass them in as an input",
            op="random",
            source=_first_draw(rerun),
        )


def _generator_states() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def _first_draw(rerun: Callable[[], object]) -> str:
    """Run once more, line by line, up to the line that changes a generator."""
    found = ""
    state = _generator_states()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal found, state
        if event == "call":
            return trace if is_user_file(frame.f_code.co_filename) else None
        if not found and lines.get(frame) and _generator_states() != state:
            found = f"{frame.f_code.co_filename}:{lines[frame]}"
        lines[frame] = frame.f_lineno
        return trace

    lines: dict[FrameType, int] = {}
    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        rerun()
    finally:
        sys.settrace(tracer)
    return found


# The time, and seeds that are read.

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_DATES_OF_TIME = ("localtime", "gmtime", "ctime")
_OF_TIME = frozenset((*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), *_DATES_OF_TIME))
_OF_DATES = frozenset(("now", "today", "utcnow"))
_OF_SEEDS = frozenset(("initial_seed", "get_rng_state", "default_generator"))
_OF_CHANCE = frozenset(("urandom", "getrandom", "uuid1", "uuid4", "token_bytes", "randbits"))
_QUESTIONS = _OF_TIME | _OF_DATES | _OF_SEEDS | _OF_CHANCE
_PLACES = frozenset(("time", "datetime", "date", "torch", "os", "uuid", "secrets", "random"))
_LATER_S = 41_234_567.89
"""By how much clocks are put forward; no whole number of minutes, hours, days or weeks."""

Space = dict[str, Any]
"""The globals of a file."""


def refuse_questions(spaces: Sequence[Space], is_same: Callable[[], bool]) -> None:
    """Raises CaptureError where forward asks for the time or a seed, and computes something else
    with another answer. spaces: of the files that the model's code is of; is_same: whether it is
    traced as the same graph now. Called at most once, with the clocks of these files put forward,
    and only where their code names something that may be such a question."""
    asking = [space for space in spaces if _may_ask(space)]
    if not asking:
        return
    with _later(asking):
        if is_same():
            return
    raise CaptureError(
        "forward asks for the time or a seed, and computes something else with every answer, which "
        "a graph of one call cannot; pass it as an input tensor",
        op="Python",
    )


def spaces_of(model: nn.Module, *others: Any) -> list[Space]:
    """The globals of the files that the classes of a model, and `others`, are of; and of those that
    they import functions, classes and modules from, up to installed packages."""
    found: dict[int, Space] = {}
    pending = list(others)
    for module in model.modules():
        pending += [x for x in vars(module).values() if isinstance(x, FunctionType)]
        for base in type(module).__mro__:
            # A library's base classes load files and generate, too, which is no part of a step.
            if "forward" in vars(base) or not _is_installed(_space(base) or {}):
                pending += [base, *_closed_over(base)]
    while pending:
        space = _space(pending.pop())
        if space is None or id(space) in found:
            continue
        found[id(space)] = space
        if not _is_installed(space):
            reached = map(_space, list(space.values()))
            pending += [x for x in reached if x is not None and not _is_installed(x)]
    return list(found.values())


def _space(of: Any) -> Space | None:
    """The globals of a user's file that a class, function or module is of."""
    space: Any = of if isinstance(of, dict) else None
    if isinstance(of, ModuleType):
        space = vars(of)
    elif isinstance(of, type):
        space = vars(sys.modules.get(of.__module__, type))
    elif isinstance(of, FunctionType):
        space = of.__globals__
    if isinstance(space, dict) and is_user_file(str(space.get("__file__", "<"))):
        return space
    return None


def _is_installed(space: Space) -> bool:
    return "-packages" in str(space.get("__file__"))


def _closed_over(kind: type) -> Iterator[Any]:
    """What functions of a class close over."""
    for function in vars(kind).values():
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents


def _may_ask(space: Space) -> bool:
    aliases = {name for name, value in list(space.items()) if _put_forward(value) is not None}
    for names in _names_of_code(space):
        if names & _QUESTIONS and names & (_PLACES | aliases) or names & (aliases - _PLACES):
            return True
    return False


def _names_of_code(space: Space) -> Iterator[set[str]]:
    """The global names and attributes that each function of a file reads."""
    file, seen = space.get("__file__"), set[int]()
    pending: list[Any] = list(space.values())
    while pending:
        of = pending.pop()
        if id(of) in seen:
            continue
        seen.add(id(of))
        if isinstance(of, CodeType):
            yield set(of.co_names)
            pending += [c for c in of.co_consts if isinstance(c, CodeType)]
        elif isinstance(of, type) and of.__module__ == space.get("__name__"):
            pending += vars(of).values()
        elif isinstance(of, (staticmethod, classmethod)):
            pending.append(of.__wrapped__)
        elif (wrapped := inspect.getattr_static(of, "__wrapped__", None)) is not None:
            pending.append(wrapped)
        elif isinstance(of, FunctionType) and of.__code__.co_filename == file:
            pending.append(of.__code__)


@contextmanager
def _later(spaces: Sequence[Space]) -> Iterator[None]:
    """A context in which what these files call clocks is put forward."""
    kept = [
        (space, name, value, other)
        for space in spaces
        for name, value in space.items()
        if (other := _put_forward(value)) is not None
    ]
    try:
        for space, name, _, other in kept:
            space[name] = other
        yield
    finally:
        for space, name, value, _ in kept:
            space[name] = value


def _put_forward(value: Any) -> Any:
    """A clock, or a module or class with clocks, that is later; None for anything else."""
    if value is time or value is datetime:
        other = ModuleType(value.__name__)
        for name, entry in vars(value).items():
            later = _put_forward(entry)
            setattr(other, name, entry if later is None else later)
        return other
    # A file holds what it likes: arrays and others whose comparisons are no bool, or raise.
    if value is datetime.datetime or value is datetime.date:
        kind: Any = value
        return type(kind.__name__, (kind,), {name: _later_date(kind, name) for name in _OF_DATES})
    if isinstance(value, BuiltinFunctionType):
        name = value.__name__
        return _later_time(value) if name in _OF_TIME and getattr(time, name) is value else None
    return None


def _later_date(kind: Any, name: str) -> Any:
    def asked(*args: Any) -> Any:
        return getattr(kind, name)(*args) + datetime.timedelta(seconds=_LATER_S)

    return staticmethod(asked)


def _later_time(clock: Any) -> Any:
    def asked(*args: Any) -> Any:
        if args or clock.__name__ in _DATES_OF_TIME:
            return clock(*(args or (time.time() + _LATER_S,)))
        by = _LATER_S
        return clock() + (int(by * 1e9) if clock.__name__.endswith("_ns") else by)

    return asked
