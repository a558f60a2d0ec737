"""Bad inputs of the command line: does each end in one line, and damage nothing?

    python benchmarks/fuzz.py [--minutes 10] [--only TEXT] [--seed 0]

Runs the tables of benchmarks/fuzzing/ (every option with every bad value, every reader with every
bad file, every field with every wrong value, outputs, modules) family by family in an order of the
seed, then changes of several fields that hypothesis finds, until the time is over. Prints a row per
family and every case that broke the promise (benchmarks/fuzzing/case.py); exits 1 if one did.
"""

import importlib
import random
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import click

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # support/

from fuzzing import arguments, files, modules, outputs
from fuzzing.case import Case, broken
from fuzzing.several import several_fields

FAMILIES = {
    "arguments": arguments.cases,
    "files": files.odd_files,
    "fields": files.wrong_fields,
    "configurations": files.wrong_configurations,
    "outputs": outputs.cases,
    "modules": modules.cases,
}


def tables(seed: int, only: str = "") -> Mapping[str, list[Case]]:
    """The cases of every family whose name contains `only`, in an order of the seed."""
    found = {}
    for family, cases in FAMILIES.items():
        kept = [case for case in cases() if only in f"{family}: {case.name}"]
        random.Random(seed).shuffle(kept)
        found[family] = kept
    return found


def in_turn(families: Mapping[str, list[Case]]) -> Iterator[tuple[str, Case]]:
    """A case of every family, then the next of every family."""
    for row in zip_longest(*families.values()):
        for family, case in zip(families, row, strict=True):
            if case is not None:
                yield family, case


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="When to stop.")
@click.option("--only", default="", help="Cases whose family and name contain this.")
@click.option("--seed", default=0, show_default=True, help="Of the order.")
def main(minutes: float, only: str, seed: int) -> None:
    """Run bad inputs until the time is over, and print what broke the promise."""
    end = time.monotonic() + 60 * minutes
    for module in ("meshfold.cli.torch_commands", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)  # once, and not in every process
    counts = dict.fromkeys((*FAMILIES, "several fields"), 0)
    num_broken = 0
    table = in_turn(tables(seed, only))
    rest = () if only else (("several fields", case) for case in several_fields(seed))
    for source in (table, rest):
        for family, case in source:
            if time.monotonic() > end:
                break
            counts[family] += 1
            faults = broken(case)
            num_broken += bool(faults)
            for fault in faults:
                click.echo(f"{family}: {case.name!r}: {fault!r}")
    for family, count in counts.items():
        click.echo(f"{family:<16}{count:>8}")
    click.echo(f"{sum(counts.values())} cases, {num_broken} broke the promise")
    sys.exit(1 if num_broken else 0)


if __name__ == "__main__":
    main()
