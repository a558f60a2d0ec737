"""Regions that run in parts, so that collectives of one part hide behind the others.

    samples     every part some samples of every rank: all ops run once per part
    sequence    every part some rows of the sequence: what needs all rows (attention) runs whole,
                its operands put together, and what it makes is cut again

The batch, or the sequence, is followed through the op rules on a free axis, as for microbatches
(passes/pipeline_microbatch.py); here the parts are ops of one graph (passes/parts_graph.py). Every
collective becomes one per part, and a schedule (compiler/schedule_program.py) runs the ops of one
part while those of another are on their way: forward and backward, whatever the collective.
Parameters are gathered once, and gradients add up where the parts meet.

(Samples: Wang et al., Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing
and Overlapping, 2024. Products beside the gathers and reductions of their operands: Wang et al.,
Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.)
"""

from dataclasses import dataclass
from functools import cached_property

from meshfold.errors import PlanMismatchError
from meshfold.ir.op_graph import FoldedGraph, OpGraph
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import Parts, RegionTyping
from meshfold.passes.planner.check import typed_rules
from meshfold.passes.price.region import layouts_of_values
from meshfold.passes.rules.ops.random import RANDOM_OPS, may_draw
from meshfold.passes.rules.table import OP_RULES, rule_locals
from meshfold.passes.split.chunk_graph import UncutError, in_parts
from meshfold.passes.split.rows import follow_rows
from meshfold.passes.split.samples import OVER_BATCH, BatchTyping, follow_samples, is_part

Written = tuple[OpGraph, RegionTyping]


@dataclass(frozen=True)
class PartsProblem:
    """How the regions of a plan may run in parts. split: the captured graph with its regions as the
    plan has them."""

    split: FoldedGraph
    plan: Plan

    @cached_property
    def _batch(self) -> BatchTyping:
        """What the free axis does in every region where the batch is cut."""
        return follow_samples(self.split, self.plan.cluster, self.plan.model.batch_size)

    def in_parts(self, region: int, typing: RegionTyping, parts: Parts) -> Written:
        """The graph of a region that runs in `parts`, and its typing.

        Raises UncutError where it cannot.
        """
        graph, mesh = self.split.regions[region].graph, self.plan.mesh
        if parts.of == "samples":
            free, count = self._batch.typings[region], self.plan.model.batch_size
        else:
            rows = follow_rows(graph, parts.count)
            if rows is None:
                raise UncutError(f"it has no sequence that divides into {parts.count} parts")
            free, count = rows.typing, rows.length
        _check(graph, free)
        try:
            found = in_parts(graph, typing, free, count, parts.count, mesh.sizes)
            typed_rules(*found, self.split.regions[region].name, mesh)
        except PlanMismatchError as error:
            raise UncutError(str(error)) from error
        return found


def parted(problem: PartsProblem, region: int, typing: RegionTyping, parts: Parts) -> Written:
    """As PartsProblem.in_parts, for a plan. Raises PlanMismatchError."""
    try:
        return problem.in_parts(region, typing, parts)
    except UncutError as error:
        name = problem.split.regions[region].name
        raise PlanMismatchError(
            f"region {name} is planned in {parts}, but {error}; plan again"
        ) from error


def _check(graph: OpGraph, free: RegionTyping) -> None:
    """Raises UncutError unless every op that is cut can do with what is in one part."""
    if graph.mutations:
        raise UncutError("it updates a buffer, which every part would do")
    native = [layout for layout, _ in layouts_of_values(graph, free)]
    for k, (op, chosen) in enumerate(zip(graph.ops, free.ops, strict=True)):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            if is_part(native[v]) and layout[0].is_shard and native[v] != layout:
                raise UncutError(f"{op.target} needs another cut of its input")
        if any(is_part(x) and not x[0].is_shard for x in chosen.outputs):
            raise UncutError(f"{op.target} adds up over what is cut")
        if not any(layout[0].is_shard for layout in chosen.outputs):
            continue
        if any(x in OVER_BATCH for x in rule_locals(graph, k, chosen)[1:]):
            raise UncutError(f"{op.target} needs the whole batch")
        if op.target in RANDOM_OPS:
            names = OP_RULES[op.target].parameters
            if may_draw(dict(zip(names, op.args, strict=False)) | dict(op.kwargs)):
                raise UncutError(f"{op.target} draws random numbers")
    if not any(layout[0].is_shard for chosen in free.ops for layout in chosen.outputs):
        raise UncutError("nothing in it can be cut")
