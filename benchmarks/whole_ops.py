"""Ops that every rank runs whole for want of a rule, in model families, and how dear they are.

    python benchmarks/whole_ops.py [NAME ...] [--ranks 4]

Captures every family of benchmarks/zoo/family_batches.py and prices its ops on an axis of --ranks
local processes, each under its fastest rule. What has no rule runs whole on every rank. One row per
family that has such ops: each with its share of the op time of a step, forward and backward. No
conversion is counted, which only makes shares larger than those of a plan. Exits 1 when an op takes
more than MOST of a step.
"""

import sys
import warnings
from collections import Counter

import click
from zoo.family_batches import FAMILIES, find, make

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import Dependence, FoldedGraph
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.table import op_labels, region_rules
from meshfold.validation.float64_mode import float64_everywhere

MOST = 0.01


def shares(folded: FoldedGraph, num_ranks: int) -> dict[str, float]:
    """Op without a rule -> its share of the op time of a step."""
    cluster = resolve_cluster("local-cpu", num_ranks)
    costs = CostModel(cluster, build_mesh(cluster, 1, num_ranks))
    sizes = costs.mesh.sizes
    times: Counter[str] = Counter()
    whole = set()
    for number, region in enumerate(folded.regions):
        graph = region.graph
        count = sum(instance.region == number for instance in folded.instances)
        for op, rules in zip(graph.ops, region_rules(graph, sizes), strict=True):
            if all(graph.values[v].depends is Dependence.CONSTANT for v in op.outputs):
                continue
            first = [axis[0] for axis in rules]
            found = min(
                op_time(graph, op, [*first[:-1], rule], costs).total_s for rule in rules[-1]
            )
            times[op.target] += count * found
            if op_labels(graph, op) is None:
                whole.add(op.target)
    total = sum(times.values())
    return {target: times[target] / total for target in sorted(whole)}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--ranks", default=4, show_default=True)
def main(names: tuple[str, ...], ranks: int) -> None:
    """Price the ops of the families (default: all), and print those that run whole."""
    warnings.simplefilter("ignore")
    worst, num_families, families = 0.0, 0, names or tuple(f.name for f in FAMILIES)
    for name in families:
        model, batch = make(find(name))
        with float64_everywhere():
            found = shares(capture(model, batch).graph, ranks)
        worst = max(worst, *found.values(), 0.0)
        num_families += bool(found)
        if found:
            ops = ", ".join(f"{op.removeprefix('aten.')} {s:.2%}" for op, s in found.items())
            click.echo(f"{name:<20}{ops}")
    click.echo(
        f"{num_families} of {len(families)} families have ops without a rule; "
        f"the dearest takes {worst:.2%} of a step"
    )
    sys.exit(1 if worst > MOST else 0)


if __name__ == "__main__":
    main()
