"""Bytes of a device over one step, and how they are drawn.

one pass     as the step's events are simulated (cost_models/simulation/step.py)
a pipeline   per device: what is charged all the time, and of every stage what it keeps of a
             microbatch, from the start of its forward to the end of its backward, or of its
             weight gradients where these run apart. The most of that is the predicted peak
"""

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from meshfold.cost_models.pipeline.actions import Pass
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.plan import Plan, StageCosts
from meshfold.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from meshfold.cost_models.pipeline.schedules import Schedule
    from meshfold.report.pipeline_timeline import ActionSpan

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.:-=+*#"
PLOT_ROWS = 8


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of one device over a step."""

    name: str
    """The stages that it holds; "" in one pass."""
    samples: tuple[tuple[float, int], ...]
    """(from, bytes) in order of time; each lasts until the next one."""
    end_s: float

    @property
    def peak_bytes(self) -> int:
        return max(num_bytes for _, num_bytes in self.samples)

    @property
    def peak_s(self) -> float:
        """When the peak is first reached."""
        return max(self.samples, key=lambda sample: sample[1])[0]

    def columns(self, count: int) -> list[int]:
        """The most bytes in each of `count` equal parts of the step."""
        cells, step_s = [0] * count, self.end_s or 1.0
        ends = [*(start_s for start_s, _ in self.samples[1:]), self.end_s]
        for (start_s, num_bytes), end_s in zip(self.samples, ends, strict=True):
            first = min(int(start_s / step_s * count), count - 1)
            last = min(int(end_s / step_s * count), count - 1)
            for k in range(first, last + 1):
                cells[k] = max(cells[k], num_bytes)
        # Before the first sample there is what it begins with.
        return [n or self.samples[0][1] for n in cells]


def memory_curves(plan: Plan) -> tuple[MemoryCurve, ...]:
    """One per device of a pipeline, else one; none where the plan does not say enough."""
    if plan.schedule:
        return _pipeline_curves(plan)
    if plan.events is None:
        return ()
    found = simulate(plan.events)
    return (MemoryCurve("", found.memory, found.step.step_s),)


def device_stages(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Numbers of the stages of each device of a pipeline; none where the plan does not say what
    each holds. Raises OptionError for a schedule that is none."""
    costs = [stage.costs for stage in plan.stages]
    if not plan.schedule or any(x is None or x.memory is None for x in costs):
        return ()
    # Loads numpy, which `show` of other plans starts without.
    schedules = importlib.import_module("meshfold.cost_models.pipeline.schedules")
    schedule: Schedule = schedules.Schedule.parse(plan.schedule)
    if schedule.num_stages != len(costs):
        return ()
    return tuple(schedule.stages_of(device) for device in range(schedule.num_devices))


def stages_name(numbers: Sequence[int]) -> str:
    """The stages of a device."""
    return "stage " + "+".join(map(str, numbers))


def _pipeline_curves(plan: Plan) -> tuple[MemoryCurve, ...]:
    devices = device_stages(plan)
    if not devices:
        return ()
    costs = [stage.costs for stage in plan.stages if stage.costs is not None]
    timeline = importlib.import_module("meshfold.report.pipeline_timeline")
    spans: tuple[ActionSpan, ...] = timeline.predicted_spans(plan)
    end_s = max(span.end_s for span in spans)
    return tuple(
        MemoryCurve(
            stages_name(numbers),
            _device_samples([s for s in spans if s.device == device], costs, numbers),
            end_s,
        )
        for device, numbers in enumerate(devices)
    )


def _device_samples(
    spans: Sequence["ActionSpan"], costs: Sequence[StageCosts], numbers: Sequence[int]
) -> tuple[tuple[float, int], ...]:
    """What a device holds over its actions, in their order."""
    most = sum(costs[s].in_flight * costs[s].microbatch_bytes for s in numbers)
    held = costs[numbers[0]].peak_bytes - most
    apart = {(s.stage, s.microbatch) for s in spans if s.kind == Pass.WEIGHT_GRADIENT}
    samples = [(0.0, held)]
    for span in spans:
        num_bytes = costs[span.stage].microbatch_bytes
        if span.kind == Pass.FORWARD:
            held += num_bytes
            samples.append((span.start_s, held))
        elif span.kind == _last_pass(span, apart):
            held -= num_bytes
            samples.append((span.end_s, held))
    return tuple(samples)


def _last_pass(span: "ActionSpan", apart: Collection[tuple[int, int]]) -> Pass:
    """That which needs the activations last. apart: (stage, microbatch) with weight gradients."""
    return Pass.WEIGHT_GRADIENT if (span.stage, span.microbatch) in apart else Pass.BACKWARD


@dataclass(frozen=True)
class MemoryPlot:
    """A curve over several lines, from nothing to its peak."""

    curve: MemoryCurve

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        curve, levels = self.curve, ASCII_LEVELS if options.ascii_only else LEVELS
        peak = max(curve.peak_bytes, 1)
        ticks = [bytes_text(curve.peak_bytes), *[""] * (PLOT_ROWS - 2), "0"]
        ticks[PLOT_ROWS // 2] = bytes_text(curve.peak_bytes * (PLOT_ROWS // 2) // PLOT_ROWS)
        left = max(map(len, ticks))
        width = max(10, min(options.max_width - left - 5, 96))
        # In eighths of a line, which the top of the plot divides evenly.
        heights = [-(-8 * PLOT_ROWS * n // peak) for n in curve.columns(width)]
        for row, tick in enumerate(ticks):
            below = 8 * (PLOT_ROWS - 1 - row)
            filled = (min(8, height - below) for height in heights)
            line = "".join(levels[n - 1] if n > 0 else " " for n in filled)
            yield Segment(f"  {tick:>{left}} |{line}|\n")
        end = seconds_text(curve.end_s)
        yield Segment(f"  {'':>{left}} 0{end:>{width + 1}}\n")


@dataclass(frozen=True)
class MemoryRows:
    """Curves of several devices, one line each, in eighths of the largest peak."""

    curves: tuple[MemoryCurve, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        levels = ASCII_LEVELS if options.ascii_only else LEVELS
        left = max(len(curve.name) for curve in self.curves)
        width = max(10, min(options.max_width - left - 5, 96))
        peak = max(curve.peak_bytes for curve in self.curves)
        for curve in self.curves:
            yield Segment(f"  {curve.name:<{left}} |{level_row(curve, width, peak, levels)}|\n")
        end = seconds_text(max(curve.end_s for curve in self.curves))
        yield Segment(f"  {'':<{left}} 0{end:>{width + 1}}\n")


def level_row(curve: MemoryCurve, count: int, peak_bytes: int, levels: str = LEVELS) -> str:
    """The most of each of `count` parts of the step, in eighths of `peak_bytes`."""
    return "".join(levels[min(7, 8 * n // max(peak_bytes, 1))] for n in curve.columns(count))
