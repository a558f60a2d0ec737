"""What the command line runs that needs torch: plan, sweep, graph, verify and the like."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshfold.api import find_plan
from meshfold.codegen.emit.pass_pipeline import PassRun
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.models.from_argument import build_for_plan, build_model
from meshfold.passes.planner.best_mesh import Progress
from meshfold.passes.planner.check import price_plan
from meshfold.passes.split.as_planned import as_planned
from meshfold.plan_file.output_file import output_target, write_whole
from meshfold.refine.program_events import with_program_events
from meshfold.report.pipeline_timeline import both_text, predicted_spans, spans_json, trace_json
from meshfold.report.plan_rows import PlanRow, Setting
from meshfold.report.step_timeline import Timeline
from meshfold.report.why_not import WhyNot
from meshfold.studies.captured_models import CapturedModels
from meshfold.studies.plan_rows import Point, Tell, plan_rows
from meshfold.studies.remedies import with_remedies
from meshfold.studies.why_not import why_not
from meshfold.training.saving.delink import Delinked, delink_captured
from meshfold.units import seconds_text
from meshfold.validation.captured import captured_alike, captured_as_planned
from meshfold.validation.measure_overlap import measure_overlap, overlap_json, overlap_text
from meshfold.validation.measure_pipeline import measured_spans
from meshfold.validation.report import VerifyReport
from meshfold.validation.verify import verify


def make_plan(
    model: str,
    cluster: ClusterSpec,
    options: CompileOptions,
    *,
    batch: int | None,
    sequence: int | None,
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Plan:
    """The plan for MODEL. Its batch defaults to one sample per device, and to one per node where
    that does not fit, with a note. notes: more of them."""

    def plan_for(default_batch: int) -> Plan:
        built = build_model(model, batch=batch, sequence=sequence, default_batch=default_batch)
        given = replace(options, custom_rules=built.rules)
        made = find_plan(
            built.model,
            cluster,
            built.example_inputs,
            options=given,
            loss_fn=built.loss_fn,
            progress=progress,
            prices_memory=options.memory_bytes is not None,
        )
        return replace(made, notes=(*made.notes, *notes))

    try:
        return plan_for(cluster.num_devices)
    except InfeasibleError as error:
        if batch is not None or ":" in model or cluster.num_nodes == 1:
            raise _with_remedies(error, model, cluster, options, batch, sequence) from error
    try:
        plan = plan_for(cluster.num_nodes)
    except InfeasibleError as error:
        size = cluster.num_nodes
        raise _with_remedies(error, model, cluster, options, size, sequence) from error
    note = (
        f"a batch of one sample per device does not fit; this plan is for one per node, as "
        f"--batch {cluster.num_nodes} would make it"
    )
    return replace(plan, notes=(*plan.notes, note))


def _with_remedies(
    error: InfeasibleError,
    model: str,
    cluster: ClusterSpec,
    options: CompileOptions,
    batch: int | None,
    sequence: int | None,
) -> InfeasibleError:
    """The error, saying also what would fit."""
    models = CapturedModels(model, cluster.num_devices)

    def plan_in(cluster: ClusterSpec, options: CompileOptions) -> Plan | None:
        try:
            return models.plan(cluster, options, batch=batch, sequence=sequence)
        except (InfeasibleError, OptionError):
            return None

    return with_remedies(error, cluster, options, plan_in)


def make_rows(
    model: str,
    places: Sequence[tuple[ClusterSpec, Setting]],
    options: CompileOptions,
    tell: Tell,
) -> tuple[PlanRow, ...]:
    """The best plan for MODEL in each place. Its batch defaults to one sample per device of the
    largest, and is the same in all."""
    most = max(cluster.num_devices for cluster, _ in places)
    points = [Point(*place) for place in places]
    return plan_rows(CapturedModels(model, most), points, options, tell)


def answer_why_not(
    plan: Plan, model: str, pins: Mapping[str, PinValue], tell: Callable[[str], None]
) -> WhyNot:
    return why_not(plan, model, pins, tell)


def program_text(
    plan: Plan, model: str, rank: int, passes: Path | None = None, inputs: Sequence[Path] = ()
) -> str:
    """The program of `rank`. passes: a folder for the program behind every pass; inputs: files that
    are not written. Raises OptionError for passes of a plan with stages, and for a file in place of
    the folder."""
    if passes is not None and plan.schedule:
        raise OptionError(f"{plan.strategy.label}: --passes is for plans in one pass; leave it out")
    if passes is not None and os.path.lexists(passes) and not passes.is_dir():
        raise OptionError(f"--passes {passes}: is a file; name a folder")
    captured = captured_as_planned(plan, build_for_plan(model, plan))
    ran: list[PassRun] = []
    program = emit_plan(captured.graph, plan, ran.append)
    if passes is not None:
        passes.mkdir(parents=True, exist_ok=True)
        files = {passes / f"{one.number}-{one.name}.txt": one for one in ran}
        for file in files:  # all of them before the first is written
            output_target(file, inputs)
        for file, one in files.items():
            head = f"pass {one.number}, {one.name}: {seconds_text(one.seconds)}"
            write_whole(file, f"{head}\n{one.program.text(rank)}\n")
    return program.text(rank)


def check_plan(plan: Plan, model: str) -> Plan:
    """`plan` with its figures computed again."""
    captured = captured_as_planned(plan, build_for_plan(model, plan))
    priced = price_plan(captured.graph, plan, OpProber())
    return with_program_events(priced, as_planned(captured.graph, plan))


def delink_checkpoint(
    plan: Plan, checkpoint: Path, out: Path, *, shared: str, model: str, parameters_only: bool
) -> Delinked:
    """Writes `checkpoint`, of the MODEL `shared`, to `out` as one of the MODEL that `plan` is
    for."""
    released = captured_as_planned(plan, build_for_plan(model, plan))
    linked = captured_alike(plan, build_for_plan(shared, plan))
    graphs = linked.graph, released.graph
    return delink_captured(checkpoint, out, *graphs, parameters_only=parameters_only)


def verify_plan(plan: Plan, model: str) -> VerifyReport:
    return verify(plan, model)


def measured_timeline(plan: Plan, model: str | None, trace: Path | None) -> Timeline:
    """What `timeline --measured` prints: what runs when, as predicted and on local processes, the
    microbatches of a pipeline, else what hides. Raises OptionError without a model, and for a trace
    of the latter."""
    if model is None:
        raise OptionError("--measured runs the model; say which with --model")
    if plan.schedule:
        spans = predicted_spans(plan), measured_spans(plan, model)
        return Timeline(both_text(*spans), spans_json(*spans), trace_json(*spans))
    if trace is not None:
        raise OptionError("--trace is of the prediction; leave out --measured, or --trace")
    found = measure_overlap(plan, model)
    return Timeline(overlap_text(found), overlap_json(found), "")
