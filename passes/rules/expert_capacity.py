"""Rules of an axis whose ranks share experts that have a capacity.

Such experts are products with a batch of matrices, one per expert, of rows that somebody has put
in order by expert: x[e, c, k] with weight[e, k, o]. All shapes are fixed, so rows need no type of
their own: on the way there they change from shards of the batch to shards of e, on the way back
they change again, and both are an all-to-all.

    products      e is sharded, weights are stored so
    around them   what has e in all that depends on the batch may be either: the search finds where
                  the two meet (dispatch and combine by einsum stay with the batch, what is between
                  goes to the experts)

Any product with a matrix per label counts, whatever the label means.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.compute import PRODUCTS, op_name
from meshfold.ir.op_graph import Dependence, Op, OpGraph, SlotKind
from meshfold.ir.spmd import SpmdType
from meshfold.passes.rules.table import AxisRule, op_labels

RulesOfOp = tuple[AxisRule, ...]


@dataclass(frozen=True)
class ExpertProducts:
    """The expert products of one region: op -> the label of its experts; and how many experts every
    one has."""

    labels: Mapping[int, str]
    numbers: Mapping[int, int]


def expert_products(graph: OpGraph) -> ExpertProducts:
    """Products with a matrix of parameters for each expert. Where there are several labels of that
    kind (sets of experts, and experts of a set), the one with most."""
    found = {k: most for k, op in enumerate(graph.ops) if (most := _most_experts(graph, op))}
    return ExpertProducts(
        {k: label for k, (label, _) in found.items()},
        {k: number for k, (_, number) in found.items()},
    )


def _most_experts(graph: OpGraph, op: Op) -> tuple[str, int] | None:
    """(label, its size)."""
    spec = op_labels(graph, op) if op_name(op.target) in PRODUCTS else None
    if spec is None or len(op.operands) < 2:
        return None
    tensors = [graph.values[v] for v in (*op.operands, *op.outputs)]
    dims = (*spec.inputs, *spec.outputs)
    has_matrices = any(
        value.depends is Dependence.PARAMETER
        and len(value.shape) > 2
        and any(p and p[0] in spec.summed for p in of)
        for value, of in zip(tensors, spec.inputs, strict=False)
    )
    if not has_matrices or tensors[-1].depends is not Dependence.BATCH:
        return None
    sizes: dict[str, int] = {}
    for label in spec.names:
        places = [{p[0]: d for d, p in enumerate(of) if p} for of in dims]
        if label not in spec.summed and all(label in of for of in places):
            sizes[label] = tensors[0].shape[places[0][label]]
    best = max(sizes, key=lambda label: sizes[label], default=None)
    return (best, sizes[best]) if best is not None and sizes[best] > 1 else None


def capacity_rules(
    graph: OpGraph, chosen: Sequence[AxisRule], open_rules: Sequence[RulesOfOp]
) -> tuple[tuple[RulesOfOp, ...], dict[int, SpmdType]]:
    """(rules, expert weights) on one axis. chosen: the rule of every op that goes on with the
    batch; open_rules: all that it has. rules: per op what it may do; expert weights: slots of
    parameters that nothing but sharded products reads, as they read them."""
    seeds = expert_products(graph).labels
    there: dict[int, dict[str, AxisRule]] = {}
    shards: dict[int, set[SpmdType]] = {}
    waiting: list[int] = []

    def take(k: int, rule: AxisRule) -> None:
        if rule.name in there.setdefault(k, {}):
            return
        there[k][rule.name] = rule
        for v, t in _types(graph, k, rule):
            if t.is_shard and t not in shards.setdefault(v, set()):
                shards[v].add(t)
                waiting.append(v)

    for k, label in seeds.items():
        for rule in open_rules[k]:
            if rule.name == label:
                take(k, rule)
    while waiting:
        v = waiting.pop()
        for k in _near(graph, v):
            for rule in () if k in seeds else open_rules[k]:
                if _goes_along(graph, k, rule) and any(
                    at == v and t in shards[v] for at, t in _types(graph, k, rule)
                ):
                    take(k, rule)
    return _allowed(graph, chosen, there, seeds), _weights(graph, there, shards)


def _allowed(
    graph: OpGraph,
    chosen: Sequence[AxisRule],
    there: Mapping[int, Mapping[str, AxisRule]],
    seeds: Mapping[int, str],
) -> tuple[RulesOfOp, ...]:
    """Products and what is made of weights go to the experts; the others may."""
    rules: list[RulesOfOp] = []
    for k, rule in enumerate(chosen):
        found = there.get(k, {})
        is_bound = k in seeds or _is_of_parameters(graph, k)
        own = () if found and is_bound else (rule,)
        rules.append((*own, *(r for r in found.values() if r.name not in {o.name for o in own})))
    return tuple(rules)


def _weights(
    graph: OpGraph,
    there: Mapping[int, Mapping[str, AxisRule]],
    shards: Mapping[int, set[SpmdType]],
) -> dict[int, SpmdType]:
    """Parameters that are read as one shard and no otherwise."""
    found = {}
    for v, types in shards.items():
        is_parameter = v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
        if is_parameter and len(types) == 1 and all(k in there for k in graph.users[v]):
            (found[v],) = types
    return found


def _types(graph: OpGraph, k: int, rule: AxisRule) -> Iterator[tuple[int, SpmdType]]:
    """(value, type) of operands and results."""
    op = graph.ops[k]
    return zip((*op.operands, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)


def _near(graph: OpGraph, v: int) -> list[int]:
    """Ops that read or make a value."""
    return sorted({k for k in (*graph.users[v], graph.producers[v]) if k >= 0})


def _goes_along(graph: OpGraph, k: int, rule: AxisRule) -> bool:
    """Whether a rule shards all that depends on the batch, or, where nothing does, the result."""
    if not rule.splits_work:
        return False
    strongest = Dependence.PARAMETER if _is_of_parameters(graph, k) else Dependence.BATCH
    return all(
        t.is_shard for v, t in _types(graph, k, rule) if graph.values[v].depends is strongest
    )


def _is_of_parameters(graph: OpGraph, k: int) -> bool:
    """Whether the results depend on parameters and nothing stronger."""
    return all(graph.values[v].depends is Dependence.PARAMETER for v in graph.ops[k].outputs)
