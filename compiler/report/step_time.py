"""The step time of a plan as text: one figure, what it consists of, and how far to trust it.

The figure is the simulated one where there is one, else what the search added up. `explain` prints
the sum beside a simulated step.
"""

from collections.abc import Mapping
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.text import Text

from meshfold.cost_models.hardware.error_bands import (
    ErrorBand,
    PlanKind,
    error_bands,
    family_of,
    spread_of,
)
from meshfold.ir.optimizers import OF_STATES
from meshfold.ir.plan import Plan, TimeEstimate
from meshfold.ir.step_events import SimulatedStep
from meshfold.report.tables import indented, section
from meshfold.report.waterfall import Waterfall
from meshfold.units import count_text, seconds_text, three_digits

NOTHING = "-"
LEAST_ROWS = 3
"""Runs that make a band; of fewer the mean is said."""


def step_view(plan: Plan) -> RenderableType:
    """The section about the step time."""
    simulated = plan.simulated
    bars = _added_up(plan.time) if simulated is None else _simulated(simulated)
    lines = [*_rates(plan), *_band_detail(plan), _how(plan)]
    if simulated is None and (before := by_axis_text(plan.time.communication_s)) != NOTHING:
        lines.append(f"communication before overlap: {before}")
    title = f"Step time {seconds_text(plan.step_s)}  ({band_text(plan)})"
    return section(title, Group(bars, indented(Text("\n".join(lines), style="dim"))))


def sum_view(plan: Plan) -> list[RenderableType]:
    """What the search added up, for a plan that states the simulated step; else nothing."""
    if plan.simulated is None:
        return []
    lines = [
        "the search compares these sums; the step time that the plan states, "
        f"{seconds_text(plan.simulated.step_s)}, is simulated"
    ]
    before = by_axis_text(plan.time.communication_s)
    if before != NOTHING:
        lines.append(f"communication before overlap: {before}")
    rows = [f"{b.name}: {seconds_text(b.step_s)}" for b in plan.baselines]
    lines += [f"baselines, added up: {', '.join(rows)}"] if rows else []
    title = f"Step time as added up {seconds_text(plan.time.step_s)}"
    text = indented(Text("\n".join(lines), style="dim"))
    return [section(title, Group(_added_up(plan.time), text))]


_OTHER_STATES: Mapping[str, str] = MappingProxyType(
    {
        "adamw_bf16": ", Adam's states in bfloat16",
        "adamw_8bit": ", Adam's states in 8 bits",
        "adafactor": ", Adafactor's rows and columns too",
        "muon": ", Muon's and Adam's states too",
        "momentum": ", momentum too",
    }
)


def precision_text(plan: Plan) -> str:
    """What ops compute in, and what is kept in which dtype, in one line."""
    sizes: dict[str, int] = {}
    for region in plan.regions:
        for parameter in region.parameters:
            amount = parameter.num_bytes * region.num_instances
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + amount
    stored = " and ".join(sorted(sizes, key=lambda d: (-sizes[d], d))) or "float32"
    kept = "weights and gradients' sum"
    if plan.optimizer in OF_STATES["full"]:
        kept = "weights, gradients' sum and Adam's states"
    computes = plan.model.compute_dtype or stored
    text = f"computes in {computes}; {kept} in {stored}" + _OTHER_STATES.get(plan.optimizer, "")
    if plan.precision == "model":
        text += ", as the model is"
    return text


def band_text(plan: Plan) -> str:
    """How far predictions of such plans were from published runs, in a few words."""
    band = error_bands().of(plan.cluster, kind_of(plan))
    if band is None:
        return "no published run of this kind was compared"
    if band.rows < LEAST_ROWS:
        runs = f"{band.rows} published run" + "s" * (band.rows > 1)
        return f"{runs} of this kind: {_percent(band.bias)}"
    return f"published runs of this kind: {_range(band)}"


def memory_band_text() -> str:
    """How far predicted peaks were from published ones."""
    band = error_bands().memory
    if band is None:
        return "no predicted peak was held against a published run"
    runs = f"{band.rows} published run" + "s" * (band.rows > 1)
    return f"predicted peaks of {runs} were off by {_range(band)}"


def kind_of(plan: Plan) -> PlanKind:
    """The kind that errors are told apart by."""
    if plan.strategy.pp > 1:
        return "stages"
    return "microbatches" if plan.strategy.microbatches > 1 else "one pass"


def by_axis_text(communication_s: Mapping[str, float]) -> str:
    """Seconds by axis; NOTHING for none."""
    return (
        ", ".join(f"{axis} {seconds_text(s)}" for axis, s in communication_s.items() if s)
        or NOTHING
    )


def _added_up(time: TimeEstimate) -> Waterfall:
    parts = [
        ("forward", time.forward_s),
        ("backward", time.backward_s),
        ("exposed communication", time.exposed_communication_s),
        ("optimizer", time.optimizer_s),
    ]
    if time.bubble_s:
        parts.append(("bubble", time.bubble_s))
    return Waterfall(tuple((label, s, seconds_text(s)) for label, s in parts))


def _simulated(step: SimulatedStep) -> Waterfall:
    return Waterfall(tuple((label, s, seconds_text(s)) for label, s in step.parts.items()))


def _rates(plan: Plan) -> list[str]:
    """Tokens or samples a second, TFLOP/s and MFU; nothing for a plan that does not know flops."""
    found = plan.throughput
    if found is None:
        return []
    rate, of = found.tokens_per_s or found.samples_per_s, "tokens/s"
    if not found.tokens_per_s:
        of = "samples/s"
    amount = count_text(round(rate)) if rate >= 1000 else three_digits(rate)
    peak = found.tflops_per_device / found.mfu if found.mfu else 0.0
    return [
        f"{amount} {of}, {three_digits(found.tflops_per_device)} TFLOP/s per device, MFU "
        f"{100 * found.mfu:.1f} % (peak {three_digits(peak)} in {plan.model.compute_dtype})"
    ]


def _band_detail(plan: Plan) -> list[str]:
    """What the band is of, if there is one."""
    band = error_bands().of(plan.cluster, kind_of(plan))
    if band is None:
        return []
    where = f"{family_of(plan.cluster)}, {kind_of(plan)}, {spread_of(plan.cluster)}"
    if band.rows < LEAST_ROWS:
        return [f"mean of predicted / published - 1 on {where}: too few runs for a band"]
    return [
        f"band: predicted / published - 1, 10th to 90th percentile of {band.rows} runs on {where}; "
        f"mean {_percent(band.bias)}"
    ]


def _how(plan: Plan) -> str:
    """Which time it is."""
    step = plan.simulated
    if step is not None:
        return (
            f"simulated: {100 * step.hidden_share:.0f} % of communication hidden, "
            f"{seconds_text(step.exposed_s)} exposed"
            if step.overlap
            else "simulated"
        )
    return "layers added up, not simulated"


def _range(band: ErrorBand) -> str:
    return f"{_percent(band.low)} to {_percent(band.high)}"


def _percent(share: float) -> str:
    return f"{100 * share:+.0f} %"
