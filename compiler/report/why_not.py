"""Why a plan does not do what somebody would have expected: what `explain --why-not` answers.

What is compared is of one kind: simulated steps where both plans have one, else what the search
added up. No torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshfold.ir.plan import Plan
from meshfold.report.step_time import NOTHING
from meshfold.report.tables import indented, section, table_of
from meshfold.report.terminal import lines_view
from meshfold.units import bytes_text, seconds_text


@dataclass(frozen=True)
class LinkUse:
    """What collectives of one rank do on a link in a step."""

    seconds: float
    """Of all, before overlap."""
    num_bytes: int | None = None
    """None where the plan has no events to count them."""
    exposed_s: float | None = None
    """While compute waits; None likewise."""


@dataclass(frozen=True)
class StepParts:
    """A step in parts whose seconds add up to it, and its links."""

    step_s: float
    parts: Mapping[str, float]
    links: Mapping[str, LinkUse]
    recomputed_s: float | None = None
    """Of the compute, what runs a second time; None where nothing tells."""


@dataclass(frozen=True)
class Change:
    """Something that was changed until the pinned plan won, or as far as it was tried."""

    what: str
    """Of which link, say."""
    found: str
    """At which values it wins; empty where it does not."""
    tried: str
    """How far."""


@dataclass(frozen=True)
class WhyNot:
    """The answer. pinned: the best plan with the pins; None where there is none, for the reason
    `refusal`."""

    pins: str
    plan: Plan
    pinned: Plan | None
    parts: tuple[StepParts, StepParts] | None
    """Of the plan and of the pinned one."""
    refusal: str = ""
    unlimited: Plan | None = None
    """The best with the pins on devices of any memory, where memory costs it something."""
    is_kept: bool = False
    """Whether the plan does that already."""
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


def why_not_view(answer: WhyNot) -> RenderableType:
    """The whole page."""
    parts: list[RenderableType] = [lines_view(_headline(answer), style="bold")]
    if answer.pinned is not None and answer.parts is not None and not answer.is_kept:
        parts.append(section("Where the seconds are", _seconds(answer.parts, answer.pins)))
        parts.append(section("What crosses which link", _links(answer.parts, answer.pins)))
    if not answer.is_kept and (memory := list(_memory(answer))):
        parts.append(section("Memory", indented(lines_view(memory))))
    if answer.changes:
        table = table_of("", "", fold=("",))
        for change in answer.changes:
            told = f"wins at {change.found}" if change.found else "does not make it win"
            table.add_row(change.what, f"{told} (tried {change.tried})")
        title = "What would have to change, found by planning again"
        parts.append(section(title, indented(table)))
    if answer.notes:
        parts.append(section("Notes", indented(lines_view(answer.notes))))
    return Group(*parts)


def _headline(answer: WhyNot) -> Iterator[str]:
    plan, pinned = answer.plan, answer.pinned
    label = plan.strategy.label
    if answer.is_kept:
        yield f"the plan keeps {answer.pins}: {label}"
    elif pinned is None:
        yield f"no plan with {answer.pins}: {answer.refusal}"
    else:
        assert answer.parts is not None
        ours, theirs = (part.step_s for part in answer.parts)
        share = theirs / ours - 1
        word = "slower" if share >= 0 else "faster"
        yield (
            f"the best plan with {answer.pins} is {pinned.strategy.label}: "
            f"{seconds_text(theirs)}, {100 * abs(share):.1f} % {word} than {label}, "
            f"{seconds_text(ours)}"
        )
        if share < 0:
            yield _why_overlooked(plan, pinned)


def _why_overlooked(plan: Plan, pinned: Plan) -> str:
    """Why a search did not find a faster plan."""
    if pinned.time.step_s < plan.time.step_s and plan.pins:
        pins = ", ".join(f"{name}={value}" for name, value in sorted(plan.pins.items()))
        return f"this plan was pinned to {pins}; plan again without"
    if pinned.time.step_s < plan.time.step_s:
        return "this plan was made with less to choose from, or edited; plan again"
    share = pinned.time.step_s / plan.time.step_s - 1
    return (
        f"the search compares sums, where it is {100 * share:.1f} % slower, and simulates the best "
        "of those; to have it, plan with the pin"
    )


def _seconds(parts: tuple[StepParts, StepParts], pins: str) -> RenderableType:
    ours, theirs = parts
    figures = ("this plan", pins, "difference")
    table = table_of("", *figures, right=figures)
    for name in dict.fromkeys((*ours.parts, *theirs.parts)):
        _row(table, name, ours.parts.get(name, 0.0), theirs.parts.get(name, 0.0))
        if name.startswith("compute") or name == "backward":
            again = [part.recomputed_s for part in parts]
            if None not in again and any(again):
                _row(table, "  of it recomputed", again[0] or 0.0, again[1] or 0.0)
    _row(table, "step", ours.step_s, theirs.step_s)
    return indented(table)


def _row(table: Table, name: str, ours: float, theirs: float) -> None:
    sign = "+" if theirs >= ours else "-"
    difference = f"{sign}{seconds_text(abs(theirs - ours))}"
    table.add_row(name, seconds_text(ours), seconds_text(theirs), difference)


def _links(parts: tuple[StepParts, StepParts], pins: str) -> RenderableType:
    figures = ("this plan", pins)
    table = table_of("link", "", *figures, right=figures)
    ours, theirs = (part.links for part in parts)
    for link in dict.fromkeys((*ours, *theirs)):
        both = [_use_texts(uses.get(link)) for uses in (ours, theirs)]
        known = [k for k in range(3) if any(cells[k] != NOTHING for cells in both)]
        for k in known:
            name = ("bytes", "seconds", "exposed")[k]
            table.add_row("" if k > known[0] else link, name, *(cells[k] for cells in both))
    if not table.row_count:
        return Text("  nothing")
    note = "of the collectives of one rank and step; seconds before overlap"
    return Group(indented(table), indented(Text(note, style="dim")))


def _use_texts(use: LinkUse | None) -> tuple[str, str, str]:
    if use is None:
        return NOTHING, NOTHING, NOTHING
    return (
        NOTHING if use.num_bytes is None else bytes_text(use.num_bytes),
        seconds_text(use.seconds),
        NOTHING if use.exposed_s is None else seconds_text(use.exposed_s),
    )


def _memory(answer: WhyNot) -> Iterator[str]:
    """Whether memory is what forbids it, or costs it something."""
    capacity, free = answer.plan.memory.capacity, answer.unlimited
    if answer.pinned is not None:
        yield (
            f"peak memory {bytes_text(answer.pinned.memory.peak)} with {answer.pins}, "
            f"{bytes_text(answer.plan.memory.peak)} as planned, of {bytes_text(capacity)}"
        )
    if free is not None:
        missing = free.memory.peak - capacity
        forbids = "forbids it" if answer.pinned is None else "forbids its fastest form"
        yield (
            f"memory {forbids}: {free.strategy.label}, {seconds_text(free.step_s)}, needs "
            f"{bytes_text(free.memory.peak)}, {bytes_text(missing)} too much"
        )
