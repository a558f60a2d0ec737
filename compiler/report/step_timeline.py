"""One step of a plan without a pipeline, as simulated: rows of text, JSON, a Chrome trace.

compute   F forward, B backward (recomputed forwards included), = optimizer, blank waiting
links     g all-gather, s reduce-scatter, r all-reduce, t all-to-all: small while compute
          overlaps it, large where compute waits for most of it
memory    of its peak
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from meshfold.cost_models.simulation.step import Simulation, simulate
from meshfold.cost_models.simulation.streams import Transfer
from meshfold.errors import OptionError
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import OverlapRow, SimulatedStep
from meshfold.report.memory_curve import MemoryCurve, level_row
from meshfold.report.pipeline_timeline import (
    COLUMNS,
    MICROSECONDS,
    predicted_spans,
    spans_json,
    spans_text,
    trace_json,
)
from meshfold.report.terminal import escaped
from meshfold.units import bytes_text, seconds_text

LETTERS = {
    "all_gather": "g",
    "reduce_scatter": "s",
    "all_reduce": "r",
    "all_to_all": "t",
    "shift": "k",
}
LEGEND = (
    "F forward, B backward, = optimizer; g all-gather, s reduce-scatter, r all-reduce, t "
    "all-to-all,\nk keys that go round; large where compute waits for most of it; memory in "
    "eighths of its peak"
)
HALF, QUARTER = 0.5, 0.25
"""Of a cell: compute is blank where it mostly waits, a link where it is hardly used."""
OPTIMIZER = -1
"""Number of an instance in spans that are of none."""


@dataclass(frozen=True)
class Timeline:
    """What `meshfold timeline` gives: for people, for programs, for a trace viewer."""

    text: str
    json: str
    trace: str


def timeline_of(plan: Plan) -> Timeline:
    """The predicted timeline of any plan. Raises OptionError for one without a simulated step."""
    if plan.schedule:
        spans = predicted_spans(plan)
        how = "predicted"
        if plan.simulated is not None:
            how = f"stages add up, {seconds_text(plan.simulated.step_s)} as simulated"
        return Timeline(spans_text(spans, how), spans_json(spans), trace_json(spans))
    simulation = simulated_timeline(plan)
    links = links_of(plan)
    return Timeline(
        timeline_text(simulation, links),
        timeline_json(simulation),
        timeline_trace(simulation, links),
    )


def simulated_timeline(plan: Plan) -> Simulation:
    """The step, simulated again. Raises OptionError if the plan does not say what runs."""
    if plan.events is None:
        raise OptionError(
            f"{plan.strategy.label}: the plan has no simulated step: its file is of an older "
            "meshfold; plan again, or price it anew with 'meshfold check'"
        )
    return simulate(plan.events)


def links_of(plan: Plan) -> tuple[str, ...]:
    """Names of the link levels, inside a node first."""
    inside = (group.link.name for group in plan.cluster.groups)
    return tuple(dict.fromkeys((*inside, plan.cluster.network.name)))


def timeline_text(simulation: Simulation, links: Sequence[str]) -> str:
    """One row per stream, then memory, figures, and a table by kind and axes."""
    step = simulation.step
    rows = [("compute", _row(_compute_marks(simulation), step.step_s, HALF))]
    for link in links:
        members = [t for t in simulation.transfers if t.collective.link == link]
        if members:
            marks = ((t.start_s, t.end_s, _letter(t)) for t in members)
            rows.append((link, _row(marks, step.step_s, QUARTER)))
    curve = MemoryCurve("", simulation.memory, step.step_s)
    rows.append(("memory", level_row(curve, COLUMNS, step.peak_bytes)))
    rows = [(escaped(name), row) for name, row in rows]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  |{row}|" for name, row in rows]
    lines += [LEGEND, "", _figures(step)]
    return "\n".join([*lines, *overlap_lines(step.overlap)]) + "\n"


def _figures(step: SimulatedStep) -> str:
    return (
        f"one step, {seconds_text(step.step_s)} as simulated: compute "
        f"{seconds_text(step.compute_s)}, slowed down by {seconds_text(step.contention_s)} beside "
        f"collectives, waiting {seconds_text(step.exposed_s)}\n"
        f"peak memory {bytes_text(step.peak_bytes)} at {seconds_text(step.peak_s)}"
    )


def overlap_lines(rows: Sequence[OverlapRow]) -> list[str]:
    """The table of what is hidden and what is exposed."""
    if not rows:
        return ["no collectives"]
    wide = axes_width(row.axes for row in rows)
    lines = [f"{'collective':<16}{'over':<{wide}}{'n':>6}{'hidden':>10}{'exposed':>10}"]
    for row in rows:
        name, axes = escaped(row.kind.replace("_", "-")), escaped(" x ".join(row.axes))
        lines.append(
            f"{name:<16}{axes:<{wide}}{row.count:>6}"
            f"{seconds_text(row.hidden_s):>10}{seconds_text(row.exposed_s):>10}"
        )
    return lines


def axes_width(groups: Iterable[tuple[str, ...]]) -> int:
    """Of a column of groups of axes."""
    return max([10, *(len(" x ".join(axes)) + 2 for axes in groups)])


def _compute_marks(simulation: Simulation) -> Iterable[tuple[float, float, str]]:
    for span in simulation.spans:
        mark = "=" if span.instance == OPTIMIZER else "B" if span.is_backward else "F"
        yield span.start_s, span.end_s, mark


def _letter(transfer: Transfer) -> str:
    letter = LETTERS.get(transfer.collective.kind, "?")
    return letter.upper() if transfer.exposed_s > transfer.hidden_s else letter


def _row(marks: Iterable[tuple[float, float, str]], step_s: float, least: float) -> str:
    """Every cell shows what takes most of it, if anything takes the share `least`."""
    cell_s = step_s / COLUMNS or 1.0
    cells: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    for start_s, end_s, mark in marks:
        first = min(int(start_s / cell_s), COLUMNS - 1)
        last = min(int(end_s / cell_s), COLUMNS - 1)
        for k in range(first, last + 1):
            inside_s = min(end_s, (k + 1) * cell_s) - max(start_s, k * cell_s)
            cells[k][mark] = cells[k].get(mark, 0.0) + inside_s
    found = []
    for cell in cells:
        is_idle = sum(cell.values()) < least * cell_s
        found.append(" " if is_idle else max(cell, key=cell.__getitem__))
    return "".join(found)


def timeline_json(simulation: Simulation) -> str:
    """Figures, spans and memory, ending in a newline."""
    step = simulation.step
    document = {
        **asdict(step),
        "step_s": step.step_s,
        "hidden_share": step.hidden_share,
        "compute": [asdict(span) for span in simulation.spans],
        "collectives": [
            {
                **asdict(t.collective),
                "instance": t.instance,
                "issued_s": t.issued_s,
                "start_s": t.start_s,
                "end_s": t.end_s,
                "hidden_s": t.hidden_s,
                "exposed_s": t.exposed_s,
            }
            for t in simulation.transfers
        ],
        "memory": simulation.memory,
    }
    return json.dumps(document, indent=2) + "\n"


def timeline_trace(simulation: Simulation, links: Sequence[str]) -> str:
    """A Chrome trace: a thread per stream, and a counter of memory."""
    # A plan that was edited may name links that its cluster has not.
    named = (t.collective.link for t in simulation.transfers)
    threads = tuple(dict.fromkeys(("compute", *links, *named)))
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": k, "args": {"name": name}}
        for k, name in enumerate(threads)
    ]
    for span in simulation.spans:
        direction = "backward" if span.is_backward else "forward"
        name = "optimizer" if span.instance == OPTIMIZER else f"{direction} {span.instance}"
        events.append(_span(name, direction, 0, span.start_s, span.end_s))
    for t in simulation.transfers:
        c = t.collective
        name = f"{c.kind.replace('_', '-')} over {' x '.join(c.axes)}"
        event = _span(name, c.kind, threads.index(c.link), t.start_s, t.end_s)
        seconds = {"issued_s": t.issued_s, "exposed_s": t.exposed_s}
        events.append({**event, "args": {"bytes": c.num_bytes, "instance": t.instance, **seconds}})
    events += [
        {
            "name": "memory",
            "ph": "C",
            "pid": 0,
            "ts": start_s * MICROSECONDS,
            "args": {"bytes": num_bytes},
        }
        for start_s, num_bytes in simulation.memory
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _span(name: str, category: str, thread: int, start_s: float, end_s: float) -> dict[str, object]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "ts": start_s * MICROSECONDS,
        "dur": (end_s - start_s) * MICROSECONDS,
    }
