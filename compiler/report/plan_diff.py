"""Two plans side by side: what they choose, and what that costs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.plan import Plan, RegionPlan
from meshfold.plan_file.text import write_layout
from meshfold.report.tables import indented, section, table_of
from meshfold.units import bytes_text, seconds_text


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same: what, then as the first and as the second plan has it."""

    what: str
    first: str
    second: str


@dataclass(frozen=True)
class PlanDifferences:
    """Two plans compared."""

    choices: tuple[Difference, ...]
    """Decisions that differ."""
    figures: tuple[Difference, ...]
    """Predictions of both, equal or not."""


def compare_plans(first: Plan, second: Plan) -> PlanDifferences:
    """What differs between two plans, from the model down to the parameter."""
    pairs = [
        Difference("model", _model(first), _model(second)),
        Difference("cluster", first.cluster.name, second.cluster.name),
        Difference("mesh", str(first.mesh), str(second.mesh)),
        Difference("strategy", first.strategy.label, second.strategy.label),
        Difference("precision", first.precision, second.precision),
        Difference("mode", first.mode, second.mode),
        Difference("optimizer", first.optimizer, second.optimizer),
        Difference("schedule", first.schedule, second.schedule),
        Difference(
            "buckets of reductions", *(_up_to(p.reduce_bucket_bytes) for p in (first, second))
        ),
        Difference(
            "buckets of gathers", *(_up_to(p.allgather_bucket_bytes) for p in (first, second))
        ),
        Difference(
            "hierarchical all-reduces",
            *(_in_pieces(p.hierarchical_all_reduce_bytes) for p in (first, second)),
        ),
        Difference(
            "logits", *("in chunks" if p.chunked_loss else "whole" for p in (first, second))
        ),
        Difference("slices", *(str(p.slices) for p in (first, second))),
        Difference("runs", _runs(first), _runs(second)),
    ]
    regions = {r.name: r for r in second.regions}
    for region in first.regions:
        if region.name in regions:
            pairs += _region_pairs(region, regions[region.name])
    return PlanDifferences(
        tuple(pair for pair in pairs if pair.first != pair.second), _figures(first, second)
    )


def differences_json(found: PlanDifferences) -> str:
    """The comparison as JSON, ending in a newline."""
    return json.dumps(asdict(found), indent=2) + "\n"


def diff_view(found: PlanDifferences) -> RenderableType:
    """The comparison as tables."""
    sections: list[RenderableType] = []
    if found.choices:
        sections.append(section("Choices that differ", _table(found.choices)))
    else:
        sections.append(Text("Both plans choose the same."))
    sections.append(section("Figures", _table(found.figures)))
    return Group(*sections)


def _table(rows: tuple[Difference, ...]) -> RenderableType:
    table = table_of("", "first", "second", fold=("", "first", "second"))
    for row in rows:
        table.add_row(row.what, row.first, row.second)
    return indented(table)


def _model(plan: Plan) -> str:
    return f"{plan.model.name} {plan.model.fingerprint[:12]}, batch {plan.model.batch_size}"


def _up_to(num_bytes: int) -> str:
    return f"up to {bytes_text(num_bytes)}" if num_bytes else "none"


def _in_pieces(num_bytes: int) -> str:
    return f"in pieces of {bytes_text(num_bytes)}" if num_bytes else "none"


def _runs(plan: Plan) -> str:
    stages = (" ".join(f"{r.region} x {r.count}" for r in stage.runs) for stage in plan.stages)
    return " | ".join(stages)


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _region_pairs(first: RegionPlan, second: RegionPlan) -> list[Difference]:
    name = f"region {first.name}"
    pairs = [
        Difference(name, _chosen(first), _chosen(second)),
        Difference(f"{name}, micro-chunks", str(first.chunking), str(second.chunking)),
        Difference(
            f"{name}, collective matmul", *(_numbers(r.collective_matmul) for r in (first, second))
        ),
        *(
            Difference(f"{name}, op {k} {target}", ",".join(a.rules), ",".join(b.rules))
            for k, (target, a, b) in enumerate(
                zip(_targets(first), first.typing.ops, second.typing.ops, strict=False)
            )
        ),
    ]
    stored = {p.name: p for p in second.parameters}
    for parameter in first.parameters:
        if parameter.name in stored:
            layouts = write_layout(parameter.stored), write_layout(stored[parameter.name].stored)
            pairs.append(Difference(f"{name}, {parameter.name}", *layouts))
    return pairs


def _targets(region: RegionPlan) -> tuple[str, ...]:
    return region.op_targets or ("",) * len(region.typing.ops)


def _chosen(region: RegionPlan) -> str:
    return region.choice.name or region.strategy.label


def _figures(first: Plan, second: Plan) -> tuple[Difference, ...]:
    plans = (first, second)
    sums = [seconds_text(plan.time.step_s) for plan in plans]
    steps = [seconds_text(plan.simulated.step_s) for plan in plans if plan.simulated]
    rows = [Difference("step time", *steps)] if len(steps) == 2 else []
    # Like with like: a sum is not held against a simulated step.
    rows.append(Difference("step as added up" if steps else "step time", *sums))
    for name in ("forward_s", "backward_s", "exposed_communication_s", "optimizer_s"):
        values = (seconds_text(getattr(plan.time, name)) for plan in plans)
        rows.append(Difference("  " + name.removesuffix("_s").replace("_", " "), *values))
    rows.append(Difference("peak memory", _bytes(first.memory), _bytes(second.memory)))
    for name in asdict(first.memory):
        values = (bytes_text(getattr(plan.memory, name)) for plan in (first, second))
        rows.append(Difference("  " + name.replace("_", " "), *values))
    return tuple(rows)


def _bytes(memory: MemoryEstimate) -> str:
    return bytes_text(memory.peak) + ("" if memory.fits else ", does not fit")
