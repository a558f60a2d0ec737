"""Events of a step (meshfold.ir.step_events) as lines of a plan file, and runs of equal numbers.

An event is one line, its last word the bytes alive inside the region meanwhile:

    compute 0.00123 1048576
    all_gather dp,ep nvlink4-switch 33554432 0.0002 1048576      kind, axes, link, bytes, seconds
    start 3 all_gather tp nvlink4-switch 33554432 0.0002 1048576
    unshard 0 1048576

Every read function raises ValueError.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

from meshfold.ir.limits import MOST_INSTANCES, MOST_SECONDS
from meshfold.ir.node_groups import NUM_STEPS
from meshfold.ir.step_events import CollectiveEvent, Event, EventKind

_NUMBERED_KINDS = ("unshard", "reduce", "wait", "produce", "consume")
_BARE_KINDS = (
    "forward_prefetch",
    "pre_backward",
    "backward_unshard",
    "backward_prefetch",
    "recompute",
    "epilogue",
    "run_epilogue",
)

_NUM_STEPS = MappingProxyType({"all_reduce": NUM_STEPS, "reduce_scatter": 2})
"""Of a reduction in steps, by kind."""

_COUNT = re.compile("[0-9]{1,18}")
_AS, _TIMES, _THEN = " = ", " x ", " + "


def write_collective(c: CollectiveEvent) -> str:
    """One line; a hierarchical one in two pieces is `all_reduce ... = 2 x reduce_scatter ... +
    all_reduce ... + all_gather ...`, that of HSDP `reduce_scatter ... = 1 x reduce_scatter ... +
    all_reduce ...`."""
    whole = f"{c.kind} {','.join(c.axes)} {c.link} {c.num_bytes} {c.seconds!r}"
    if not c.steps:
        return whole
    return f"{whole}{_AS}{c.pieces}{_TIMES}{_THEN.join(map(write_collective, c.steps))}"


def read_collective(text: str) -> CollectiveEvent:
    """Inverse of write_collective. Raises ValueError."""
    whole, has_steps, steps = text.partition(_AS)
    found = _read_whole(whole)
    if not has_steps:
        return found
    pieces, _, steps = steps.partition(_TIMES)
    collectives = steps.split(_THEN)
    is_complete = len(collectives) == _NUM_STEPS.get(found.kind)
    if not (is_complete and _COUNT.fullmatch(pieces) and int(pieces) > 0):
        raise ValueError(
            f"{text!r}: write 'all_reduce ... = PIECES x' and {NUM_STEPS} steps, joined by +, or "
            "'reduce_scatter ... = 1 x' and 2"
        )
    return replace(found, steps=tuple(map(_read_whole, collectives)), pieces=int(pieces))


def _read_whole(text: str) -> CollectiveEvent:
    words = text.split(" ")
    if len(words) < 5:
        raise ValueError(f"{text!r} is no collective; write 'kind axes link bytes seconds'")
    kind, axes, *link, num_bytes, seconds = words
    found = CollectiveEvent(
        kind, tuple(axes.split(",")), " ".join(link), _count(num_bytes), _seconds(seconds)
    )
    return found


def _count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ValueError(f"{text!r} is no count; write a whole number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{text!r} are no seconds; write 0 to {MOST_SECONDS:g}")
    return seconds


def write_event(event: Event) -> str:
    """One line of a plan file."""
    if event.collective is not None:
        start = f"start {event.number} " if event.kind == "start" else ""
        what = start + write_collective(event.collective)
    elif event.kind == "compute":
        what = f"compute {event.seconds!r}"
    else:
        what = event.kind + (f" {event.number}" if event.kind in _NUMBERED_KINDS else "")
    return f"{what} {event.inside_bytes}"


def read_event(line: str) -> Event:
    """Inverse of write_event. Raises ValueError."""
    what, _, inside = line.rpartition(" ")
    if not what or not _COUNT.fullmatch(inside):
        raise ValueError(f"{line!r} is no event; its last word is a number of bytes")
    first, _, rest = what.partition(" ")
    if first == "compute":
        return Event("compute", _seconds(rest), int(inside))
    if first == "start":
        number, _, text = rest.partition(" ")
        if not _COUNT.fullmatch(number):
            raise ValueError(f"{line!r}: a start has a number and a collective")
        return Event("start", 0.0, int(inside), int(number), read_collective(text))
    if first not in get_args(EventKind):
        return Event("inline", inside_bytes=int(inside), collective=read_collective(what))
    kind: EventKind = first  # type: ignore[assignment]  # is one of them
    if kind in _BARE_KINDS and not rest:
        return Event(kind, inside_bytes=int(inside))
    if kind in _NUMBERED_KINDS and _COUNT.fullmatch(rest):
        return Event(kind, inside_bytes=int(inside), number=int(rest))
    raise ValueError(
        f"{line!r} is no event; {', '.join(_NUMBERED_KINDS)} have a number, "
        f"{', '.join(_BARE_KINDS)} none"
    )


def run_lengths(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(number, how often in a row)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][0] == number:
            found[-1] = number, found[-1][1] + 1
        else:
            found.append((number, 1))
    return tuple(found)


def from_run_lengths(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Inverse of run_lengths. Raises ValueError for more than MOST_INSTANCES."""
    length = sum(count for _, count in runs)
    if length > MOST_INSTANCES:
        raise ValueError(f"{length} in all are more than {MOST_INSTANCES}")
    return tuple(number for number, count in runs for _ in range(count))
