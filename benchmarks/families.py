"""Model families, unmodified, under several plans: does each compute what one process computes?

    python benchmarks/families.py [NAME ...] [--mode scheduled] [--write docs/families.md]

For every family of benchmarks/zoo/family_models.py: capture the model, plan it four ways, run each
plan on four gloo processes in float64, and compare with the model in one process: the loss, every
gradient, and every parameter after three steps of AdamW. One row a family; the figure is the
largest relative difference of all. --write puts the table into a file. Exits 1 when a family
differs by more than TOLERANCE or fails.
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from zoo.family_models import FAMILIES, find, make

import meshfold
from meshfold.api import bind, plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.distributed.local_processes import Report, run_local
from meshfold.errors import MeshfoldError
from meshfold.ir.options import Mode
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.sharding.layout import shard_of
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.local_gradient import local_tensor
from meshfold.validation.float64_mode import float64_everywhere

NUM_PROCESSES = 4
NUM_STEPS = 3
TOLERANCE = 1e-12
"""Of loss, gradients and parameters, relative to the largest entry of each, or of a thousandth of
the largest gradient."""
SMALL_SHARE = 1e-3
EPS = 1e-5
"""Of AdamW: a gradient that is zero but for rounding moves its parameter by rounding / EPS."""

PLANS: dict[str, dict[str, int]] = {
    "zero3": {"dp": 4, "tp": 1, "zero": 3},
    "tp+sp": {"dp": 1, "tp": 4, "sp": 1},
    "dp x tp": {"dp": 2, "tp": 2, "zero": 0, "sp": 0},
    "zero3 x tp+sp": {"dp": 2, "tp": 2, "zero": 3, "sp": 1},
}
"""Pins by the name of the column."""


@dataclass(frozen=True)
class Row:
    """One family. worst: per plan the largest difference, or what went wrong."""

    name: str
    num_ops: int
    num_distinct_ops: int
    fallback_ops: tuple[str, ...]
    worst: dict[str, float | str]

    @property
    def passed(self) -> bool:
        return bool(self.worst) and all(
            isinstance(w, float) and w <= TOLERANCE for w in self.worst.values()
        )


def sweep(report: Report, names: tuple[str, ...], mode: Mode) -> None:
    """What every process runs; rank 0 reports a Row per family."""
    for name in names:
        row = _family(name, mode)
        if dist.get_rank() == 0:
            report(row)


def _family(name: str, mode: Mode) -> Row:
    model, batch = make(find(name))
    captured, plans = _planned(model, batch, name, mode)
    worst: dict[str, float | str] = {}
    for column, plan in plans.items():
        worst[column] = plan if isinstance(plan, str) else _difference(name, captured, plan)
    graph = captured.graph if captured is not None else None
    made = [p for p in plans.values() if isinstance(p, Plan)]
    return Row(
        name,
        graph.num_ops if graph else 0,
        sum(len(r.graph.ops) for r in graph.regions) if graph else 0,
        tuple(sorted({op for p in made for r in p.regions for op in r.fallback_ops})),
        worst,
    )


def _planned(
    model: nn.Module, batch: dict[str, Any], name: str, mode: Mode
) -> tuple[Captured | None, dict[str, Plan | str]]:
    """The captured model and its plans, or why there are none; rank 0's, for all ranks."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with float64_everywhere():
                captured = capture(model, batch)
            plans = {column: _plan(captured, name, p, mode) for column, p in PLANS.items()}
            box = [(captured, plans)]
        except Exception as error:  # one family that fails must not end the others
            box = [(None, dict.fromkeys(PLANS, f"capture: {_one_line(error)}"))]
    dist.broadcast_object_list(box)
    captured, texts = box[0]
    return captured, {
        column: plan_from_json(text) if text.startswith("{") else text
        for column, text in texts.items()
    }


def _plan(captured: Captured, name: str, pins: dict[str, int], mode: Mode) -> str:
    """The plan's text, or why there is none."""
    cluster = resolve_cluster("local-cpu", NUM_PROCESSES)
    try:
        options = meshfold.CompileOptions(pins=pins, mode=mode)
        return plan_to_json(plan_captured(captured, name, cluster, options))
    except Exception as error:
        return f"plan: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MeshfoldError) else f"{type(error).__name__}: {text}"


