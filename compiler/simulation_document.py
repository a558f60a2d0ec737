"""A simulated step in the plan file: its figures, and the events that it follows from.

Events are lines (meshfold.ir.step_events); instances, and the change of what is held from moment to
moment, are runs: [what, how often in a row].
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

from pydantic import Field

from meshfold.documents import Bytes, Count, Document, Positive, Seconds
from meshfold.errors import PlanFormatError
from meshfold.ir.bucketing import Place
from meshfold.ir.cluster import OVERLAP_SLOWDOWN
from meshfold.ir.step_events import (
    BucketEvents,
    Collective,
    Event,
    MergedGather,
    MergedReduction,
    OverlapRow,
    RegionEvents,
    SimulatedStep,
    StepEvents,
    from_run_lengths,
    read_collective,
    read_event,
    run_lengths,
    write_collective,
    write_event,
)

T = TypeVar("T")

_PLACE = re.compile(r"(\d+)\.(\d+)")


class OverlapDocument(Document):
    """Collectives of one kind over the same axes."""

    kind: str
    axes: tuple[str, ...]
    count: Positive
    hidden_s: Seconds = Field(description="Beside compute")
    exposed_s: Seconds = Field(description="While compute waits")


class BucketEventsDocument(Document):
    gather: str = Field(description="Kind, axes, link, bytes, seconds; empty for none")
    reduce: str
    whole_bytes: Bytes
    flat_bytes: Bytes
    result_bytes: Bytes
    saved: bool = Field(description="The backward reads the gathered parameters")
    dtype: str = Field(default="", description="Of the gradients; empty where it is not known")
    read_dtype: str = Field(default="", description="In which ops read the parameters")
    is_alone: bool = Field(default=False, description="One parameter, never with others")


class MergedDocument(Document):
    """Reductions, or gathers, that run as one."""

    collective: str
    places: str = Field(description="instance.bucket, in the order in which they come")
    again: str = Field(default="", description="Of gathers: what the backward gathers again")


class RegionEventsDocument(Document):
    name: str
    stays: bool = Field(description="Gathered parameters stay from forward to backward")
    buckets: tuple[BucketEventsDocument, ...]
    forward: tuple[str, ...] = Field(description="Events in order; last the bytes alive inside")
    backward: tuple[str, ...]
    again: tuple[str, ...] = Field(default=(), description="What recomputation runs again")


class EventsDocument(Document):
    """What one rank issues in a step."""

    regions: tuple[RegionEventsDocument, ...]
    instances: tuple[tuple[Count, Positive], ...] = Field(description="Region, how many in a row")
    late: tuple[str, ...] = Field(description="Collectives at the end of the backward")
    optimizer_s: Seconds
    held_bytes: tuple[tuple[int, Positive], ...] = Field(
        description="Change from moment to moment (forwards, backwards, optimizer), how often"
    )
    fixed_bytes: Bytes
    slowdown: float = Field(
        default=OVERLAP_SLOWDOWN,
        ge=1,
        le=2,
        description="Of compute and collectives beside each other",
    )
    merged: tuple[MergedDocument, ...] = Field(default=(), description="Reductions")
    gathers: tuple[MergedDocument, ...] = Field(default=(), description="Gathers")


class SimulationDocument(Document):
    """The step as simulated: collectives where they really stand, contention, memory over time."""

    step_s: Seconds = Field(description="Sum of the three parts below")
    compute_s: Seconds
    contention_s: Seconds = Field(description="What compute loses to collectives beside it")
    exposed_s: Seconds
    hidden_share: Seconds = Field(description="Of the seconds of all collectives")
    peak_bytes: Bytes
    peak_s: Seconds = Field(description="From the start of the step")
    overlap: tuple[OverlapDocument, ...]
    events: EventsDocument


def simulation_document(step: SimulatedStep, events: StepEvents) -> SimulationDocument:
    return SimulationDocument(
        step_s=step.step_s,
        compute_s=step.compute_s,
        contention_s=step.contention_s,
        exposed_s=step.exposed_s,
        hidden_share=step.hidden_share,
        peak_bytes=step.peak_bytes,
        peak_s=step.peak_s,
        overlap=tuple(
            OverlapDocument(
                kind=row.kind,
                axes=row.axes,
                count=row.count,
                hidden_s=row.hidden_s,
                exposed_s=row.exposed_s,
            )
            for row in step.overlap
        ),
        events=EventsDocument(
            regions=tuple(map(_region_document, events.regions)),
            instances=run_lengths(events.instances),
            late=tuple(map(write_collective, events.late)),
            optimizer_s=events.optimizer_s,
            held_bytes=run_lengths([b - a for a, b in pairwise((0, *events.held_bytes))]),
            fixed_bytes=events.fixed_bytes,
            slowdown=events.slowdown,
            merged=tuple(
                MergedDocument(collective=write_collective(m.collective), places=_words(m.places))
                for m in events.merged
            ),
            gathers=tuple(
                MergedDocument(
                    collective=write_collective(m.collective),
                    places=_words(m.places),
                    again=write_collective(m.again) if m.again else "",
                )
                for m in events.gathers
            ),
        ),
    )


def _region_document(region: RegionEvents) -> RegionEventsDocument:
    return RegionEventsDocument(
        name=region.name,
        stays=region.stays,
        buckets=tuple(
            BucketEventsDocument(
                gather=write_collective(b.gather) if b.gather else "",
                reduce=write_collective(b.reduce) if b.reduce else "",
                whole_bytes=b.whole_bytes,
                flat_bytes=b.flat_bytes,
                result_bytes=b.result_bytes,
                saved=b.saved,
                dtype=b.dtype,
                read_dtype=b.read_dtype,
                is_alone=b.is_alone,
            )
            for b in region.buckets
        ),
        forward=tuple(map(write_event, region.forward)),
        backward=tuple(map(write_event, region.backward)),
        again=tuple(map(write_event, region.again)),
    )


def simulation_of(document: SimulationDocument) -> tuple[SimulatedStep, StepEvents]:
    """Inverse of simulation_document. Raises PlanFormatError with the JSON path."""
    step = SimulatedStep(
        compute_s=document.compute_s,
        contention_s=document.contention_s,
        exposed_s=document.exposed_s,
        overlap=tuple(OverlapRow(**row.model_dump()) for row in document.overlap),
        peak_bytes=document.peak_bytes,
        peak_s=document.peak_s,
    )
    for name in ("step_s", "hidden_share"):
        found, right = getattr(document, name), getattr(step, name)
        if found != right:
            raise PlanFormatError(
                f"simulation.{name}: the file says {found!r}, its parts give {right!r}; "
                "edit both or make the plan anew"
            )
    of, path = document.events, "simulation.events"
    regions = tuple(_region(r, f"{path}.regions[{k}]") for k, r in enumerate(of.regions))
    late = _lines(f"{path}.late", of.late, read_collective)
    held = tuple(accumulate(from_run_lengths(of.held_bytes)))
    merged = tuple(
        MergedReduction(*_merged(m, f"{path}.merged[{k}]")) for k, m in enumerate(of.merged)
    )
    gathers = tuple(
        MergedGather(*_merged(m, at), _optional(f"{at}.again", m.again))
        for k, m in enumerate(of.gathers)
        for at in (f"{path}.gathers[{k}]",)
    )
    events = _at(
        path,
        lambda: StepEvents(
            regions,
            from_run_lengths(of.instances),
            late,
            of.optimizer_s,
            held,
            of.fixed_bytes,
            of.slowdown,
            merged,
            gathers,
        ),
    )
    return step, events


def _region(document: RegionEventsDocument, path: str) -> RegionEvents:
    buckets = tuple(
        BucketEvents(
            _optional(f"{path}.buckets[{k}].gather", b.gather),
            _optional(f"{path}.buckets[{k}].reduce", b.reduce),
            b.whole_bytes,
            b.flat_bytes,
            b.result_bytes,
            b.saved,
            b.dtype,
            b.read_dtype,
            b.is_alone,
        )
        for k, b in enumerate(document.buckets)
    )

    def event(line: str) -> Event:
        found = read_event(line)
        if found.action in ("open", "reduce") and found.number >= len(buckets):
            raise ValueError(f"{line!r}: the region has {len(buckets)} buckets")
        return found

    forward = _lines(f"{path}.forward", document.forward, event)
    backward = _lines(f"{path}.backward", document.backward, event)
    again = _lines(f"{path}.again", document.again, event)
    stays = document.stays
    return _at(path, lambda: RegionEvents(document.name, forward, backward, buckets, stays, again))


def _words(places: Sequence[Place]) -> str:
    return " ".join(f"{k}.{number}" for k, number in places)


def _merged(document: MergedDocument, path: str) -> tuple[tuple[Place, ...], Collective]:
    """Inverse of _words, and what runs."""

    def places() -> tuple[Place, ...]:
        found = [_PLACE.fullmatch(word) for word in document.places.split(" ")]
        if None in found:
            raise ValueError(f"{document.places!r}: write instance.bucket, as '7.0 6.0'")
        return tuple((int(match[1]), int(match[2])) for match in found if match)

    made = _at(f"{path}.collective", lambda: read_collective(document.collective))
    return _at(f"{path}.places", places), made


def _optional(path: str, line: str) -> Collective | None:
    return _at(path, lambda: read_collective(line)) if line else None


def _lines(path: str, lines: tuple[str, ...], read: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(_at(f"{path}[{k}]", partial(read, line)) for k, line in enumerate(lines))


def _at(path: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise PlanFormatError(f"{path}: {error}") from error
