"""Constants on shards: what no op reads unsharded is not gathered.

A value that depends on nothing but constants (a causal mask, positions) is the same on all ranks,
so the search lets its ops run unsharded and its users slice (passes/rules/joint.py). A mask
expanded to the batch is as large as the batch, though. Once the region is typed, this walks it
backwards: where all readers of a constant want one and the same shard, and a rule of its op makes
that shard without communication, the op takes the rule, and its operands are asked for what the
rule reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import INVARIANT, Layout, SpmdType, is_legal
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.rules.joint import RuleTable, is_constant_op
from meshfold.passes.rules.table import AxisRule, typing_of

JointRule = tuple[AxisRule, ...]


def shard_constants(
    graph: OpGraph,
    table: RuleTable,
    typing: RegionTyping,
    rules: Sequence[JointRule],
    sizes: tuple[int, ...],
) -> tuple[RegionTyping, tuple[JointRule, ...]]:
    """(typing, rules) with constant ops on the shards that are read. table: the rules of every op
    on every axis; rules: those of `typing`."""
    chosen, typings = list(rules), list(typing.ops)
    wanted: list[set[Layout]] = [set() for _ in graph.values]
    for v, layout in zip(graph.outputs, typing.outputs, strict=True):
        wanted[v].add(layout)
    for slot, v in graph.mutations:
        wanted[v].add(typing.slots[slot])
    for k in reversed(range(len(graph.ops))):
        op = graph.ops[k]
        if is_constant_op(graph, k):
            found = _rule_for(graph, table, k, [wanted[v] for v in op.outputs], sizes)
            if found is not None:
                chosen[k], typings[k] = found, typing_of(graph, k, found)
        for v, layout in zip(op.operands, typings[k].inputs, strict=True):
            wanted[v].add(layout)
    return replace(typing, ops=tuple(typings)), tuple(chosen)


def _rule_for(
    graph: OpGraph, table: RuleTable, k: int, wanted: Sequence[set[Layout]], sizes: tuple[int, ...]
) -> JointRule | None:
    """The joint rule of constant op k that makes the one layout wanted of each result, if any reads
    it; None where several are wanted of one, or only unsharded values, or no rule computes it."""
    if any(len(layouts) > 1 for layouts in wanted):
        return None
    layouts = {number: layout for number, found in enumerate(wanted) for layout in found}
    if not any(t.is_shard for layout in layouts.values() for t in layout):
        return None
    joint = []
    for axis in range(len(sizes)):
        wishes = {number: layout[axis] for number, layout in layouts.items()}
        fitting = [rule for rule in table[k][axis] if _makes(rule, wishes)]
        if not fitting:
            return None
        joint.append(min(fitting, key=lambda rule: rule.name))
    typing = typing_of(graph, k, tuple(joint))
    op = graph.ops[k]
    values = zip((*op.operands, *op.outputs), (*typing.inputs, *typing.outputs), strict=True)
    legal = all(is_legal(graph.values[v].shape, t, sizes) for v, t in values)
    return tuple(joint) if legal else None


def _makes(rule: AxisRule, wishes: Mapping[int, SpmdType]) -> bool:
    """Whether a rule computes constants of these types, by number of the result, by itself, from
    unsharded values and shards."""
    if rule.comm or rule.local != "plain" or any(t.kind == "P" for t in rule.inputs):
        return False
    # Without a gradient the same value everywhere is Invariant and Replicate at once.
    return all(
        rule.outputs[number] == (wish if wish.is_shard else INVARIANT)
        for number, wish in wishes.items()
    )
