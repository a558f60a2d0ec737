"""What full recomputation of a region runs again in the backward.

Autograd keeps what arrives at the region and nothing else; when the backward first needs a tensor
from inside, the forward runs again and stops at the last one that it needs (Chen et al. 2016,
arXiv:1604.06174; the early stop is that of torch.utils.checkpoint). So the end of a region is not
repeated: with

    last        the last op of which autograd keeps anything
    run again   every op before `last`, and what converts their operands and those of `last`
                `last` itself, unless it keeps nothing but operands: those are noted before it runs
    not         all ops behind, conversions of outputs: the collective that ends a row-parallel pair

The memory model and the price both read the prefix from here; meshfold.runtime.recomputation, which runs
it, asks autograd itself. Ops that the tables do not list count as if they kept a result.
"""

from dataclasses import dataclass

from meshfold.ir.op_graph import OpGraph

KEEPS_NOTHING = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor sub.Tensor rsub.Scalar neg.default alias.default detach.default clone.default "
        "contiguous.default _to_copy.default sum.default sum.dim_IntList "
        "view.default _unsafe_view.default reshape.default flatten.using_ints unflatten.int "
        "permute.default transpose.int t.default expand.default unsqueeze.default squeeze.default "
        "squeeze.dim squeeze.dims select.int slice.Tensor split.Tensor split_with_sizes.default "
        "chunk.default unbind.int cat.default stack.default flip.default roll.default "
        "repeat.default repeat_interleave.self_int"
    ).split()
)
"""Ops whose backward needs no tensor, in every local form that the emitter gives them."""

KEEPS_OPERANDS = frozenset(
    f"aten.{name}.default" for name in "linear addmm mm bmm baddbmm conv1d conv2d conv3d".split()
)
"""Ops whose backward needs operands only."""


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Ops 0..num_ops-1 of a region run again, with the conversions of the operands of ops
    0..num_prepared-1; num_prepared is num_ops, or one more."""

    num_ops: int
    num_prepared: int


def run_again(graph: OpGraph) -> RunAgain:
    """What recomputing `graph` repeats; nothing for a graph of which autograd keeps nothing."""
    for k in reversed(range(len(graph.ops))):
        op = graph.ops[k]
        if op.target in KEEPS_NOTHING or not any(graph.values[v].requires_grad for v in op.outputs):
            continue
        return RunAgain(k if op.target in KEEPS_OPERANDS else k + 1, k + 1)
    return RunAgain(0, 0)
