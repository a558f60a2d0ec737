"""Rules of single ops, and whether typings are legal: what tests ask and the search does not."""

from collections import Counter
from collections.abc import Sequence

from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import INVARIANT, is_legal
from meshfold.ir.strategy import OpTyping
from meshfold.ops.local_implementations import LOCAL_OPS
from meshfold.passes.rules.ops.shards import Divisions, ShardCandidates, Shardings, new_shardings
from meshfold.passes.rules.table import AxisRule, op_labels, op_rules, refined_rules


def is_legal_typing(graph: OpGraph, op_index: int, typing: OpTyping, sizes: Sequence[int]) -> bool:
    """Whether every operand and output can have its layout."""
    op = graph.ops[op_index]
    pairs = zip((*op.operands, *op.outputs), (*typing.inputs, *typing.outputs), strict=True)
    return all(is_legal(graph.values[v].shape, layout, sizes) for v, layout in pairs)


def rules_of_op(
    graph: OpGraph, op_index: int, size: int, candidates: ShardCandidates
) -> tuple[AxisRule, ...]:
    """All rules of one op on an axis of `size` ranks, for given candidates of its values."""
    op = graph.ops[op_index]
    spec = op_labels(graph, op)
    known: Shardings = {}
    if spec is None or size == 1:
        return op_rules(graph, op, spec, size, known)
    new_shardings(graph, op, spec, Divisions(size), candidates, known)
    rules = op_rules(graph, op, spec, size, known)
    return (*rules, *(more for r in rules for more in refined_rules(graph, op_index, r, size)))


def faults_of(rules: Sequence[AxisRule]) -> list[str]:
    """A rule without an emitter, names that are not unique, a first rule that is not invariant, and
    what does not know whether it splits work."""
    counts = Counter(rule.name for rule in rules)
    found = [f"{name} stands twice" for name, count in counts.items() if count > 1]
    if rules[0].name != "I" or not {*rules[0].inputs, *rules[0].outputs} <= {INVARIANT}:
        found.append("the first rule is not invariant")
    for rule in rules:
        if rule.local != "plain" and rule.local not in LOCAL_OPS:
            found.append(f"{rule.name} has no emitter")
        if rule.splits_work != any(t.is_shard for t in (*rule.inputs, *rule.outputs)):
            found.append(f"{rule.name} splits work: {rule.splits_work}")
    return found
