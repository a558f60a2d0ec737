"""Models of many libraries, unmodified, under several plans: captured, planned, and right?

    python benchmarks/survey.py [--only NAME ...] [--library NAME ...] [--sample COUNT]
                                [--results FILE] [--write docs/survey.md]

For every model of benchmarks/zoo whose package is there: capture it, plan it under every entry of
PLANS, and run each plan as `meshfold verify` does: on gloo processes in float64 against the model
itself in one process, by loss, every gradient, and every parameter after three steps of AdamW. A
model runs in a child process, so that a crash ends no other. --results keeps what was found, and
models that are in it are not run again. --write makes the table of all that is in the file. Exits 1
when a plan differs, or anything fails otherwise than by a clear refusal.
"""

import importlib.util
import json
import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from zoo.all_models import MODELS, PACKAGES
from zoo.entry import Entry, make
from zoo.forked import ChildError, in_child, on_ranks
from zoo.table import document

import meshfold
from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import MeshfoldError, PassError
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import BuiltModel
from meshfold.validation.verify import _report, compare_on_this_rank

MODEL_TIMEOUT_S, PLAN_TIMEOUT_S = 300.0, 120.0


@dataclass(frozen=True)
class PlanKind:
    """A column of the table. otherwise: pins in place of `pins` where those are refused."""

    num_ranks: int
    pins: Mapping[str, int]
    mode: str = "eager"
    otherwise: Mapping[str, int] | None = None


PLANS: Mapping[str, PlanKind] = {
    "zero3": PlanKind(2, {"dp": 2, "zero": 3, "microbatches": 1}),
    "tp+sp": PlanKind(2, {"tp": 2, "sp": 1, "microbatches": 1}),
    "pp2": PlanKind(2, {"pp": 2, "microbatches": 2}, otherwise={"pp": 2, "microbatches": 1}),
    "scheduled": PlanKind(2, {"tp": 2, "micro_chunks": 1}, "scheduled"),
}


