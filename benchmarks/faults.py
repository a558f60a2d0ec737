"""What happens on every rank when one dies, hangs, raises, is late, or differs from the others.

    python benchmarks/faults.py [--rows dies,hangs] [--columns dp,tp] [--timeout-s 8] [--write F]

Every case trains a small Llama (ep: Mixtral) on gloo processes for three steps. The last rank has
the fault in the second step or, with another plan, model or other weights, from the start. Per
rank: `right` (the losses of the model in one process), `line` (a MeshfoldError of one line), or
what else. A case holds if every rank, but one that died, hangs or raises, ends right or in a line
within the timeout and 10 s. --write makes the document.
"""

import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from overlap import build_model
from torch import Tensor, nn

import meshfold
from meshfold.distributed.local_processes import LocalProcessError, Report, run_local
from meshfold.plan_file.io import plan_from_json, plan_to_json

LAYERS, WIDTH, BATCH, SEQUENCE, STEPS = 2, 64, 8, 16, 3
STARTUP_S, SLACK_S, TOLERANCE = 120.0, 10.0, 1e-3
COLUMNS: Mapping[str, Mapping[str, int]] = {
    "dp": {"dp": 2, "zero": 0},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "dp x tp": {"dp": 2, "tp": 2, "zero": 0},
    "ep": {"ep": 2, "zero": 0},
    "cp": {"cp": 2, "zero": 0},
    "pp": {"pp": 2, "microbatches": 2},
}
"""Pins by name; all other degrees are 1."""
SELF = ("dies", "hangs", "raises")
"""Rows whose faulty rank has no end to judge."""
ROWS = (
    "none",
    *SELF,
    "late",
    "too late",
    "other shape",
    "other dtype",
    "other data",
    "other weights",
    "other model",
    "other plan",
)


@dataclass(frozen=True)
class Case:
    """One fault under one plan. plan, other: as JSON. losses: of the model in one process."""

    row: str
    column: str
    plan: str
    other: str
    losses: tuple[float, ...]
    timeout_s: float


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, and after how long since the fault."""

    kind: str
    seconds: float
    text: str = ""


def batch_of(step: int) -> dict[str, Tensor]:
    """Global batch `step`."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (BATCH, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def model_of(column: str, layers: int = LAYERS) -> nn.Module:
    return build_model(layers, WIDTH, has_experts=column == "ep")


def run_rank(report: Report, case: Case) -> None:
    """Report the RankEnd of this rank."""
    is_faulty = dist.get_rank() == dist.get_world_size() - 1
    start_s = time.monotonic()
    try:
        kind, text, start_s = _train(case, is_faulty, start_s)
    except meshfold.MeshfoldError as error:
        kind, text = ("line" if "\n" not in str(error) else "lines"), str(error)
    except BaseException as error:
        kind, text = type(error).__name__, traceback.format_exc(limit=-3)
    report(RankEnd(kind, time.monotonic() - max(start_s, _FAULT_S.get("began", start_s)), text))
    if kind not in ("right", "line"):
        os._exit(1)


_FAULT_S: dict[str, float] = {}
"""When the step with the fault began on this rank, of time.monotonic."""


def _train(case: Case, is_faulty: bool, start_s: float) -> tuple[str, str, float]:
    row = case.row if is_faulty else "none"
    model = model_of(case.column, LAYERS + (row == "other model"))
    if row == "other weights":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
    plan = plan_from_json(case.other if row == "other plan" else case.plan)
    compiled = meshfold.compile(model, "local-cpu", batch_of(0), plan=plan)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        if step == 1:
            _FAULT_S["began"] = time.monotonic()
            batch = _fault(row, batch, case.timeout_s)
        # The first step waits for processes that are still being built.
        timeout_s = case.timeout_s if step else STARTUP_S
        losses.append(compiled.train_step(batch, timeout_s=timeout_s).item())
        optimizer.step()
        optimizer.zero_grad()
    differ = max(abs(a - b) for a, b in zip(losses, case.losses, strict=True))
    text = f"losses {losses}, of one process {list(case.losses)}"
    return ("right" if differ < TOLERANCE else "wrong"), text, start_s


def _fault(row: str, batch: dict[str, Tensor], timeout_s: float) -> dict[str, Tensor]:
    """What the faulty rank does before its second step, and the batch that it brings."""
    match row:
        case "dies":
            os._exit(3)
        case "hangs":
            time.sleep(timeout_s + 2 * SLACK_S)
            os._exit(4)
        case "raises":
            raise ValueError("the loader of this rank has no more data")
        case "late" | "too late":
            time.sleep(timeout_s / 2 if row == "late" else timeout_s + 3)
        case "other shape":
            return {name: x[:-2] for name, x in batch.items()}
        case "other dtype":
            return {name: x.to(torch.int32) for name, x in batch.items()}
        case "other data":
            return batch_of(99)
    return batch


