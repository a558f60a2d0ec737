"""The op-rule table: how each op may be sharded on one mesh axis.

OP_RULES names, per op, the function that labels its dims (passes.rules.ops.labels). From the labels
the axis rules follow, for an axis of n ranks (_label_rule, _fixed_rules):

    every label L at every place that its dims allow:
        operand or output with L at dim d -> Shard(d, place / prefix)
        operand without L                 -> Replicate; Partial if it is added to a sum over L
        output without L                  -> Partial if L is summed, or the type that Special gives;
                                             otherwise there is no such rule
    refined     a label that shards more than L does, in the blocks of L: the same (refined_rules)
    always      all Invariant -> Invariant; all Replicate -> Replicate
    linear ops  a set of operands Partial, the others Replicate -> Partial

A value without gradient is Invariant where a rule would say Replicate: they are the same for it.
An op without a row, or called in a way its row does not know, has the rule "I" alone: it runs on
unsharded values. An op of the user's has its labels with it (passes.rules.ops.custom), and no rule
"R" unless its backward is linear.

Which shards: those that some op of the region asks for (passes.rules.ops.shards); of a typing that
is read, those that it names (passes.rules.typed).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshfold.ir.op_graph import Dependence, Op, OpGraph, Value
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, SpmdType
from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.ops.attention import ATTENTION_RULES
from meshfold.passes.rules.ops.bags import BAG_RULES
from meshfold.passes.rules.ops.collective_matmul import COLLECTIVE_MATMUL_RULES
from meshfold.passes.rules.ops.complex import COMPLEX_RULES
from meshfold.passes.rules.ops.contraction import CONTRACTION_RULES
from meshfold.passes.rules.ops.custom import custom_labels
from meshfold.passes.rules.ops.experts import EXPERT_RULES
from meshfold.passes.rules.ops.index import INDEX_RULES
from meshfold.passes.rules.ops.labels import OpLabels, OpRule, RuleComm, Special, bind
from meshfold.passes.rules.ops.linalg import LINALG_RULES
from meshfold.passes.rules.ops.loss import LOSS_RULES
from meshfold.passes.rules.ops.normalization import NORMALIZATION_RULES
from meshfold.passes.rules.ops.pointwise import POINTWISE_RULES
from meshfold.passes.rules.ops.random import RANDOM_RULES
from meshfold.passes.rules.ops.recurrence import RECURRENCE_RULES
from meshfold.passes.rules.ops.reduction import REDUCTION_RULES
from meshfold.passes.rules.ops.shape import SHAPE_RULES
from meshfold.passes.rules.ops.shards import (
    Divisions,
    LabelShard,
    Shardings,
    Shards,
    grown_shardings,
    shards_at,
)
from meshfold.passes.rules.ops.spatial import SPATIAL_RULES

__all__ = ["OP_RULES", "AxisRule", "RuleComm", "region_rules", "typing_of"]

OP_RULES: dict[str, OpRule] = {
    **POINTWISE_RULES,
    **CONTRACTION_RULES,
    **COMPLEX_RULES,
    **REDUCTION_RULES,
    **RECURRENCE_RULES,
    **LINALG_RULES,
    **NORMALIZATION_RULES,
    **SPATIAL_RULES,
    **ATTENTION_RULES,
    **EXPERT_RULES,
    **INDEX_RULES,
    **BAG_RULES,
    **LOSS_RULES,
    **SHAPE_RULES,
    **RANDOM_RULES,
    **COLLECTIVE_MATMUL_RULES,
}


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One way to run an op on one axis.

    name: unique per op and axis size: "I", "R", "P0", a label, or a label and its place ("d0/4"; of
    a padded shard "v/+", of one of 3 blocks of 25 granules "d0/3+25").
    inputs: per entry of op.operands; outputs: per entry of op.outputs. local: the implementation
    (meshfold.ops.local_implementations). splits_work: the axis divides the op's work; load: that of
    the busiest rank over the mean.
    """

    name: str
    inputs: tuple[SpmdType, ...]
    outputs: tuple[SpmdType, ...]
    comm: tuple[RuleComm, ...] = ()
    local: str = "plain"
    splits_work: bool = False
    load: float = 1.0


def op_labels(graph: OpGraph, op: Op) -> OpLabels | None:
    """Labels of an op; None if it has no rule."""
    if op.custom is not None:
        return custom_labels(op)
    row = OP_RULES.get(op.target)
    bound = bind(graph, op, row.parameters) if row else None
    return row.labels(bound) if row and bound else None


