"""Predicted memory by component: of the device that needs most, of every stage of a pipeline, and
over the step.

The components of a device add up to its peak, and what is free and the margin to what it has.
"""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from meshfold.ir.cluster import MEMORY_MARGIN
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.plan import Plan
from meshfold.report.memory_curve import (
    MemoryPlot,
    MemoryRows,
    device_stages,
    memory_curves,
    stages_name,
)
from meshfold.report.step_time import memory_band_text
from meshfold.report.tables import indented, section
from meshfold.report.waterfall import COLOURS, Waterfall
from meshfold.units import bytes_text, seconds_text

COMPONENTS = (
    ("P", "parameters", "parameters"),
    ("G", "gradients", "gradients"),
    ("O", "optimizer states", "optimizer"),
    ("A", "activations", "activations"),
    ("F", "gathered parameters", "gathered_parameters"),
    ("B", "buckets", "buckets"),
    ("L", "loss", "loss"),
    ("T", "transient", "transient"),
    ("E", "emitted program", "emitted"),
    ("R", "reserve", "reserve"),
)
"""(letter, for people, field of MemoryEstimate) of all that adds up to the peak."""


def components(memory: MemoryEstimate) -> list[tuple[str, str, int]]:
    """(letter, name, bytes)."""
    return [(letter, name, getattr(memory, field)) for letter, name, field in COMPONENTS]


def memory_view(plan: Plan) -> list[RenderableType]:
    """The peak by component, in a pipeline of every device, and memory over the step."""
    return [section(_title(plan), _peak(plan)), *_by_stage(plan), *_over_the_step(plan)]


def _title(plan: Plan) -> str:
    memory = plan.memory
    share = f", {100 * memory.peak / memory.capacity:.0f} %" if memory.capacity else ""
    return f"Peak memory {bytes_text(memory.peak)} of {bytes_text(memory.capacity)}{share}"


def _peak(plan: Plan) -> RenderableType:
    memory = plan.memory
    bars = tuple((name, amount, bytes_text(amount)) for _, name, amount in components(memory))
    beside = [("free", max(0, memory.capacity - memory.peak))]
    if plan.cluster.memory_bytes > memory.capacity:
        margin = plan.cluster.memory_bytes - memory.capacity
        is_stated = memory.capacity != plan.cluster.budget_bytes
        beside.append(("outside the budget" if is_stated else "margin", margin))
    names = max(len(name) for name, _, _ in bars)
    figures = max(len(text) for _, _, text in bars)
    lines = [f"  {name:<{names}}  {bytes_text(amount):>{figures}}" for name, amount in beside]
    return Group(
        Waterfall(bars, memory.capacity),
        Text("\n".join(lines)),
        indented(Text(_budget(plan), style="dim")),
    )


def _budget(plan: Plan) -> str:
    """Whose the budget is, and what is left of a device beside it."""
    budget, device = plan.memory.capacity, plan.cluster.memory_bytes
    if budget == plan.cluster.budget_bytes:
        return (
            f"{100 * MEMORY_MARGIN:.0f} % of the device's {bytes_text(device)} are left free as a "
            f"margin, --memory states another budget; {memory_band_text()}"
        )
    return f"the budget was stated; a device has {bytes_text(device)}; {memory_band_text()}"


def _by_stage(plan: Plan) -> list[RenderableType]:
    """A bar per device of a pipeline; nothing in one pass, or in the plan of an older meshfold."""
    costs = [plan.stages[numbers[0]].costs for numbers in device_stages(plan)]
    names = map(stages_name, device_stages(plan))
    rows = [(name, x.memory) for name, x in zip(names, costs, strict=True) if x and x.memory]
    if not rows:
        return []
    used = {letter for _, memory in rows for letter, _, amount in components(memory) if amount}
    legend = ", ".join(f"{letter} {name}" for letter, name, _ in COMPONENTS if letter in used)
    body = Group(_StackedBars(tuple(rows)), indented(Text(legend, style="dim")))
    return [section("Peak memory by stage", body)]


def _over_the_step(plan: Plan) -> list[RenderableType]:
    curves = memory_curves(plan)
    if not curves:
        return []
    if plan.schedule:
        title = "Memory over the step, by stage  (eighths of the largest peak)"
        return [section(title, MemoryRows(curves))]
    peak = f"{bytes_text(curves[0].peak_bytes)} at {seconds_text(curves[0].peak_s)}"
    return [section(f"Memory over the step, as simulated: most {peak}", MemoryPlot(curves[0]))]


@dataclass(frozen=True)
class _StackedBars:
    """One line per device: its components one after the other, to the scale of the largest peak."""

    rows: tuple[tuple[str, MemoryEstimate], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max(len(name) for name, _ in self.rows)
        figures = max(len(bytes_text(memory.peak)) for _, memory in self.rows)
        width = max(10, min(options.max_width - names - figures - 6, 72))
        full = max(memory.peak for _, memory in self.rows) or 1
        for name, memory in self.rows:
            yield Segment(f"  {name:<{names}}  {bytes_text(memory.peak):>{figures}}  ")
            below = 0
            for k, (letter, _, amount) in enumerate(components(memory)):
                first, last = (round(n / full * width) for n in (below, below + amount))
                below += amount
                yield Segment(letter * (last - first), Style.parse(COLOURS[k % len(COLOURS)]))
            yield Segment.line()
