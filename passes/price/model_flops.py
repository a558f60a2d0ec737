"""Model flops of a captured graph: what the model asks for in one step, whatever the plan.

    model flops = sum over instances and ops of  f + min(b, 2 f)

f: floating point operations of the op's forward on global shapes; b: of its backward
(cost_models.op_costs.compute), a product per operand that needs a gradient: 2 f where all are
trained, less where weights are frozen or inputs need none. A kernel that makes its own scores again
(attention: b = 2.5 f) counts 2 f. So a trained model has 3 times its forward, as usual
(Chowdhery et al., PaLM, 2022, appendix B); but a causal op counts the half of the square that it
computes, where PaLM's formula counts all of it. Ops bound by memory count nothing.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

from meshfold.cost_models.op_costs.compute import op_work, stated_work
from meshfold.ir.op_graph import FoldedGraph, Op, OpGraph
from meshfold.passes.price.op_time import compute_dtype


class ModelFlops(NamedTuple):
    """Of one step on the global batch."""

    flops: float
    dtype: str
    """In which most of these are."""


def model_flops(folded: FoldedGraph) -> ModelFlops:
    """The flops of a model; float32 where it has none."""
    counts = Counter(instance.region for instance in folded.instances)
    by_dtype: dict[str, float] = defaultdict(float)
    for r, count in counts.items():
        graph = folded.regions[r].graph
        for op in graph.ops:
            if flops := _flops(graph, op):
                by_dtype[compute_dtype(graph, op)] += count * flops
    if not by_dtype:
        return ModelFlops(0.0, "float32")
    return ModelFlops(float(sum(by_dtype.values())), max(by_dtype, key=lambda d: (by_dtype[d], d)))


def _flops(graph: OpGraph, op: Op) -> float:
    if op.custom is not None and op.custom.costs.states_work:
        # Its costs are functions of local shapes; those of one device are the global ones.
        shapes = [graph.values[v].shape for v in op.operands]
        work = stated_work(op.custom.costs, shapes, graph, op, 1.0)
    else:
        work = op_work(graph, op)
    return work.flops + min(work.backward_flops, 2 * work.flops)