def region_rules(
    graph: OpGraph, sizes: tuple[int, ...]
) -> tuple[tuple[tuple[AxisRule, ...], ...], ...]:
    """[op][axis] -> axis rules on axes of `sizes` ranks; the first is always "I"."""
    labels = [op_labels(graph, op) for op in graph.ops]
    per_size = {size: axis_rules(graph, labels, Divisions(size)) for size in set(sizes)}
    return tuple(tuple(per_size[n][k] for n in sizes) for k in range(len(graph.ops)))


def axis_rules(
    graph: OpGraph, labels: Sequence[OpLabels | None], divisions: Divisions
) -> tuple[tuple[AxisRule, ...], ...]:
    """The rules of every op on one axis. labels: op_labels of every op."""
    _, shardings = grown_shardings(graph, labels, divisions)
    return tuple(
        op_rules(graph, op, labels[k], divisions.size, shardings[k])
        for k, op in enumerate(graph.ops)
    )


def rule_inside(
    graph: OpGraph, op_index: int, rule: AxisRule, outer_size: int, size: int
) -> AxisRule | None:
    """The rule that goes on with `rule`, taken on an axis of `outer_size` ranks, inside each of its
    shards on an axis of `size`: the same label at the next place. None where a tensor does not
    divide. A rule without shards is its own."""
    if not rule.splits_work:
        return rule
    op = graph.ops[op_index]
    spec = op_labels(graph, op)
    assert spec is not None, "an op without labels has no rule that splits its work"
    label, _, shard = rule.name.partition("/")
    if "+" in shard:
        return None
    inside = int(shard or 1) * outer_size, 0
    shards = shards_at(graph, op, spec, label, inside, Divisions(size))
    return next(_label_rule(graph, op, spec, label, inside, shards), None) if shards else None


def rules_inside(
    graph: OpGraph,
    op_index: int,
    per_axis: Sequence[Sequence[AxisRule]],
    sizes: Sequence[int],
    axis: int,
) -> dict[str, AxisRule]:
    """The rules by name of one axis that go on with a rule of another inside of its shards.
    per_axis: the rules of the op that the table has on every axis of a mesh of `sizes`."""
    inside = (
        rule_inside(graph, op_index, rule, sizes[outer], sizes[axis])
        for outer, rules in enumerate(per_axis)
        for rule in rules
        if outer != axis
    )
    return {rule.name: rule for rule in inside if rule is not None}


def refined_rules(graph: OpGraph, op_index: int, rule: AxisRule, size: int) -> tuple[AxisRule, ...]:
    """The rules that cut what `rule` cuts, and more, on an axis of `size` ranks. No other op asks
    for their shards, and region_rules does without them: they are for an axis of context."""
    op = graph.ops[op_index]
    spec = op_labels(graph, op) if rule.splits_work else None
    return tuple(_refined(graph, op, spec, rule, size)) if spec and spec.refinements else ()


def _refined(
    graph: OpGraph, op: Op, spec: OpLabels, rule: AxisRule, size: int
) -> Iterator[AxisRule]:
    label, _, place = rule.name.partition("/")
    for name, (other, _) in spec.refinements.items():
        if other == label and "+" not in place:
            at = int(place or 1), 0
            shards = shards_at(graph, op, spec, name, at, Divisions(size))
            if shards is not None:
                yield from _label_rule(graph, op, spec, name, at, shards)


def typing_of(graph: OpGraph, op_index: int, rules_by_axis: tuple[AxisRule, ...]) -> OpTyping:
    """The typing that one axis rule per axis means."""
    op = graph.ops[op_index]
    return OpTyping(
        rules=tuple(r.name for r in rules_by_axis),
        inputs=tuple(tuple(r.inputs[k] for r in rules_by_axis) for k in range(len(op.operands))),
        outputs=tuple(tuple(r.outputs[k] for r in rules_by_axis) for k in range(len(op.outputs))),
    )


def rule_locals(graph: OpGraph, op_index: int, typing: OpTyping) -> tuple[str, ...]:
    """Local implementations that a typing asks for: that of the op under any rule (on a mesh
    without axes, too), then one per axis."""
    labels = op_labels(graph, graph.ops[op_index])
    if labels is None:
        return ("plain",) * (1 + len(typing.rules))
    by_axis = (_local_of(labels, *name.partition("/")[::2]) for name in typing.rules)
    return (labels.local, *by_axis)


