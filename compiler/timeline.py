"""When the stages of a pipeline run which microbatch, as the plan predicts: text, JSON, trace.

Times are those of the plan's stages; the travel between two stages is part of what a stage waits.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from meshfold.cost_models.pipeline import StageTimes, action_spans
from meshfold.cost_models.schedules import Pass, Schedule
from meshfold.errors import OptionError
from meshfold.plan import Plan
from meshfold.units import seconds_text

COLUMNS = 96
LETTERS = "abcdefghijklmnopqrstuvwxyz"
UPDATE = "update"
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """One action of a device ("2F0"), or the update behind its last one; from the start of the
    step. kind: F, B, W, or nothing for the update."""

    device: int
    stage: int
    name: str
    kind: str
    microbatch: int
    start_s: float
    end_s: float


def predicted_spans(plan: Plan) -> tuple[Span, ...]:
    """Every action of a step, by device and time. Raises OptionError for a plan without stages."""
    figures = [stage.figures for stage in plan.stages if stage.figures is not None]
    if not plan.schedule or len(figures) != len(plan.stages):
        raise OptionError(
            f"{plan.strategy.label}: the plan runs every batch in one pass, there are no stages to "
            "show; plan with --pin pp=2 or --pin microbatches=4"
        )
    schedule = Schedule.parse(plan.schedule)
    times = StageTimes.build([f.forward_s for f in figures], [f.backward_s for f in figures])
    found = []
    for device, actions in enumerate(action_spans(schedule.actions(), times)):
        for action, start_s, end_s in actions:
            found.append(
                Span(
                    device,
                    action.stage,
                    str(action),
                    action.kind,
                    action.microbatch,
                    start_s,
                    end_s,
                )
            )
        last = found[-1]
        late_s = sum(figures[s].sync_s for s in schedule.stages_of(device))
        found.append(Span(device, last.stage, UPDATE, "", 0, last.end_s, last.end_s + late_s))
    return tuple(found)


def spans_text(spans: Sequence[Span]) -> str:
    """One row per device: digits are forwards, letters backwards, of microbatch 0, 1, ..."""
    step_s = max(span.end_s for span in spans)
    rows = []
    for device in range(1 + spans[-1].device):
        row = [" "] * COLUMNS
        for span in spans:
            if span.device == device and span.end_s > span.start_s:
                first = int(span.start_s / step_s * COLUMNS)
                end = max(first + 1, round(span.end_s / step_s * COLUMNS))
                row[first:end] = _mark(span) * (min(end, COLUMNS) - first)
        stages = sorted({str(span.stage) for span in spans if span.device == device})
        rows.append(f"stage {'+'.join(stages):>6}  |{''.join(row)}|")
    legend = "0-9 forward, a-z backward of microbatch 0, 1, ...; w weight gradients; = update"
    return "\n".join([*rows, f"one step, {seconds_text(step_s)} as predicted: {legend}"]) + "\n"


def _mark(span: Span) -> str:
    if span.kind == Pass.FORWARD:
        return str(span.microbatch % 10)
    if span.kind == Pass.BACKWARD:
        return LETTERS[span.microbatch % len(LETTERS)]
    return "w" if span.kind else "="


def spans_json(spans: Sequence[Span]) -> str:
    """A list of spans, ending in a newline."""
    return json.dumps([asdict(span) for span in spans], indent=2) + "\n"


def trace_json(spans: Sequence[Span]) -> str:
    """A Chrome trace: a process per device, a thread per stage."""
    events = [
        {
            "name": span.name,
            "cat": span.kind or UPDATE,
            "ph": "X",
            "pid": span.device,
            "tid": span.stage,
            "ts": span.start_s * MICROSECONDS,
            "dur": (span.end_s - span.start_s) * MICROSECONDS,
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
