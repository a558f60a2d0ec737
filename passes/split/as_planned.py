"""The graph that a plan is of: a captured one, rewritten as the plan says."""

from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import Plan
from meshfold.passes.split.chunked_losses import with_chunked_losses
from meshfold.passes.split.operator_slices import with_slices


def as_planned(folded: FoldedGraph, plan: Plan) -> FoldedGraph:
    """The graph that the regions of `plan` are of; a graph that is it already as it is."""
    return rewritten(folded, chunked_loss=plan.chunked_loss, slices=plan.slices)


def rewritten(folded: FoldedGraph, *, chunked_loss: bool, slices: int) -> FoldedGraph:
    """`folded` with its losses in chunks, its operators in slices, or both. What a loss in chunks
    reads is not sliced."""
    found = with_chunked_losses(folded) if chunked_loss else folded
    return with_slices(found, slices) if slices > 1 else found
