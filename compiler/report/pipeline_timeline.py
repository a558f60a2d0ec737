"""When the stages of a pipeline run which microbatch: text, JSON, trace.

As the plan predicts, from the times of its stages (a stage's wait includes the transfer from
another one), or as measured (meshfold.validation.measure_pipeline).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.cost_models.pipeline.makespan import StageTimes, action_spans
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import OptionError
from meshfold.ir.plan import Plan
from meshfold.units import seconds_text

COLUMNS = 96
LETTERS = "abcdefghijklmnopqrstuvwxyz"
UPDATE = "update"
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action of a device ("2F0"), or the update behind its last one; from the start of the
    step. kind: F, B, W, or nothing for the update."""

    device: int
    stage: int
    name: str
    kind: str
    microbatch: int
    start_s: float
    end_s: float

    @classmethod
    def of(cls, device: int, action: StageAction, start_s: float, end_s: float) -> "ActionSpan":
        """That of an action."""
        kind, microbatch = action.kind, action.microbatch
        return cls(device, action.stage, str(action), kind, microbatch, start_s, end_s)

    def later(self, seconds: float) -> "ActionSpan":
        """The same, so much later."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)


def predicted_spans(plan: Plan) -> tuple[ActionSpan, ...]:
    """Every action of a step, by device and time. Raises OptionError for a plan without stages."""
    figures = [stage.costs for stage in plan.stages if stage.costs is not None]
    if not plan.schedule or len(figures) != len(plan.stages):
        raise OptionError(
            f"{plan.strategy.label}: the plan runs every batch in one pass, there are no stages to "
            "show; plan with --pin pp=2 or --pin microbatches=4"
        )
    schedule = Schedule.parse(plan.schedule)
    times = StageTimes.build(
        [f.forward_s for f in figures],
        [f.backward_s for f in figures],
        weight_s=[f.weight_s for f in figures],
        hop_s=[f.hop_s for f in figures[1:]],
    ).between_devices(schedule)
    found = []
    for device, actions in enumerate(action_spans(schedule.actions(), times)):
        found += [ActionSpan.of(device, *span) for span in actions]
        last = found[-1]
        sync_s = sum(figures[s].sync_s for s in schedule.stages_of(device))
        found.append(ActionSpan(device, last.stage, UPDATE, "", 0, last.end_s, last.end_s + sync_s))
    return tuple(found)


def bubble_share(spans: Sequence[ActionSpan]) -> float:
    """Of the devices' time from the first pass to the last, what they wait; updates left out."""
    passes = [span for span in spans if span.kind]
    busy_s = sum(span.end_s - span.start_s for span in passes)
    whole_s = max(s.end_s for s in passes) - min(s.start_s for s in passes)
    return 1 - busy_s / (whole_s * (1 + spans[-1].device)) if whole_s else 0.0


def spans_text(spans: Sequence[ActionSpan], how: str = "predicted") -> str:
    """One row per device: digits are forwards, letters backwards, of microbatch 0, 1, ..."""
    step_s = max(span.end_s for span in spans) or 1.0
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
    step = f"one step, {seconds_text(step_s)} as {how}, bubble {bubble_share(spans):.0%}"
    return "\n".join([*rows, f"{step}: {legend}"]) + "\n"


def both_text(predicted: Sequence[ActionSpan], measured: Sequence[ActionSpan] = ()) -> str:
    """What is predicted, and below it what was measured, if anything."""
    return spans_text(predicted) + (spans_text(measured, "measured") if measured else "")


def _mark(span: ActionSpan) -> str:
    if span.kind == Pass.FORWARD:
        return str(span.microbatch % 10)
    if span.kind == Pass.BACKWARD:
        return LETTERS[span.microbatch % len(LETTERS)]
    return "w" if span.kind else "="


def spans_json(spans: Sequence[ActionSpan], measured: Sequence[ActionSpan] = ()) -> str:
    """A list of spans, ending in a newline; with measured ones an object of both lists."""
    document: object = [asdict(span) for span in spans]
    if measured:
        document = {"predicted": document, "measured": [asdict(span) for span in measured]}
    return json.dumps(document, indent=2) + "\n"


def trace_json(spans: Sequence[ActionSpan], measured: Sequence[ActionSpan] = ()) -> str:
    """A Chrome trace: a process per device, behind them one for what was measured of each, a thread
    per stage."""
    num_devices = 1 + max(span.device for span in spans)
    events = [_event(span, span.device) for span in spans]
    events += [_event(span, num_devices + span.device) for span in measured]
    names = [f"device {k}" for k in range(num_devices)]
    names += [f"{name}, measured" for name in names] if measured else []
    events += [
        {"name": "process_name", "ph": "M", "pid": k, "args": {"name": name}}
        for k, name in enumerate(names)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _event(span: ActionSpan, process: int) -> dict[str, object]:
    return {
        "name": span.name,
        "cat": span.kind or UPDATE,
        "ph": "X",
        "pid": process,
        "tid": span.stage,
        "ts": span.start_s * MICROSECONDS,
        "dur": (span.end_s - span.start_s) * MICROSECONDS,
    }
