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

Selective recomputation saves what is dear to compute and recomputes the rest where the backward
misses it (Korthikanti et al. 2022, arXiv:2205.05198, section 5, for any op graph). Dear, so saved,
are the results of

    products      matrix products, convolutions, attention
    collectives   that make no more than they read: all of them but all-gathers

The memory model decides the same on the local program, where probes say what autograd keeps
(cost_models/memory/recomputation.py has the recurrence). Here tables say it, and an op that they do
not list counts as if it kept its result: the price may be too high by what ends a region, never too
low. meshfold.runtime.recomputation, which runs it, asks autograd itself.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.compute import PRODUCTS, op_name
from meshfold.ir.conversion_step import Step
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Op, OpGraph, Value
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.price.conversions import (
    ConversionCosts,
    axis_conversion,
    conversion_steps,
    plan_conversions,
)

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


Edge = tuple[Layout, Layout]
Layouts = Sequence[tuple[Layout, Sequence[Layout]]]
"""The native layout of each value and those that are demanded of it."""

_SAVED = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})


def is_saved_op(op: Op) -> bool:
    """Whether selective recomputation saves the results of an op."""
    return op_name(op.target) in PRODUCTS


def is_saved_step(step: Step, mesh: Mesh) -> bool:
    """Whether it saves the result of a step of a conversion."""
    size = mesh.sizes[step.axis]
    return size > 1 and axis_conversion(step.source, step.target, size).forward in _SAVED


@dataclass(frozen=True)
class Recomputed:
    """What of a typed region is recomputed."""

    ops: Collection[int]
    """Numbers of the ops."""
    demands: Sequence[Collection[Layout]]
    """The layouts that recomputation, or autograd, wants of each value."""
    is_selective: bool

    def starts(
        self, v: int, value: Value, edges: Sequence[Edge], costs: ConversionCosts
    ) -> Mapping[Layout, Layout]:
        """The edges of a tree of conversions of value number v that are recomputed: target of an
        edge -> layout from which: where the edge starts, or later, after its last saved step."""
        if not self.is_selective:
            return _on_the_way({target: source for source, target in edges}, self.demands[v])
        return _starts(value, edges, self.demands[v], costs)


def _on_the_way(
    parents: Mapping[Layout, Layout], demands: Collection[Layout]
) -> dict[Layout, Layout]:
    """The edges of a tree that lead to `demands`."""
    found: dict[Layout, Layout] = {}
    for layout in demands:
        while layout in parents and layout not in found:
            found[layout] = parents[layout]
            layout = parents[layout]
    return found


def _starts(
    value: Value,
    edges: Sequence[Edge],
    demands: Collection[Layout],
    costs: ConversionCosts,
) -> dict[Layout, Layout]:
    """The same, as far back as something is saved."""
    found: dict[Layout, Layout] = {}
    parents: dict[Layout, Layout] = {}
    for source, target in edges:
        steps = conversion_steps(value, source, target, costs)
        found[target] = next(
            (s.after for s in reversed(steps) if is_saved_step(s, costs.mesh)), source
        )
        if found[target] == source:
            parents[target] = source
    reached = _on_the_way(parents, demands)
    wanted = {*demands, *reached.values()}
    return {target: start for target, start in found.items() if target in wanted}


def full_recompute(graph: OpGraph, typing: RegionTyping) -> Recomputed:
    """What full recomputation recomputes."""
    prefix = recomputed_prefix(graph)
    demands: list[set[Layout]] = [set() for _ in graph.values]
    for op, chosen in zip(graph.ops[: prefix.num_prepared], typing.ops, strict=False):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            demands[v].add(layout)
    return Recomputed(range(prefix.num_ops), demands, is_selective=False)


def selective_recompute(
    graph: OpGraph, typing: RegionTyping, layouts: Layouts, costs: ConversionCosts
) -> Recomputed:
    """What selective recomputation recomputes: module docstring and
    cost_models/memory/recomputation.py."""
    if not any(map(is_saved_op, graph.ops)):
        return full_recompute(graph, typing)
    wanted: list[set[Layout]] = [set() for _ in graph.values]
    recomputed = set()
    for k in reversed(range(len(graph.ops))):
        op = graph.ops[k]
        is_kept = op.target not in KEEPS_NOTHING
        is_kept &= any(graph.values[v].requires_grad for v in op.outputs)
        is_wanted = is_kept and op.target not in KEEPS_OPERANDS
        is_wanted |= any(
            _reaches_native(graph.values[v], layouts[v], wanted[v], costs) for v in op.outputs
        )
        if is_wanted and not is_saved_op(op):
            recomputed.add(k)
        if is_kept or k in recomputed:
            for v, layout in zip(op.operands, typing.ops[k].inputs, strict=True):
                wanted[v].add(layout)
    return Recomputed(frozenset(recomputed), wanted, is_selective=True)


def _reaches_native(
    value: Value,
    layouts: tuple[Layout, Sequence[Layout]],
    wanted: Collection[Layout],
    costs: ConversionCosts,
) -> bool:
    """Whether the wanted layouts of a value are converted from what its op gave, not from what a
    saved collective made of it."""
    native, demands = layouts
    if native in wanted:
        return True
    if not wanted:
        return False
    edges = plan_conversions(value, native, demands, costs)
    return native in _starts(value, edges, wanted, costs).values()