def _difference(name: str, captured: Captured | None, plan: Plan) -> float | str:
    """The largest relative difference over ranks, of loss, gradients and trained parameters."""
    assert captured is not None
    model, batch = make(find(name))
    compiled = bind(make(find(name))[0], plan, captured, batch)
    eager, local = (torch.optim.AdamW(m.parameters(), eps=EPS) for m in (model, compiled))
    worst = 0.0
    for step in range(NUM_STEPS):
        with float64_everywhere():
            output = model(**batch)
            expected = output.loss if hasattr(output, "loss") else output[0]
            loss = compiled(**batch)
        expected.backward()
        loss.backward()
        worst = max(worst, float((loss - expected).abs() / expected.abs().clamp(min=1)))
        if step == 0:
            worst = max(worst, _worst(compiled, model, "grad"))
        for optimizer in (eager, local):
            optimizer.step()
            optimizer.zero_grad()
    worst = max(worst, _worst(compiled, model, "data"))
    compiled.close()
    everywhere = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return float(everywhere)


def _worst(compiled: CompiledModel, model: nn.Module, what: str) -> float:
    """Of the gradients or the parameters themselves. NaN counts as infinite."""
    assert compiled.rank_mesh is not None
    whole = {n: _zero_if_none(p, getattr(p, what)) for n, p in model.named_parameters()}
    floor = SMALL_SHARE * max(float(x.abs().max()) for x in whole.values())
    worst = 0.0
    for name, parameter in compiled.named_parameters():
        layout = compiled.program.stored[name]
        sizes, coords = compiled.program.mesh.sizes, compiled.rank_mesh.coords
        mine = _zero_if_none(parameter, getattr(parameter, what))
        difference = float((mine - shard_of(whole[name], layout, sizes, coords)).abs().max())
        relative = difference / max(float(whole[name].abs().max()), floor)
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def _zero_if_none(parameter: Tensor, value: Tensor | None) -> Tensor:
    return torch.zeros_like(parameter) if value is None else local_tensor(value)


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        f"| family | ops → distinct | {' | '.join(PLANS)} | run whole, for want of a rule |",
        f"|---|---|{'---|' * (len(PLANS) + 1)}",
    ]
    for row in rows:
        cells = [_cell(row.worst[column]) for column in PLANS]
        fallback = ", ".join(op.removeprefix("aten.") for op in row.fallback_ops) or "-"
        ops = f"{row.num_ops} → {row.num_distinct_ops}"
        lines.append(f"| {row.name} | {ops} | {' | '.join(cells)} | {fallback} |")
    return "\n".join(lines)


def _cell(worst: float | str) -> str:
    return f"{worst:.0e}" if isinstance(worst, float) else worst


HEADER = f"""# Model families

Made by `python benchmarks/families.py --write docs/families.md` from `transformers`
{{version}}. Every family is built small from its configuration, captured unmodified and run under
four plans on {NUM_PROCESSES} gloo processes in float64. The figure is the largest relative
difference from one process, of the loss, every gradient, and every parameter after {NUM_STEPS}
steps of AdamW.

"""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--mode", type=click.Choice(get_args(Mode)), default="eager", show_default=True)
@click.option("--write", type=click.Path(path_type=Path), help="File for the table.")
def main(names: tuple[str, ...], mode: Mode, write: Path | None) -> None:
    """Run the families (default: all) and print the table."""
    known = [family.name for family in FAMILIES]
    for name in names:
        if name not in known:
            raise click.UsageError(f"no family {name!r}; there are {', '.join(known)}")
    rows: list[Row] = []

    def show(_: int, row: Row) -> None:
        rows.append(row)
        cells = "  ".join(f"{c} {_cell(w)}" for c, w in row.worst.items())
        click.echo(f"{row.name:<20}{'ok    ' if row.passed else 'WRONG '}{cells}")

    warnings.simplefilter("ignore")
    run_local(NUM_PROCESSES, sweep, names or tuple(known), mode, on_report=show, quiet=True)
    if write is not None:
        import transformers

        text = HEADER.format(version=transformers.__version__) + table(rows) + "\n"
        write.write_text(text, encoding="utf-8")
    passed = sum(row.passed for row in rows)
    click.echo(
        f"{passed} of {len(rows)} families agree to {TOLERANCE:.0e} under {len(PLANS)} plans"
    )
    sys.exit(0 if passed == len(rows) else 1)


if __name__ == "__main__":
    main()
