"""What every region does on the data parallel axis: the batch is followed through the rules.

Inputs start as shards of their batch dim. Regions are met in the order of their first instance,
when the layouts of all their slots are known; each is solved on this axis alone, in the role DATA
(passes/region/search.py, passes/region/roles.py). The optimum then keeps the batch sharded as far
as any rule carries it. The first producer of a value decides the layout of its class.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Dependence, FoldedGraph, OpGraph, SlotKind
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Layout, SpmdType
from meshfold.passes.graph.boundaries import Boundaries, batch_type
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.price.op_time import OpTimers, OpWorks
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.roles import AxisRole
from meshfold.passes.region.search import RegionSolution, SearchTables, prepare_region
from meshfold.passes.rules.joint import RuleTable, is_constant_op
from meshfold.passes.rules.table import AxisRule


@dataclass(frozen=True)
class DataParallel:
    """types[c]: type of boundary class c on the axis; solutions[r]: one-axis solution of region r
    with parameters stored unsharded."""

    types: tuple[SpmdType, ...]
    solutions: tuple[RegionSolution, ...]

    def rules(self, region: int) -> tuple[str, ...]:
        """Name of the axis rule of every op of a region."""
        return tuple(op.rules[0] for op in self.solutions[region].typing.ops)


SUMS: list[Layout] = [(INVARIANT,), (PARTIAL,)]
"""Layouts of what may leave as a pending sum."""

Followed = dict[Hashable, DataParallel]
"""What was found, by batch_problem."""


def batch_problem(
    boundaries: Boundaries, axis_size: int, rules: Sequence[RuleTable], batch_size: int
) -> Hashable:
    """What follow_batch depends on: equal for two axis sizes over which the same inputs are sharded
    and every op has the same rules. In the role DATA the batch stays sharded as far as rules carry
    it, whatever that costs, so the solution of one size serves the other.

    What is computed from parameters alone is not sharded with the batch: prices decide whether
    ranks share its computation. Where that crosses between regions without a gradient, the batch
    is followed for each size; inside a region (a position embedding) the first size's choice stands
    for all.
    """
    inputs = tuple(
        batch_type(boundaries.values[c], batch_size, axis_size) for c in sorted(boundaries.inputs)
    )
    types = tuple(
        tuple((rule.name, rule.inputs, rule.outputs) for rule in per_axis[0])
        for table in rules
        for per_axis in table
    )
    is_priced = any(
        value.depends is Dependence.PARAMETER and not value.requires_grad
        for value in boundaries.values
    )
    return inputs, types, axis_size if is_priced else 0


def follow_batch(
    folded: FoldedGraph,
    boundaries: Boundaries,
    rules: Sequence[RuleTable],
    costs: CostModel,
    batch_size: int,
    works: OpWorks | None = None,
    whole: frozenset[int] = frozenset(),
    *,
    sums: bool = False,
    pending: bool = False,
) -> DataParallel:
    """Solve every region on the data parallel axis, axis 0 of the mesh of `costs`.

    rules[r]: rule table of region r on that axis alone. works: if at hand. whole: boundary classes
    that leave their regions unsharded. sums: whether results, and numbers between regions, may
    leave as pending sums. pending: what is made of parameters alone leaves so that its gradient is
    a pending sum. Outputs besides the loss are gathered, and have no say."""
    costs = replace(costs, mesh=Mesh(costs.mesh.axes[:1]), within=costs.mesh)
    (axis_size,) = costs.mesh.sizes
    tables = SearchTables(costs, (AxisRole.DATA,), OpTimers(costs, works))
    full = boundaries.results - boundaries.apart
    types = dict.fromkeys(whole if sums else full | whole, INVARIANT)
    for c in sorted(boundaries.inputs - boundaries.results):
        types[c] = batch_type(boundaries.values[c], batch_size, axis_size)
    solutions: dict[int, RegionSolution] = {}
    for r in dict.fromkeys(instance.region for instance in folded.instances):
        graph = folded.regions[r].graph
        slots = [[(INVARIANT if c is None else types[c],)] for c in boundaries.slots[r]]
        batches = [batch_type(graph.values[v], batch_size, axis_size) for v in graph.outputs]
        outputs: list[Sequence[Layout]] = [
            [(types[c],)]
            if c in types
            else SUMS
            if sums and (c in full or not graph.values[v].shape)
            else _leaving(graph, v, rules[r], batch, pending)
            for c, v, batch in zip(boundaries.outputs[r], graph.outputs, batches, strict=True)
        ]
        solution = _solve(graph, costs, tables, slots, outputs, rules[r])
        if _moves_batch(graph, solution):
            kept = _solve(graph, costs, tables, slots, _as_batch(outputs, batches), rules[r])
            solution = solution if _moves_batch(graph, kept) else kept
        solutions[r] = solution
        for c, layout in zip(boundaries.outputs[r], solution.typing.outputs, strict=True):
            is_gathered = c in boundaries.apart - boundaries.free
            types.setdefault(c, INVARIANT if is_gathered else layout[0])
    return DataParallel(
        tuple(types[c] for c in range(len(boundaries.values))),
        tuple(solutions[r] for r in range(len(folded.regions))),
    )


def _solve(
    graph: OpGraph,
    costs: CostModel,
    tables: SearchTables,
    slots: Sequence[Sequence[Layout]],
    outputs: Sequence[Sequence[Layout]],
    rules: RuleTable,
) -> RegionSolution:
    def solved(table: RuleTable) -> RegionSolution | None:
        problem = prepare_region(
            graph, costs, tables, slot_layouts=slots, output_layouts=outputs, rules=table
        )
        return problem.solve(Prices())

    solution = solved(rules)
    assert solution is not None, "running everything Invariant is always possible"
    if solution.slack_s > 0:
        carried = solved(_carrying(graph, slots, rules))
        if carried is not None and carried.objective_s < solution.objective_s:
            least_s = solution.objective_s - solution.slack_s
            solution = replace(carried, slack_s=max(0.0, carried.objective_s - least_s))
    return solution


def _carrying(graph: OpGraph, slots: Sequence[Sequence[Layout]], rules: RuleTable) -> RuleTable:
    """Of `rules` those that take what arrives as it is, shards and all, op by op; all of an op that
    has none, and of those behind it. For regions that are too large to be solved exactly."""
    types: list[SpmdType | None] = [
        layouts[0][0] if len(layouts) == 1 and slot.kind is not SlotKind.PARAMETER else INVARIANT
        for layouts, slot in zip(slots, graph.slots, strict=True)
    ]
    types += [None] * (len(graph.values) - len(types))
    table: list[tuple[tuple[AxisRule, ...], ...]] = []
    for k, (op, (every, *others)) in enumerate(zip(graph.ops, rules, strict=True)):
        arrived = [types[v] for v in op.operands]
        constant = is_constant_op(graph, k)
        taken = [r for r in every if (r.name == "I" if constant else _takes(r, arrived))]
        best = max(taken, key=lambda rule: (rule.splits_work, not rule.comm), default=None)
        for position, v in enumerate(op.outputs):
            types[v] = best.outputs[position] if best else None
        table.append(((best,) if best else every, *others))
    return tuple(table)


def _takes(rule: AxisRule, arrived: Sequence[SpmdType | None]) -> bool:
    return all(
        t is not None and (t == wanted if t.is_shard else not wanted.is_shard)
        for t, wanted in zip(arrived, rule.inputs, strict=True)
    )


def _moves_batch(graph: OpGraph, solution: RegionSolution) -> bool:
    """Whether the batch goes from one dim to another. For a region by itself it may pay, where
    ranks share the work on positions so (a table of them, added to every sample); the regions
    behind it would have to bring it back, attention for one, every time."""
    layouts = zip(graph.values, layouts_of_values(graph, solution.typing), strict=False)
    return any(
        value.depends is Dependence.BATCH
        and native[0].is_shard
        and any(demand[0].is_shard and demand != native for demand in demands)
        for value, (native, demands) in layouts
    )


def _as_batch(
    outputs: Sequence[Sequence[Layout]], batches: Sequence[SpmdType]
) -> list[Sequence[Layout]]:
    """Of the layouts in which outputs may leave those that shard nothing but the batch."""
    return [
        [x for x in layouts if not x[0].is_shard or x == (batch,)]
        if (batch,) in layouts
        else layouts
        for layouts, batch in zip(outputs, batches, strict=True)
    ]


def _is_of_parameters(graph: OpGraph, v: int) -> bool:
    """Whether an output is computed, from parameters alone, and trained: a table that all layers
    read (T5's position bias). Shards of it would be gathered by every reader."""
    value = graph.values[v]
    is_computed = graph.producers[v] >= 0
    return is_computed and value.requires_grad and value.depends is Dependence.PARAMETER


def _leaving(
    graph: OpGraph, v: int, rules: RuleTable, batch: SpmdType, pending: bool
) -> list[Layout]:
    """Layouts in which an output may leave: Invariant, or a shard that its producer can compute.
    A constant as large as the batch leaves sharded as the batch is. batch: its type if it does;
    pending: as for follow_batch."""
    if pending and _is_of_parameters(graph, v):
        return [(REPLICATE,)]
    k = graph.producers[v]
    if k < 0:
        return [(INVARIANT,)]
    position = graph.ops[k].outputs.index(v)
    shards = {rule.outputs[position] for rule in rules[k][0] if rule.outputs[position].is_shard}
    if is_constant_op(graph, k) and batch in shards:
        return [(batch,)]
    return [(INVARIANT,), *((t,) for t in sorted(shards))]


def stored_options(graph: OpGraph, slot: int, rules: RuleTable, axis: int) -> list[SpmdType]:
    """Types in which a parameter may be stored on an axis where it is never gathered: Invariant,
    or a shard that a rule of one of its users reads as it is."""
    assert graph.slots[slot].kind is SlotKind.PARAMETER
    shards = {
        rule.inputs[position]
        for k in graph.users[slot]
        for rule in rules[k][axis]
        for position, v in enumerate(graph.ops[k].operands)
        if v == slot and rule.inputs[position].is_shard
    }
    return [INVARIANT, *sorted(shards)]
