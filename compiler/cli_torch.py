"""What the command line runs that needs torch: plan, graph, verify. See meshfold.cli."""

import json
from dataclasses import asdict, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshfold.api import find_plan
from meshfold.cluster import ClusterSpec
from meshfold.emit import emit
from meshfold.errors import InfeasibleError
from meshfold.models import build_for_plan, build_model
from meshfold.options import CompileOptions
from meshfold.passes.check_plan import price_plan
from meshfold.passes.planner import Progress
from meshfold.plan import Plan
from meshfold.probe import OpProber
from meshfold.verify import VerifyReport, captured_as_planned, verify

NUM_WORST = 10


def make_plan(
    model: str,
    cluster: ClusterSpec,
    options: CompileOptions,
    *,
    batch: int | None,
    sequence: int | None,
    progress: Progress | None = None,
) -> Plan:
    """The plan for MODEL. Its batch defaults to one sample per device, and to one per node where
    that does not fit, with a note."""

    def plan_for(default_batch: int) -> Plan:
        built = build_model(model, batch=batch, sequence=sequence, default_batch=default_batch)
        return find_plan(
            built.model, cluster, built.example_inputs, options=options, progress=progress
        )

    try:
        return plan_for(cluster.num_devices)
    except InfeasibleError:
        if batch is not None or ":" in model or cluster.num_nodes == 1:
            raise
    plan = plan_for(cluster.num_nodes)
    note = (
        f"a batch of one sample per device does not fit; this plan is for one per node, as "
        f"--batch {cluster.num_nodes} would make it"
    )
    return replace(plan, notes=(*plan.notes, note))


def program_text(plan: Plan, model: str, rank: int) -> str:
    """The program of `rank`."""
    captured = captured_as_planned(plan, build_for_plan(model, plan))
    return emit(captured.graph, plan).text(rank)


def check_plan(plan: Plan, model: str) -> Plan:
    """`plan` with its figures computed again."""
    captured = captured_as_planned(plan, build_for_plan(model, plan))
    return price_plan(captured.graph, plan, OpProber())


def verify_plan(plan: Plan, model: str) -> VerifyReport:
    return verify(plan, model)


def report_json(report: VerifyReport) -> str:
    """The report as JSON, ending in a newline."""
    facts = asdict(report) | {"passed": report.passed, "verdict": report.verdict}
    return json.dumps(facts, indent=2) + "\n"


def report_view(report: VerifyReport) -> RenderableType:
    """The worst parameters as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("one process", f"{report.world_size} processes", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(
        "loss", f"{report.eager_loss:.12g}", f"{report.loss:.12g}", f"{report.loss_difference:.1e}"
    )
    gradients = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    gradients.add_column(f"worst of {len(report.gradients)} gradients", overflow="fold")
    for name in ("largest entry", "difference", "relative"):
        gradients.add_column(name, justify="right", no_wrap=True)
    for g in report.gradients[:NUM_WORST]:
        bad = not g.relative <= report.tolerance
        gradients.add_row(
            g.name,
            f"{g.largest:.3g}",
            f"{g.difference:.1e}",
            f"{g.relative:.1e}",
            style="bold red" if bad else "",
        )
    style = "bold green" if report.passed else "bold red"
    headline = Text(f"{report.strategy} on {report.world_size} local processes, float64\n")
    verdict = Text(f"\n{report.verdict}", style=style)
    parts = (headline, table, Text(), gradients)
    return Group(*parts, verdict) if report.passed else Group(*parts)
