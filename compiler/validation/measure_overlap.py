"""Which collectives of a plan really hide: its program on local processes, and the forecast.

Every process notes when it starts each collective, when it comes to need the result, and when it
has it. In between it has computed (hidden) or waited (exposed). The k-th collective of a kind over
some axes is the k-th such one of the simulated step (cost_models/simulation/step.py); medians over
steps, of rank 0. One that was to hide and did not is named, with the reason that the notes give.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshfold.api import bind
from meshfold.cost_models.simulation.streams import Transfer
from meshfold.distributed.local_processes import Report, run_local
from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import build_for_plan
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.report.step_timeline import axes_width, simulated_timeline
from meshfold.runtime.runner import ProgramRunner
from meshfold.units import seconds_text
from meshfold.validation.captured import captured_as_planned
from meshfold.validation.collective_order import STARTS, replaced_methods
from meshfold.validation.scaled_down import MAX_PROCESSES

WARM_UP, STEPS = 2, 7
NUM_NAMED = 8
SHORT = 0.1
"""Share of the time in flight: a lead below it leaves nothing to hide behind."""


@dataclass(frozen=True, slots=True)
class Note:
    """A collective of a step that ran."""

    kind: str
    axes: Axes
    start_s: float
    """When it was started, from the start of the step."""
    lead_s: float
    """From its start until its result was asked for."""
    flight_s: float
    """From its start until its result was there."""
    queued: int
    """Other collectives in flight when it was started."""

    @property
    def exposed_s(self) -> float:
        return self.flight_s - self.lead_s


@dataclass(frozen=True, slots=True)
class Compared:
    """A collective as predicted and as measured."""

    kind: str
    axes: Axes
    instance: int
    """The layer that starts it."""
    predicted_hidden_s: float
    predicted_exposed_s: float
    hidden_s: float
    """Time overlapped with compute, at the most."""
    exposed_s: float
    reason: str = ""
    """Why it was exposed, if it was to hide; else empty."""

    @property
    def was_to_hide(self) -> bool:
        return self.predicted_hidden_s > self.predicted_exposed_s

    @property
    def is_hidden(self) -> bool:
        return self.hidden_s >= self.exposed_s


@dataclass(frozen=True)
class MeasuredOverlap:
    """The collectives of one step, with their forecast."""

    world_size: int
    predicted_s: float
    step_s: float
    collectives: tuple[Compared, ...]
    unmatched: int
    """Collectives that ran and were not predicted, or the reverse."""

    @property
    def failed(self) -> tuple[Compared, ...]:
        """What was to hide and did not, the worst first."""
        found = (c for c in self.collectives if c.reason)
        return tuple(sorted(found, key=lambda c: -c.exposed_s))


def measure_overlap(plan: Plan, model_argument: str) -> MeasuredOverlap:
    """Run a plan without a pipeline. model_argument: the MODEL of the command line.

    Raises OptionError for a plan that has stages or no simulated step, MeshfoldError for more
    processes than this machine should start, PlanMismatchError for another model.
    """
    if plan.schedule:
        raise OptionError(
            f"{plan.strategy.label}: --measured is for plans that run a batch in one pass; leave "
            "it out to see the pipeline as predicted"
        )
    if plan.world_size > MAX_PROCESSES:
        raise MeshfoldError(
            f"the plan is for {plan.world_size} processes, --measured starts at most "
            f"{MAX_PROCESSES}; plan a smaller version of the model with the same degrees for "
            "local-cpux8 or less and measure that"
        )
    simulation = simulated_timeline(plan)
    captured_as_planned(plan, build_for_plan(model_argument, plan))
    results = run_local(plan.world_size, _run, plan_to_json(plan), model_argument, quiet=True)
    step_s, notes = results[0]
    compared, unmatched = compare(simulation.transfers, notes)
    # The optimizer does not run here.
    assert plan.events is not None
    predicted_s = simulation.step.step_s - plan.events.optimizer_s
    return MeasuredOverlap(plan.world_size, predicted_s, step_s, compared, unmatched)


def _run(_: Report, plan_text: str, model_argument: str) -> tuple[float, list[list[Note]]]:
    """(median seconds of a step, notes of every step) of this rank."""
    plan = plan_from_json(plan_text)
    built = build_for_plan(model_argument, plan, device="cpu")
    captured = captured_as_planned(plan, built)
    compiled = bind(built.model, plan, captured, built.example_inputs, loss_fn=built.loss_fn)
    assert compiled.rank_mesh is not None
    runner = compiled.runner()
    assert isinstance(runner, ProgramRunner), "a pipeline is measured by its actions"
    seconds, logs = [], []
    for _step in range(WARM_UP + STEPS):
        compiled.zero_grad()
        with notes_of(compiled.rank_mesh) as notes:
            start = time.perf_counter()
            loss = compiled.run_with(runner, built.example_inputs)
            torch.autograd.backward(loss.sum())
            seconds.append(time.perf_counter() - start)
        logs.append(notes)
    return statistics.median(seconds[WARM_UP:]), logs[WARM_UP:]


@contextmanager
def notes_of(mesh: RankMesh) -> Iterator[list[Note]]:
    """A context in which every collective of this rank is timed; at its end the list has notes, in
    the order in which they were started."""
    begin = time.perf_counter()
    started: list[_Started] = []
    rings: list[int] = []
    is_inside = False  # a pass is an exchange, which is not timed once more
    ended: dict[int, tuple[float, float]] = {}
    in_flight: dict[int, int] = {}
    """Storage of the result -> number."""

    def timed(kind: str, start: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, axes: Axes | str, *rest: Any) -> Tensor:
            nonlocal is_inside
            if is_inside:
                return start(x, axes, *rest)
            now = time.perf_counter() - begin
            queued, is_inside = len(in_flight), True
            result = start(x, axes, *rest)
            is_inside = False
            axes = (axes,) if isinstance(axes, str) else axes
            in_flight[result.untyped_storage().data_ptr()] = len(started)
            started.append(_Started(kind, axes, now, queued, len(rings)))
            return result

        return call

    def timed_wait(wait: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(in_flight_result: Tensor) -> Tensor:
            asked = time.perf_counter() - begin
            result = wait(in_flight_result)
            number = in_flight.pop(in_flight_result.untyped_storage().data_ptr(), None)
            if number is not None:
                ended[number] = asked, time.perf_counter() - begin
            return result

        return call

    plain = {"all_reduce_in_place": "all_reduce", "exchange": "all_to_all"}
    kinds = (*STARTS, "shift")
    starts = {f"start_{kind}": partial(timed, plain.get(kind, kind)) for kind in kinds}
    notes: list[Note] = []
    with replaced_methods(
        mesh,
        {**starts, "wait": timed_wait, "begin_ring": lambda _: lambda: rings.append(len(rings))},
    ):
        yield notes
    notes += _notes(started, ended)


@dataclass(frozen=True, slots=True)
class _Started:
    """number: of the round that was begun last, which a pass belongs to."""

    kind: str
    axes: Axes
    start_s: float
    queued: int
    number: int


def _notes(started: Sequence[_Started], ended: Mapping[int, tuple[float, float]]) -> list[Note]:
    """Notes of what was waited for. ended: by index in `started`, when it was asked for and
    there."""
    notes: list[Note] = []
    of_round: dict[int, int] = {}
    for k, one in enumerate(started):
        if k not in ended:
            continue
        asked_s, end_s = ended[k]
        seconds = asked_s - one.start_s, end_s - one.start_s
        note = Note(one.kind, one.axes, one.start_s, *seconds, one.queued)
        if one.kind == "shift" and one.number in of_round:
            first = of_round[one.number]
            notes[first] = _together(notes[first], note)
            continue
        if one.kind == "shift":
            of_round[one.number] = len(notes)
        notes.append(note)
    return notes


def _together(first: Note, then: Note) -> Note:
    """Passes of one round, as one."""
    lead_s, flight_s = first.lead_s + then.lead_s, first.flight_s + then.flight_s
    return replace(first, lead_s=lead_s, flight_s=flight_s)


def compare(
    transfers: Sequence[Transfer], logs: Sequence[Sequence[Note]]
) -> tuple[tuple[Compared, ...], int]:
    """(predicted collectives with those of every step, how many have no counterpart)."""
    measured: dict[tuple[str, Axes], list[list[Note]]] = defaultdict(lambda: [[] for _ in logs])
    for k, log in enumerate(logs):
        for note in log:
            measured[note.kind, note.axes][k].append(note)
    counts: dict[tuple[str, Axes], int] = defaultdict(int)
    found = []
    missing = 0
    for transfer in transfers:
        key = transfer.collective.kind, transfer.collective.axes
        number, counts[key] = counts[key], counts[key] + 1
        steps = [of[number] for of in measured[key] if number < len(of)]
        if steps:
            found.append(_compared(transfer, steps))
        else:
            missing += 1
    missing += sum(max(0, len(of[0]) - counts[key]) for key, of in measured.items() if of)
    return tuple(found), missing


def _compared(transfer: Transfer, steps: Sequence[Note]) -> Compared:
    lead_s = statistics.median(note.lead_s for note in steps)
    exposed_s = statistics.median(note.exposed_s for note in steps)
    found = Compared(
        transfer.collective.kind,
        transfer.collective.axes,
        transfer.instance,
        transfer.hidden_s,
        transfer.exposed_s,
        lead_s,
        exposed_s,
    )
    if not found.was_to_hide or found.is_hidden:
        return found
    queued = round(statistics.median(note.queued for note in steps))
    return replace(found, reason=_reason(found, transfer, queued))


def _reason(found: Compared, transfer: Transfer, queued: int) -> str:
    flight_s = found.hidden_s + found.exposed_s
    if found.hidden_s < SHORT * flight_s:
        return f"started only {seconds_text(found.hidden_s)} before it was needed"
    if queued:
        others = "another one" if queued == 1 else f"{queued} others"
        return f"queued behind {others} in flight"
    return (
        f"took {seconds_text(flight_s)}, predicted {seconds_text(transfer.collective.seconds)}, "
        f"and there was {seconds_text(found.hidden_s)} of compute to overlap with it"
    )


def overlap_json(found: MeasuredOverlap) -> str:
    """Everything as JSON, ending in a newline."""
    return json.dumps(asdict(found), indent=2) + "\n"


def overlap_text(found: MeasuredOverlap) -> str:
    """A table by kind and axes, and what was to hide and did not."""
    groups: dict[tuple[str, Axes], list[Compared]] = defaultdict(list)
    for c in found.collectives:
        groups[c.kind, c.axes].append(c)
    wide = axes_width(axes for _, axes in groups)
    lines = [
        f"one step on {found.world_size} local processes: {seconds_text(found.step_s)}, predicted "
        f"{seconds_text(found.predicted_s)} (forward and backward)",
        f"{'':<{wide + 22}}{'predicted':^20}{'measured':^20}",
        f"{'collective':<16}{'over':<{wide}}{'n':>6}{'hidden':>10}{'exposed':>10}{'hidden':>10}"
        f"{'exposed':>10}  hidden of n",
    ]
    for (kind, axes), members in groups.items():
        sums = (
            sum(c.predicted_hidden_s for c in members),
            sum(c.predicted_exposed_s for c in members),
            sum(c.hidden_s for c in members),
            sum(c.exposed_s for c in members),
        )
        name = kind.replace("_", "-")
        lines.append(
            f"{name:<16}{' x '.join(axes):<{wide}}{len(members):>6}"
            + "".join(f"{seconds_text(s):>10}" for s in sums)
            + f"{sum(c.is_hidden for c in members):>6}"
        )
    if found.unmatched:
        lines.append(f"{found.unmatched} collectives have no counterpart in the prediction")
    return "\n".join([*lines, *_failed_lines(found.failed)]) + "\n"


def _failed_lines(failed: Sequence[Compared]) -> list[str]:
    if not failed:
        return ["all that was to hide did"]
    lines = [f"{len(failed)} were to hide and did not:"]
    for c in failed[:NUM_NAMED]:
        name = f"{c.kind.replace('_', '-')} over {' x '.join(c.axes)} of layer {c.instance}"
        lines.append(f"  {name}: waited {seconds_text(c.exposed_s)}; {c.reason}")
    if len(failed) > NUM_NAMED:
        lines.append(f"  and {len(failed) - NUM_NAMED} more; --json has all")
    return lines
