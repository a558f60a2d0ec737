"""The stages of a pipeline as text: a part of `show`."""

from rich.console import Group, RenderableType
from rich.text import Text

from meshfold.ir.plan import Plan, RunPlan, StagePlan
from meshfold.report.tables import indented, section, table_of
from meshfold.units import bytes_text, seconds_text


def stages_view(plan: Plan) -> list[RenderableType]:
    """One row per stage; nothing for a step in one pass."""
    if not plan.schedule:
        return []
    figures = ("n", "forward", "backward", "once", "ends at", "in flight", "peak")
    table = table_of("", *figures, "runs", right=("", *figures), fold=("runs",))
    for number, stage in enumerate(plan.stages):
        table.add_row(str(number), *_cells(stage), " ".join(map(_run_text, stage.runs)))
    note = (
        "n layers; forward and backward of one microbatch; once: reductions and optimizer, per "
        "step; in flight: microbatches; peak memory"
    )
    title = f"Stages  ({plan.schedule})"
    return [section(title, Group(indented(table), indented(Text(note, style="dim"))))]


def _cells(stage: StagePlan) -> list[str]:
    layers = str(sum(run.count for run in stage.runs))
    figures = stage.figures
    if figures is None:
        return [layers, "", "", "", "", "", ""]
    seconds = (figures.forward_s, figures.backward_s, figures.sync_s, figures.end_s)
    peak = bytes_text(figures.peak_bytes)
    return [layers, *map(seconds_text, seconds), str(figures.in_flight), peak]


def _run_text(run: RunPlan) -> str:
    return run.region if run.count == 1 else f"{run.region}x{run.count}"
