"""A plan as text for people: what `meshfold show` prints. rich only, no torch.

plan_view gives the whole page, summary_view its top (what `meshfold plan` prints). Everything is
made for 80 columns and uses more when there is more; without colour nothing is lost.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshfold.ir.plan import Plan, RegionPlan, RegionRun, StagePlan
from meshfold.ir.stage_pins import excludes_pipelines
from meshfold.plan_file.text import write_layout
from meshfold.report.hybrid_shard import hybrid_shard_text
from meshfold.report.memory import memory_view
from meshfold.report.search import proof_text, search_view, share_text
from meshfold.report.step_time import (
    NOTHING,
    by_axis_text,
    precision_text,
    step_view,
)
from meshfold.report.tables import indented, section, table_of
from meshfold.report.terminal import lines_view
from meshfold.units import bytes_text, count_text, seconds_text

NOTABLE = 0.995
"""Of the step time: less than that is said to be faster."""


def plan_view(plan: Plan) -> RenderableType:
    """The whole page."""
    return Group(
        summary_view(plan),
        section("Search", search_view(plan)),
        section("Regions", _regions_table(plan)),
        section(f"Parameters  (types per axis: {_axes(plan)})", _parameters_table(plan)),
        section(f"Conversions that cost  (types per axis: {_axes(plan)})", _conversions(plan)),
        *_fallbacks(plan.regions),
        Text("\nI same everywhere · R same, gradient pending · S<dim> sharded · P pending sum"),
    )


def summary_view(plan: Plan) -> RenderableType:
    """Headline, step time, memory, baselines, notes."""
    return Group(
        _headline(plan),
        *_mix(plan),
        step_view(plan),
        *memory_view(plan),
        *_stages(plan),
        section("Against the baselines", _baselines_table(plan)),
        *_notes(plan),
    )


def _axes(plan: Plan) -> str:
    return ", ".join(plan.mesh.names) or "none"


def _headline(plan: Plan) -> RenderableType:
    model, cluster = plan.model, plan.cluster
    devices = " + ".join(
        f"{g.num_nodes} x {g.devices_per_node} {g.device.name}" for g in cluster.groups
    )
    links = ", ".join(f"{a.name} over {a.link}" for a in plan.mesh.axes if a.link)
    pins = ", ".join(f"{name}={value}" for name, value in sorted(plan.pins.items()))
    mode = [("mode", plan.mode)] if plan.mode != "eager" else []
    sizes = {"reductions": plan.reduce_bucket_bytes, "gathers": plan.allgather_bucket_bytes}
    bucketed = [
        (name, f"in buckets of up to {bytes_text(num_bytes)}")
        for name, num_bytes in sizes.items()
        if num_bytes
    ]
    chunked = [("logits", "in chunks, never whole")] if plan.chunked_loss else []
    if plan.slices > 1:
        chunked.append(("operators", f"in slices, the largest in {plan.slices} or more"))
    hierarchical = []
    if plan.hierarchical_all_reduce_bytes:
        size = bytes_text(plan.hierarchical_all_reduce_bytes)
        hierarchical = [("all-reduces", f"hierarchical, in pieces of {size}")]
    rows = [
        ("model", f"{model.name}, {count_text(model.num_parameters)} parameters"),
        ("", f"{model.num_ops:,} ops, {model.num_distinct_ops:,} distinct"),
        ("batch", ", ".join(f"{n} {'x'.join(map(str, s))} {d}" for n, s, d in model.inputs)),
        ("precision", precision_text(plan)),
        *mode,
        *bucketed,
        *hierarchical,
        *chunked,
        ("cluster", f"{cluster.name}: {devices}"),
        ("mesh", f"{plan.mesh}" + (f" ({links})" if links else "")),
        ("strategy", plan.strategy.label + (f" (pinned: {pins})" if pins else "")),
        *[("states", text) for text in [hybrid_shard_text(plan)] if text],
    ]
    grid = Table.grid(padding=(0, 2))
    for label, text in rows:
        style = "bold green" if label == "strategy" else ""
        grid.add_row(Text(label, style="dim"), lines_view([text], style))
    return grid


def _mix(plan: Plan) -> list[RenderableType]:
    """What every region does, where they differ."""
    if len({region.choice.name for region in plan.regions}) < 2:
        return []
    table = table_of("", "n", "first instance", "strategy", right=("n",), fold=("strategy",))
    for region in plan.regions:
        scope = region.example_scope or "the whole model"
        table.add_row(region.name, str(region.num_instances), scope, region.choice.name)
    return [section("Strategies by region", indented(table))]


def _stages(plan: Plan) -> list[RenderableType]:
    """One row per stage; nothing for a step in one pass."""
    if not plan.schedule:
        return []
    figures = ("n", "forward", "backward", "once", "ends at", "in flight", "peak")
    table = table_of("", *figures, "runs", right=("", *figures), fold=("runs",))
    for number, stage in enumerate(plan.stages):
        table.add_row(str(number), *_stage_cells(stage), " ".join(map(_run_text, stage.runs)))
    note = (
        "n layers; forward and backward of one microbatch; once: reductions and optimizer, per "
        "step; in flight: microbatches; peak memory"
    )
    title = f"Stages  ({plan.schedule})"
    return [section(title, Group(indented(table), indented(Text(note, style="dim"))))]


def _stage_cells(stage: StagePlan) -> list[str]:
    layers = str(sum(run.count for run in stage.runs))
    figures = stage.costs
    if figures is None:
        return [layers, "", "", "", "", "", ""]
    seconds = (figures.forward_s, figures.backward_s, figures.sync_s, figures.end_s)
    peak = bytes_text(figures.peak_bytes)
    return [layers, *map(seconds_text, seconds), str(figures.in_flight), peak]


def _run_text(run: RegionRun) -> str:
    return run.region if run.count == 1 else f"{run.region}x{run.count}"


def _baselines_table(plan: Plan) -> RenderableType:
    """With seconds only where those of the search are the step time that the plan states; they are
    compared like with like in any case."""
    seconds = ("step",) if plan.simulated is None else ()
    figures = (*seconds, "x", "peak memory")
    table = table_of("", "strategy", *figures, "", right=figures, fold=("", "strategy"))
    table.add_row(
        "this plan",
        plan.strategy.label,
        *(seconds_text(plan.time.step_s) for _ in seconds),
        "1.00",
        bytes_text(plan.memory.peak),
        "fits" if plan.memory.fits else "",
        style="bold green",
    )
    for candidate in plan.baselines:
        slower = candidate.step_s / plan.time.step_s if plan.time.step_s else 0.0
        table.add_row(
            candidate.name,
            candidate.strategy.label,
            *(seconds_text(candidate.step_s) for _ in seconds),
            f"{slower:.2f}",
            bytes_text(candidate.peak_bytes),
            "fits" if candidate.fits else "OOM",
            style="" if candidate.fits else "dim",
        )
    lines = [proof_text(plan) if seconds else share_text(plan)]
    lines += _faster_baselines(plan)
    return Group(indented(table), indented(lines_view(lines, "dim")))


def _faster_baselines(plan: Plan) -> list[str]:
    """Why baselines that add up to less than the plan were not taken."""
    found: dict[str, list[str]] = {}
    for row in plan.baselines:
        if row.fits and row.step_s < NOTABLE * plan.time.step_s:
            several = not plan.schedule and row.strategy.microbatches * row.strategy.pp > 1
            found.setdefault(_why_not(plan) if several else _SIMULATED, []).append(row.name)
    return [f"{', '.join(names)}: faster {why}" for why, names in found.items()]


_SIMULATED = "as the search adds up times; the simulated step decided"


def _why_not(plan: Plan) -> str:
    """Why a plan in one pass was chosen beside a faster baseline in microbatches or stages."""
    if excludes_pipelines(plan.pins):
        return "in microbatches or stages, which a pin left out"
    return "as the search adds up times; the best plan of that kind is slower as simulated"


def _regions_table(plan: Plan) -> RenderableType:
    table = table_of(
        "",
        "n",
        "first instance",
        "forward",
        "backward",
        "communication",
        "saved",
        right=("n", "forward", "backward", "saved"),
        fold=("first instance", "communication"),
    )
    for region in plan.regions:
        table.add_row(
            region.name,
            str(region.num_instances),
            _where(region),
            seconds_text(region.forward_s),
            seconds_text(region.backward_s),
            by_axis_text(region.communication_s),
            bytes_text(region.saved_bytes),
        )
    note = "  n instances; times and bytes per instance and rank; saved for the backward"
    return Group(indented(table), Text(note, style="dim"))


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _where(region: RegionPlan) -> str:
    chosen = {"recompute": region.typing.recompute, "offload": region.strategy.offload}
    words = [f", {name} {word}" for name, word in chosen.items() if word != "none"]
    words += [f", in {region.chunking}"] if region.chunking.count > 1 else []
    matmuls = region.collective_matmul
    words += [f", collective matmuls {_numbers(matmuls)}"] if matmuls else []
    return (region.example_scope or "the whole model") + "".join(words)


def _parameters_table(plan: Plan) -> RenderableType:
    table = table_of(
        "",
        "parameter",
        "shape",
        "stored",
        "used",
        "per rank",
        right=("per rank",),
        fold=("parameter",),
    )
    for region in plan.regions:
        for k, parameter in enumerate(region.parameters):
            table.add_row(
                "" if k else region.name,
                parameter.name,
                " x ".join(map(str, parameter.shape)),
                write_layout(parameter.stored),
                write_layout(parameter.used),
                bytes_text(parameter.num_bytes),
            )
    return indented(table)


def _conversions(plan: Plan) -> RenderableType:
    texts = ("", "value", "from", "to", "forward", "backward")
    table = table_of(*texts, "bytes", "time", right=("bytes", "time"), fold=("value",))
    for region in plan.regions:
        activations = [r for r in region.conversions if r.kind == "activation"]
        rows = [(r.value, write_layout(r.source), write_layout(r.target), [r]) for r in activations]
        parameters = [r for r in region.conversions if r.kind == "parameter"]
        if parameters:
            # Their layouts are in the table of parameters.
            count = f"{len(parameters)} parameter" + "s" * (len(parameters) > 1)
            rows.append((count, "", "", parameters))
        for k, (value, source, target, records) in enumerate(rows):
            table.add_row(
                "" if k else region.name,
                value,
                source,
                target,
                _collectives(name for r in records for name in r.forward),
                _collectives(name for r in records for name in r.backward),
                bytes_text(sum(r.num_bytes for r in records)),
                seconds_text(sum(r.forward_s + r.backward_s for r in records)),
            )
    return indented(table) if table.row_count else Text("  none")


def _collectives(names: Iterable[str]) -> Text:
    """Each once, one per line."""
    found = dict.fromkeys(name.replace("_", "-") for name in names)
    return lines_view([name for name in found if name != NOTHING] or [NOTHING])


def _fallbacks(regions: Sequence[RegionPlan]) -> list[RenderableType]:
    lines = [f"  {region.name}  {op}" for region in regions for op in region.fallback_ops]
    if not lines:
        return []
    title = "Ops without a rule: every rank runs them unsharded"
    return [section(title, lines_view(lines, "yellow"))]


def _notes(plan: Plan) -> list[RenderableType]:
    if not plan.notes:
        return []
    return [section("Notes", lines_view(f"  {note}" for note in plan.notes))]
