"""Ops that every rank runs whole, in model families, and how dear they are.

    python benchmarks/whole_ops.py [NAME ...] [--ranks 4]

Captures every family of benchmarks/zoo/family_batches.py and prices its ops on an axis of --ranks
local processes, each under its fastest rule. What has no rule, or none that shards anything here,
runs whole on every rank. One row per family that has ops without a rule, or others that take more
than MOST of a step: each with its share of the op time of a step, forward and backward. No
conversion is counted, which only makes shares larger than those of a plan. Exits 1 when an op takes
more than MOST of a step.
"""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import click
from zoo.family_batches import FAMILIES, find, make

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import CaptureError
from meshfold.ir.op_graph import Dependence, FoldedGraph
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.table import op_labels, region_rules
from meshfold.validation.float64_mode import float64_everywhere

MOST = 0.01


@dataclass(frozen=True)
class Shares:
    """Of the op time of a step, by op. without_rule: of ops that the table does not know;
    unsharded: of ops all of whose rules leave every dim whole, in this model on so many ranks;
    what has fewer numbers than there are ranks (a scale) is not to be shared."""

    without_rule: Mapping[str, float]
    unsharded: Mapping[str, float]

    @property
    def worst(self) -> float:
        return max((*self.without_rule.values(), *self.unsharded.values()), default=0.0)

    @property
    def text(self) -> str:
        """What is to be seen, "" if nothing."""
        dear = {op: share for op, share in self.unsharded.items() if share > MOST}
        parts = [
            ", ".join(f"{op.removeprefix('aten.')} {share:.2%}" for op, share in found.items())
            for found in (self.without_rule, dear)
        ]
        return "; no dim to shard: ".join(parts) if dear else parts[0]


def shares(folded: FoldedGraph, num_ranks: int) -> Shares:
    """What runs whole in a captured model on an axis of `num_ranks`."""
    cluster = resolve_cluster("local-cpu", num_ranks)
    costs = CostModel(cluster, build_mesh(cluster, 1, num_ranks))
    sizes = costs.mesh.sizes
    times, whole, unsharded = (Counter[str]() for _ in range(3))
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
                whole[op.target] += count * found
            elif not any(rule.splits_work for rule in rules[-1]) and num_ranks <= max(
                math.prod(graph.values[v].shape) for v in (*op.operands, *op.outputs)
            ):
                unsharded[op.target] += count * found
    total = sum(times.values())
    return Shares(*({op: t / total for op, t in sorted(c.items())} for c in (whole, unsharded)))


@click.command()
@click.argument("names", nargs=-1)
@click.option("--ranks", default=4, show_default=True)
def main(names: tuple[str, ...], ranks: int) -> None:
    """Price the ops of the families (default: all), and print those that run whole."""
    warnings.simplefilter("ignore")
    families = names or tuple(f.name for f in FAMILIES)
    found, refused = [], 0
    for name in families:
        model, batch = make(find(name))
        try:
            with float64_everywhere():
                found.append(shares(capture(model, batch).graph, ranks))
        except CaptureError as error:
            refused += 1
            click.echo(f"{name:<20}refused: {error}")
            continue
        if found[-1].text:
            click.echo(f"{name:<20}{found[-1].text}")
    worst = max((f.worst for f in found), default=0.0)
    num_without = sum(bool(f.without_rule) for f in found)
    click.echo(
        f"{len(found)} families, {refused} refused; {num_without} have "
        f"ops without a rule; what runs whole takes at most {worst:.2%} of a step"
    )
    sys.exit(1 if worst > MOST else 0)


if __name__ == "__main__":
    main()
