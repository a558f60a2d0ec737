"""Random (model, cluster, options) triples: planned and run, or refused.

    python benchmarks/triples.py [--count 500] [--seed 0] [--scheduled]

Every triple is captured and planned. A plan is emitted and one step of it run on simulated ranks in
float64; the loss and every gradient are held against one process. A refusal must be a MeshfoldError
of one line. Prints what was refused, by its message without the numbers, which strategies the plans
had, and every failure with the number that draws it again. Exits 1 if there is one. --scheduled:
in that mode, every region in a number of parts that is drawn, too. From --seed 10000 on models have
blocks of all kinds (custom Functions, loops over experts, bags, recurrences, ...), and some return
several outputs.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import click
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # support/

from support.processes.pool import Pools
from support.search.triples import TOLERANCE, Outcome, draw_triple, outcome_of


@click.command()
@click.option("--count", default=500, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the first triple.")
@click.option("--scheduled", is_flag=True, help="In mode scheduled, regions in parts.")
def main(count: int, seed: int, scheduled: bool) -> None:
    """Draw, plan, run, and print a summary."""
    torch.set_num_threads(1)
    outcomes, pools = [], Pools()
    for number in range(seed, seed + count):
        outcome = outcome_of(draw_triple(number), pools, scheduled=scheduled)
        outcomes.append(outcome)
        if outcome.failed:
            click.echo(f"FAILED {outcome.text}\n       {outcome.failed}")
    pools.close()
    failures = _summary(outcomes)
    sys.exit(1 if failures else 0)


def _summary(outcomes: list[Outcome]) -> int:
    """Prints it; the number of failures."""
    failed = sum(bool(o.failed) for o in outcomes)
    refused = Counter(re.sub(r"\d[\d.,]*", "N", o.refused) for o in outcomes if o.refused)
    ran = [o for o in outcomes if not o.failed and not o.refused]
    strategies = Counter(label for o in ran for label in o.strategies)
    click.echo(
        f"{len(outcomes)} triples: {len(ran)} agree with one process to {TOLERANCE:.0e} "
        f"(worst {max((o.worst for o in ran), default=0.0):.0e}), {sum(refused.values())} refused, "
        f"{failed} failed"
    )
    click.echo("refused:")
    for message, times in refused.most_common():
        click.echo(f"  {times:4d}  {message}")
    click.echo("strategies of the plans:")
    for label, times in strategies.most_common():
        click.echo(f"  {times:4d}  {label}")
    return failed


if __name__ == "__main__":
    main()