@dataclass(frozen=True)
class Found:
    """One model. plans: by column {"kind", "text", "worst", "seconds"}, kinds as of `_plan_kind`;
    capture: like one of them. fallback_ops: what ran whole, for want of a rule."""

    library: str
    name: str
    capture: Mapping[str, Any] = field(default_factory=dict)
    num_ops: int = 0
    num_distinct_ops: int = 0
    fallback_ops: tuple[str, ...] = ()
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether anything is neither right nor clearly refused."""
        kinds = (self.capture["kind"], *(plan["kind"] for plan in self.plans.values()))
        return any(kind not in ("ok", "refused") for kind in kinds)


def survey(entry: Entry) -> Found:
    """Everything about one model, in a child process."""
    reports: list[Any] = []
    try:
        reports = list(in_child(lambda report: _survey(entry, report), MODEL_TIMEOUT_S))[:-1]
    except ChildError as error:
        text, reports = error.args[0], error.args[1] if len(error.args) > 1 else []
        kind = "slow" if text.startswith("takes") else "error"
        stage = "capture" if not any("capture" in r for r in reports) else "plans"
        broken = {"kind": kind, "text": text}
        if stage == "capture":
            return Found(entry.library, entry.name, capture=broken)
        done = {column for r in reports for column in r.get("plans", {})}
        column = next(c for c in PLANS if c not in done)
        reports.append({"plans": {column: broken}})
    merged: dict[str, Any] = {}
    plans: dict[str, Any] = {}
    for report in reports:
        plans |= report.pop("plans", {})
        merged |= report
    return Found(entry.library, entry.name, plans=plans, **merged)


def _survey(entry: Entry, report: Any) -> None:
    start_s = time.monotonic()
    try:
        model, batch = make(entry)
    except Exception as error:  # the model's own trouble, or its library's
        report({"capture": {"kind": "unbuilt", "text": _one_line(error)}})
        return
    try:
        captured = capture(model, batch)
    except Exception as error:
        report({"capture": _refusal(error, start_s)})
        return
    graph = captured.graph
    report(
        {
            "capture": {"kind": "ok", "seconds": round(time.monotonic() - start_s, 1)},
            "num_ops": graph.num_ops,
            "num_distinct_ops": sum(len(r.graph.ops) for r in graph.regions),
        }
    )
    fallback: set[str] = set()
    for column, kind in PLANS.items():
        found, ops = _under(entry, captured, kind)
        fallback |= ops
        report({"plans": {column: found}, "fallback_ops": tuple(sorted(fallback))})


def _under(entry: Entry, captured: Captured, kind: PlanKind) -> tuple[dict[str, Any], set[str]]:
    """What became of one plan, and its ops without a rule."""
    start_s = time.monotonic()
    try:
        plan, refused = _planned(entry, captured, kind)
        planned_s = time.monotonic() - start_s
        emit_plan(captured.graph, plan)
    except Exception as error:
        return _refusal(error, start_s), set()
    ops = {op for region in plan.regions for op in region.fallback_ops}
    seconds = {
        "plan_s": round(planned_s, 1),
        "strategy": plan.strategy.label,
        "otherwise": refused,
    }
    try:
        found = _verified(entry, captured, plan)
    except ChildError as error:
        return {"kind": "failed", "text": str(error.args[0]), **seconds}, ops
    return {**found, **seconds, "seconds": round(time.monotonic() - start_s, 1)}, ops


def _planned(entry: Entry, captured: Captured, kind: PlanKind) -> tuple[Plan, str]:
    """The plan under `pins`, or under those that stand in where `pins` are refused, and why."""
    cluster = resolve_cluster("local-cpu", kind.num_ranks)

    def planned(pins: Mapping[str, int]) -> Plan:
        options = meshfold.CompileOptions(pins=pins, mode=kind.mode)  # type: ignore[arg-type]
        return plan_captured(captured, entry.name, cluster, options)

    try:
        return planned(kind.pins), ""
    except MeshfoldError as error:
        if kind.otherwise is None or isinstance(error, PassError):
            raise
        return planned(kind.otherwise), str(error)


def _verified(entry: Entry, captured: Captured, plan: Plan) -> dict[str, Any]:
    """The verdict of verify."""

    def rank(_: int) -> Any:
        warnings.simplefilter("ignore")
        return compare_on_this_rank(plan, captured, BuiltModel(*make(entry)))

    verified = _report(plan, on_ranks(plan.world_size, rank, PLAN_TIMEOUT_S))
    sizes = [d.relative for d in (*verified.gradients, *verified.parameters)]
    worst = max((verified.loss_difference, *sizes))
    if verified.passed:
        return {"kind": "ok", "worst": worst}
    return {"kind": "differs", "worst": worst, "text": verified.verdict}


def _refusal(error: Exception, start_s: float) -> dict[str, Any]:
    clear = isinstance(error, MeshfoldError) and not isinstance(error, PassError)
    clear = clear and "\n" not in str(error)
    seconds = round(time.monotonic() - start_s, 1)
    return {"kind": "refused" if clear else "error", "text": _one_line(error), "seconds": seconds}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MeshfoldError) and not isinstance(error, PassError):
        return text
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
    return f"{type(error).__name__}: {text}{where}"


def chosen(
    only: Sequence[str], libraries: Sequence[str], sample: int | None, seed: int
) -> list[Entry]:
    """The entries that were asked for and whose packages are there. UsageError for a name that is
    not known."""
    known = {entry.name for entry in MODELS} | {f"{e.library}/{e.name}" for e in MODELS}
    for name in only:
        if name not in known:
            raise click.UsageError(f"no model {name!r}; there are {', '.join(sorted(known))}")
    for library in libraries:
        if library not in PACKAGES:
            raise click.UsageError(f"no library {library!r}; there are {', '.join(PACKAGES)}")
    there = {name for name, package in PACKAGES.items() if importlib.util.find_spec(package)}
    entries = [
        entry
        for entry in MODELS
        if entry.library in there
        and (not only or entry.name in only or f"{entry.library}/{entry.name}" in only)
        and (not libraries or entry.library in libraries)
    ]
    if sample is not None:
        entries = random.Random(seed).sample(entries, min(sample, len(entries)))
    return entries


@click.command()
@click.option("--only", multiple=True, metavar="NAME", help="A model; again for more.")
@click.option("--library", "libraries", multiple=True, help="A library; again for more.")
@click.option("--sample", type=int, help="So many, drawn with --seed.")
@click.option("--seed", default=0, show_default=True)
@click.option("--results", type=click.Path(path_type=Path), help="File to keep results in.")
@click.option("--write", type=click.Path(path_type=Path), help="File for the table.")
def main(
    only: tuple[str, ...],
    libraries: tuple[str, ...],
    sample: int | None,
    seed: int,
    results: Path | None,
    write: Path | None,
) -> None:
    """Run the models (default: all whose packages are there) and print what was found."""
    entries = chosen(only, libraries, sample, seed)
    found: dict[str, dict[str, Any]] = {}
    if results is not None and results.exists():
        found = json.loads(results.read_text(encoding="utf-8"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _import({PACKAGES[e.library] for e in entries if f"{e.library}/{e.name}" not in found})
    num_failed = 0
    for entry in entries:
        key = f"{entry.library}/{entry.name}"
        if key not in found:
            row = survey(entry)
            found[key] = asdict(row)
            click.echo(_line(row))
            if results is not None:
                results.write_text(json.dumps(found, indent=1), encoding="utf-8")
        num_failed += Found(**found[key]).failed
    if write is not None:
        write.write_text(document([Found(**f) for f in found.values()], PLANS), encoding="utf-8")
    click.echo(f"{len(entries)} models, {num_failed} that fail, differ or are not clearly refused")
    sys.exit(1 if num_failed else 0)


def _import(packages: set[str]) -> None:
    """Once here, so that no child has to."""
    for package in sorted(packages - {"torch"}):
        importlib.import_module(package)


def _line(found: Found) -> str:
    if found.capture["kind"] != "ok":
        kind, text = found.capture["kind"], found.capture["text"]
        return f"{found.library}/{found.name}: capture {kind.upper()}: {text}"
    cells = [
        f"{column} {plan.get('worst', 0.0):.0e}"
        if plan["kind"] == "ok"
        else f"{column} {plan['kind'].upper()}: {plan['text']}"
        for column, plan in found.plans.items()
    ]
    took = f"{found.num_ops} ops, capture {found.capture['seconds']} s"
    return f"{found.library}/{found.name} ({took})\n    " + "\n    ".join(cells)


if __name__ == "__main__":
    main()
