"""Model families, unmodified, under several plans: does each compute what one process computes?

    python benchmarks/families.py [NAME ...] [--mode MODE] [--write docs/families.md [--missing]]

For every family of benchmarks/zoo/family_batches.py: capture the model, plan it four ways, run each
plan on four gloo processes in float64, and compare with the model in one process: the loss, every
gradient, and every parameter after three steps of AdamW. One row a family; the figure is the
largest relative difference of all. --write puts the table into a file, after every family; lines
of families that were not run stay, and --missing runs those that have none. Exits 1 when a family
differs by more than TOLERANCE or fails.
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click
import torch
import transformers
from torch import Tensor, nn
from zoo.family_batches import FAMILIES, find, make
from zoo.family_fields import Family
from zoo.forked import ChildError, in_child, on_ranks

import meshfold
from meshfold.api import bind, plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import MeshfoldError
from meshfold.ir.options import Mode
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.sharding.layout import shard_of
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere

NUM_PROCESSES = 4
NUM_STEPS = 3
FAMILY_TIMEOUT_S = 300.0
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


def sweep(family: Family, mode: Mode) -> Row:
    """One family, in a child process, so that a crash ends no other."""
    try:
        *_, row = in_child(lambda _: _family(family, mode), FAMILY_TIMEOUT_S)
    except ChildError as error:
        row = Row(family.name, 0, 0, (), dict.fromkeys(PLANS, str(error.args[0])))
    assert isinstance(row, Row)
    return row


def _family(family: Family, mode: Mode) -> Row:
    model, batch = make(family)
    try:
        with float64_everywhere():
            captured = capture(model, batch)
    except Exception as error:
        return Row(family.name, 0, 0, (), dict.fromkeys(PLANS, f"capture: {_one_line(error)}"))
    texts = {column: _plan(captured, family.name, pins, mode) for column, pins in PLANS.items()}
    plans = {c: plan_from_json(text) for c, text in texts.items() if text.startswith("{")}

    def rank(_: int) -> dict[str, float]:
        return {column: _difference(family, captured, plan) for column, plan in plans.items()}

    found = on_ranks(NUM_PROCESSES, rank, FAMILY_TIMEOUT_S) if plans else []
    return Row(
        family.name,
        captured.graph.num_ops,
        sum(len(r.graph.ops) for r in captured.graph.regions),
        tuple(sorted({op for p in plans.values() for r in p.regions for op in r.fallback_ops})),
        {c: max(f[c] for f in found) if c in plans else texts[c] for c in PLANS},
    )


def _plan(captured: Captured, name: str, pins: dict[str, int], mode: Mode) -> str:
    """The plan's text, or why there is none."""
    cluster = resolve_cluster("local-cpu", NUM_PROCESSES)
    try:
        options = meshfold.CompileOptions(pins={"microbatches": 1, **pins}, mode=mode)
        return plan_to_json(plan_captured(captured, name, cluster, options))
    except Exception as error:
        return f"plan: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MeshfoldError) else f"{type(error).__name__}: {text}"


def _difference(family: Family, captured: Captured, plan: Plan) -> float:
    """The largest relative difference on this rank, of loss, gradients and trained parameters."""
    model, batch = make(family)
    compiled = bind(make(family)[0], plan, captured, batch)
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
    return worst


def _worst(compiled: CompiledModel, model: nn.Module, what: str) -> float:
    """Of the gradients or the parameters themselves. NaN counts as infinite."""
    assert compiled.rank_mesh is not None
    whole = {n: _zero_if_none(p, getattr(p, what)) for n, p in model.named_parameters()}
    floor = SMALL_SHARE * max(map(_largest, whole.values()))
    worst = 0.0
    for name, parameter in compiled.named_parameters():
        layout = compiled.program.stored[name]
        sizes, coords = compiled.program.mesh.sizes, compiled.rank_mesh.coords
        mine = _zero_if_none(parameter, getattr(parameter, what))
        difference = _largest(mine - shard_of(whole[name], layout, sizes, coords))
        relative = difference / max(_largest(whole[name]), floor)
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def _largest(x: Tensor) -> float:
    """Of an embedding as wide as the model, MobileBERT's dense has no element."""
    return float(x.abs().max()) if x.numel() else 0.0


def _zero_if_none(parameter: Tensor, value: Tensor | None) -> Tensor:
    return local_tensor(torch.zeros_like(parameter) if value is None else value)


def line_of(row: Row) -> str:
    """A line of the table, in markdown."""
    cells = [_cell(row.worst[column]) for column in PLANS]
    fallback = ", ".join(op.removeprefix("aten.") for op in row.fallback_ops) or "-"
    ops = f"{row.num_ops} → {row.num_distinct_ops}"
    return f"| {row.name} | {ops} | {' | '.join(cells)} | {fallback} |"


def lines_in(file: Path | None) -> dict[str, str]:
    """The lines of a table that --write made, by family; none where there is no file."""
    if file is None or not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    cut = next((i for i, line in enumerate(lines) if line.startswith("|---")), len(lines))
    return {line.split("|")[1].strip(): line for line in lines[cut + 1 :]}


def document(lines: Mapping[str, str]) -> str:
    """The text of the file: the families in their order."""
    ordered = [lines[family.name] for family in FAMILIES if family.name in lines]
    title = (
        f"| family | ops → distinct | {' | '.join(PLANS)} | run whole, for want of a rule |",
        f"|---|---|{'---|' * (len(PLANS) + 1)}",
    )
    return HEADER.format(version=transformers.__version__) + "\n".join((*title, *ordered)) + "\n"


def _cell(worst: float | str) -> str:
    return f"{worst:.0e}" if isinstance(worst, float) else worst


HEADER = f"""# Model families

Made by `python benchmarks/families.py --write docs/families.md` from `transformers`
{{version}}. Every family is built small from its configuration, captured unmodified and run under
four plans on {NUM_PROCESSES} gloo processes in float64. The figure is the largest relative
difference from one process, of the loss, every gradient, and every parameter after {NUM_STEPS}
steps of AdamW. Models of other libraries: [survey.md](survey.md).

"""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--mode", type=click.Choice(get_args(Mode)), default="eager", show_default=True)
@click.option("--write", type=click.Path(path_type=Path), help="File for the table.")
@click.option("--missing", is_flag=True, help="Run those that are not in the file yet.")
def main(names: tuple[str, ...], mode: Mode, write: Path | None, missing: bool) -> None:
    """Run the families (default: all), print what was found, and write it after every family."""
    known = [family.name for family in FAMILIES]
    for name in names:
        if name not in known:
            raise click.UsageError(f"no family {name!r}; there are {', '.join(known)}")
    lines = lines_in(write)
    wanted = [n for n in names or known if not (missing and n in lines)]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    passed = 0
    for name in wanted:
        row = sweep(find(name), mode)
        passed += row.passed
        cells = "  ".join(f"{c} {_cell(w)}" for c, w in row.worst.items())
        click.echo(f"{row.name:<20}{'ok    ' if row.passed else 'WRONG '}{cells}")
        if write is not None:
            lines[name] = line_of(row)
            write.write_text(document(lines), encoding="utf-8")
    click.echo(
        f"{passed} of {len(wanted)} families agree to {TOLERANCE:.0e} under {len(PLANS)} plans"
    )
    sys.exit(0 if passed == len(wanted) else 1)


if __name__ == "__main__":
    main()
