"""What of a typed region is recomputed in its backward: ops, and steps of conversions.

Full recomputation: autograd keeps what arrives at the region and nothing else; when the backward
first needs a tensor from inside, the forward runs again and stops at the last one that it needs
(Chen et al. 2016, arXiv:1604.06174; the early stop is that of torch.utils.checkpoint). So the end
of a region is not repeated: with

    last          the last op of which autograd keeps anything
    recomputed    every op before `last`, and what converts their operands and those of `last`
                  `last` itself, unless it keeps operands alone: those are noted before it runs
    not           all ops behind, conversions of outputs: the collective that ends a row-parallel
                  pair

The memory model decides the same on the local program, where probes say what autograd keeps
(cost_models/memory/recomputation.py). Here tables say it, and an op that they do not list counts as
if it kept its result: the price may be too high by what ends a region, never too low.
meshfold.runtime.recomputation, which runs it, asks autograd itself. What selective recomputation
adds is read from the local program (passes/memory/kept_results.py).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping

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
class RecomputedPrefix:
    """Ops 0..num_ops-1 of a region are recomputed, with the conversions of the operands of ops
    0..num_prepared-1; num_prepared is num_ops, or one more."""

    num_ops: int
    num_prepared: int


def recomputed_prefix(graph: OpGraph) -> RecomputedPrefix:
    """What full recomputation repeats; nothing for a graph of which autograd keeps nothing."""
    for k in reversed(range(len(graph.ops))):
        op = graph.ops[k]
        if op.target in KEEPS_NOTHING or not any(graph.values[v].requires_grad for v in op.outputs):
            continue
        return RecomputedPrefix(k if op.target in KEEPS_OPERANDS else k + 1, k + 1)
    return RecomputedPrefix(0, 0)


@dataclass(frozen=True)
class Recomputed:
    """What of a typed region is recomputed."""

    ops: Collection[int]
    """Numbers of the ops."""
    demands: Sequence[Collection[Layout]]
    """The layouts that recomputation, or autograd, wants of each value."""

    def targets(self, v: int, edges: Sequence[tuple[Layout, Layout]]) -> set[Layout]:
        """Of the edges of a tree of conversions of value number v, the ends of those that lead to
        what is wanted."""
        parents = {target: source for source, target in edges}
        found: set[Layout] = set()
        for layout in self.demands[v]:
            while layout in parents and layout not in found:
                found.add(layout)
                layout = parents[layout]
        return found


def full_recompute(graph: OpGraph, typing: RegionTyping) -> Recomputed:
    """What full recomputation recomputes."""
    prefix = recomputed_prefix(graph)
    demands: list[set[Layout]] = [set() for _ in graph.values]
    for op, chosen in zip(graph.ops[: prefix.num_prepared], typing.ops, strict=False):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            demands[v].add(layout)
    return Recomputed(range(prefix.num_ops), demands)