def plan_of(column: str, pins: Mapping[str, int]) -> meshfold.Plan:
    options = meshfold.CompileOptions(pins={"dp": 1, "tp": 1, "cp": 1, "ep": 1, "pp": 1, **pins})
    cluster = f"local-cpux{num_ranks(column)}"
    return meshfold.find_plan(model_of(column), cluster, batch_of(0), options=options)


def num_ranks(column: str) -> int:
    return 4 if " x " in column else 2


def losses_alone(column: str) -> tuple[float, ...]:
    """Of the model in one process."""
    model = model_of(column)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(**batch_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


def run_case(case: Case) -> dict[int, RankEnd]:
    """How the ranks ended; one that is missing did not say."""
    ends: dict[int, RankEnd] = {}
    grace_s = case.timeout_s + 3 * SLACK_S
    try:
        run_local(
            num_ranks(case.column),
            run_rank,
            case,
            on_report=lambda rank, end: ends.update({rank: end}),
            quiet=True,
            grace_s=grace_s,
        )
    except LocalProcessError:
        pass  # a rank failed, as it should; `ends` says how all ended
    return ends


def verdict(case: Case, ends: Mapping[int, RankEnd]) -> str:
    """`right` or `line` with the longest seconds; else `FAILS: ` and what each rank did."""
    ranks = range(num_ranks(case.column) - (case.row in SELF))
    # What differs from the start ends in `compile`, or in the first step.
    limit_s = case.timeout_s + SLACK_S
    found = [ends.get(rank, RankEnd("no end", 0.0)) for rank in ranks]
    kinds = sorted({end.kind for end in found})
    longest_s = max(end.seconds for end in found)
    if not set(kinds) <= {"right", "line"}:
        return f"FAILS: {', '.join(kinds)}"
    if longest_s > limit_s and case.row not in ("other weights", "other model", "other plan"):
        return f"FAILS: {longest_s:.0f} s"
    return f"{' and '.join(kinds)}, {longest_s:.1f} s"


def cases(rows: tuple[str, ...], columns: tuple[str, ...], timeout_s: float) -> list[Case]:
    """All cases of these rows and columns."""
    made = []
    for column in columns:
        other = {"tp": num_ranks(column)} if column != "tp" else {"dp": 2, "zero": 0}
        texts = [plan_to_json(plan_of(column, pins)) for pins in (COLUMNS[column], other)]
        losses = losses_alone(column)
        made += [Case(row, column, *texts, losses, timeout_s) for row in rows]
    return made


def table(rows: tuple[str, ...], columns: tuple[str, ...], found: Mapping[Any, str]) -> str:
    """Rows by columns, and the count of the cases that hold."""
    lines = ["| one rank | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = (found[row, column].replace("|", "/") for column in columns)
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    held = sum(not text.startswith("FAILS") for text in found.values())
    return "\n".join([*lines, "", f"{held} of {len(found)} cases hold."])


def document(text: str, timeout_s: float) -> str:
    """docs/faults.md."""
    return (
        "# When one rank fails\n\n"
        "One rank of a small model dies, hangs, raises, comes late (half the timeout, or past it), "
        "or is given\nsomething else than the others; the cells say how all the other ranks end, "
        "and after how long at most\nsince the fault: with the right numbers, or with one line "
        f"that names what happened. The timeout of a step is\n{timeout_s:g} s. Measured on gloo "
        "processes by `python benchmarks/faults.py --write docs/faults.md`.\n\n" + text + "\n"
    )


Names = Callable[[Any, Any, str], tuple[str, ...]]


def _names(known: tuple[str, ...]) -> Names:
    def parse(_: Any, __: Any, text: str) -> tuple[str, ...]:
        names = tuple(text.split(",")) if text else known
        if unknown := [name for name in names if name not in known]:
            raise click.BadParameter(f"{unknown[0]}: one of {', '.join(known)}")
        return names

    return parse


@click.command()
@click.option("--rows", default="", callback=_names(ROWS))
@click.option("--columns", default="", callback=_names(tuple(COLUMNS)))
@click.option("--timeout-s", default=8.0)
@click.option("--write", type=click.Path(path_type=Path))
def main(
    rows: tuple[str, ...], columns: tuple[str, ...], timeout_s: float, write: Path | None
) -> None:
    found = {}
    for case in cases(rows, columns, timeout_s):
        ends = run_case(case)
        found[case.row, case.column] = verdict(case, ends)
        print(f"{case.row}, {case.column}: {found[case.row, case.column]}", flush=True)
        for rank, end in sorted(ends.items()):
            print(f"    rank {rank}: {end.kind}, {end.seconds:.1f} s: {end.text}", flush=True)
    text = table(rows, columns, found)
    print(text)
    if write is not None:
        write.write_text(document(text, timeout_s))


if __name__ == "__main__":
    main()
