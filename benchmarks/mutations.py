"""Mutation score of the gate of the rule table: how many wrong rules it catches.

    python benchmarks/mutations.py [FAMILY ...] [--every 1]

Every type of every rule of every sample op (tests/support/graphs/samples.py) is changed to each
other type that its tensor can have on an axis of two ranks, and the gate of
tests/passes/rules/test_table.py checks the result. Survivors that are right
(tests/support/graphs/mutations.py says which, and why) are counted apart. --every N takes each Nth
mutant only. Prints a row per family of ops, and every other mutant that survives; exits 1 below 95
% caught. The whole takes about a quarter of an hour.
"""

import contextlib
import io
import sys
from pathlib import Path

import click
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # support/

from support.graphs import samples
from support.graphs.mutations import score
from support.graphs.samples import Sample

LOWEST = 0.95
FAMILIES: dict[str, tuple[Sample, ...]] = {
    name.lower(): getattr(samples, name)
    for name in (
        *("POINTWISE", "CONTRACTION", "NORMALIZATION", "SPATIAL", "REDUCTION", "ATTENTION"),
        *("EXPERTS", "INDEX", "BAGS", "RECURRENCE", "LOSS", "SHAPE", "RANDOM"),
    )
}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--every", default=1, show_default=True, help="Check each Nth mutant only.")
def main(names: tuple[str, ...], every: int) -> None:
    """Mutate the rules of some families of ops (default: all), and print the score."""
    for name in names:
        if name not in FAMILIES:
            raise click.UsageError(f"no family {name!r}; there are {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    click.echo(f"{'family':<15}{'caught':>9}{'right':>9}{'survive':>9}")
    survivors: list[str] = []
    caught = 0
    for name in names or FAMILIES:
        # torch.fx prints the line on which a wrong rule fails.
        with contextlib.redirect_stderr(io.StringIO()):
            found = score(FAMILIES[name], every)
        caught += found.caught
        survivors += found.survivors
        click.echo(f"{name:<15}{found.caught:>9}{found.right:>9}{len(found.survivors):>9}")
    total = caught + len(survivors)
    click.echo(f"{caught} of {total} wrong rules caught, {100 * caught / max(total, 1):.2f} %")
    for text in survivors:
        click.echo(f"  survives: {text}")
    sys.exit(0 if caught >= LOWEST * total else 1)


if __name__ == "__main__":
    main()