def summed_axes(graph: OpGraph, op_index: int, typing: OpTyping) -> tuple[int, ...]:
    """Axes on which a typing shards a label that is summed."""
    labels = op_labels(graph, graph.ops[op_index])
    summed = labels.summed if labels else frozenset()
    return tuple(k for k, name in enumerate(typing.rules) if name.split("/")[0] in summed)


def op_rules(
    graph: OpGraph, op: Op, spec: OpLabels | None, size: int, shardings: Shardings
) -> tuple[AxisRule, ...]:
    """Rules of one op on one axis, "I" first. Rules that mean the same types are given once."""
    fixed = _fixed_rules(graph, op, spec)
    constant = all(graph.values[v].depends is Dependence.CONSTANT for v in op.outputs)
    if spec is None or size == 1:
        return (fixed[0],)
    # A constant is the same on all ranks, or each makes its shard; pending sums are for gradients.
    rules = fixed[:1] if constant else [*fixed]
    order = {label: k for k, label in enumerate((*spec.names, *spec.alternatives))}
    for label, place in sorted(shardings, key=lambda key: (order[key[0]], key[1])):
        shards = shardings[label, place]
        if shards is not None:
            rules.extend(_label_rule(graph, op, spec, label, place, shards))
    distinct = {(r.inputs, r.outputs): r for r in reversed(rules)}
    return tuple(r for r in rules if distinct[r.inputs, r.outputs] is r)


def _fixed_rules(graph: OpGraph, op: Op, spec: OpLabels | None) -> list[AxisRule]:
    """The rules without a shard: "I", "R" and one per linear set."""
    inputs = [graph.values[v] for v in op.operands]
    outputs = [graph.values[v] for v in op.outputs]
    local = spec.local if spec else "plain"
    invariant = (INVARIANT,) * len(inputs), (INVARIANT,) * len(outputs)
    rules = [AxisRule("I", *invariant, local=local)]
    if spec is None:
        return rules
    if spec.takes_summands:
        replicate = tuple(map(_same, inputs)), tuple(map(_same, outputs))
        rules.append(AxisRule("R", *replicate, local=local))
    for number, partial in enumerate(spec.linear):
        names = {op.operands[k] for k in partial}
        mixed = any(v in names for k, v in enumerate(op.operands) if k not in partial)
        if mixed or not all(value.is_float for value in outputs):
            continue
        types = tuple(PARTIAL if k in partial else _same(v) for k, v in enumerate(inputs))
        rules.append(AxisRule(f"P{number}", types, (PARTIAL,) * len(outputs), local=local))
    return rules


def _label_rule(
    graph: OpGraph,
    op: Op,
    spec: OpLabels,
    label: str,
    at: LabelShard,
    shards: Shards,
) -> Iterator[AxisRule]:
    """The rule that shards `label`, if there is one."""
    special = spec.special.get(label, Special())
    added = spec.added if label in spec.summed else frozenset()
    inputs = tuple(
        shards[k] or (PARTIAL if k in added else _same(graph.values[v]))
        for k, v in enumerate(op.operands)
    )
    rest = special.output or (PARTIAL if label in spec.summed else None)
    outputs = tuple(t or rest for t in shards[len(op.operands) :])
    typed = tuple(t for t in outputs if t is not None)
    # Flags do not add up: a sum cast to them is true or false only when all of it is there.
    flags = any(graph.values[v].dtype == "bool" for v in op.outputs)
    if len(typed) == len(outputs) and not (flags and PARTIAL in typed):
        where = _shard_text(at, shards)
        name = f"{label}/{where}" if where else label
        local = _local_of(spec, label, where)
        yield AxisRule(name, inputs, typed, special.comm, local, True, special.load)


def _shard_text(at: LabelShard, shards: Shards) -> str:
    """The second half of a rule's name; of one block of single rows, padded, "+"."""
    blocks, granules = at
    text = str(blocks) if blocks > 1 else ""
    if not granules:
        return text
    is_plain = blocks == 1 and all(t is None or t.unit == 1 for t in shards)
    return "+" if is_plain else f"{text}+{granules}"


def _local_of(spec: OpLabels, label: str, shard: str) -> str:
    if label in spec.drops_padding and "+" in shard:
        return "valid_rows"
    own = spec.special.get(label, Special()).local
    return own if own != "plain" else spec.local


def _same(value: Value) -> SpmdType:
    """The type of a value that is the same on all ranks while its gradient is a pending sum."""
    return REPLICATE if value.requires_grad else INVARIANT
