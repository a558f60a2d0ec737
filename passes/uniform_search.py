"""Turns a uniform strategy into one typing per region, by region searches under boundary policies.

dp axis   The batch is followed through the rules (passes/data_parallel.py): that decides rule and
          boundary layout of everything on this axis. ZeRO-3 stores every parameter as a shard.
tp axis   Boundary values are Invariant or, with sequence parallelism, shards of their sequence dim.
          Parameters are stored Invariant or as the shard their op reads, never gathered. The region
          search finds the rest, given the dp axis, in the role TENSOR or SEQUENCE
          (passes/axis_roles.py). In the role DATA the axis goes on with what dp does inside each of
          its shards, so that a region is data-parallel over both, with whole parameters: for
          regions that are cheap to replicate beside others that are not (Whale, Jia et al., 2022).

A tp axis is there to shard weights, so the search pays a price per byte of a parameter on a rank:
the smallest of PRICE_LADDER at which WANTED_FRACTION of the bytes that could be sharded (parameters
of two dims and more) are, or the one that shards most. Slow links would otherwise leave weights
whole wherever one more all-reduce costs more than the compute it saves.

A parameter that several regions share has one stored layout: each region proposes its own, and the
proposal with the smallest sum of their objectives wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.cluster import ClusterSpec
from meshfold.cost_models.cost_model import CostModel
from meshfold.mesh import Mesh
from meshfold.opgraph import FoldedGraph, OpGraph, SlotKind
from meshfold.passes.axis_roles import AxisRole
from meshfold.passes.boundaries import (
    Boundaries,
    find_boundaries,
    num_instances,
    sequence_type,
    tied_parameter_slots,
)
from meshfold.passes.data_parallel import (
    DataParallel,
    Followed,
    batch_problem,
    follow_batch,
    stored_options,
    zero3_layout,
)
from meshfold.passes.parameter_prices import Prices
from meshfold.passes.region_price import RegionPrice
from meshfold.passes.region_search import (
    RegionProblem,
    RegionSolution,
    SearchTables,
    prepare_region,
)
from meshfold.passes.rule_domains import RuleTable, is_constant_op
from meshfold.passes.rules import AxisRule, op_labels, region_rules, rule_inside
from meshfold.spmd import INVARIANT, Layout, Shard, SpmdType, is_legal
from meshfold.strategy import RegionTyping

PRICE_LADDER = (0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
"""Seconds per byte of parameter on a rank."""

WANTED_FRACTION = 0.95

TP_ROLES = (AxisRole.TENSOR, AxisRole.SEQUENCE, AxisRole.DATA)


def tp_role(*, sequence_parallel: bool = False, batch_on_tp: bool = False) -> AxisRole:
    """What the tp axis is for under these choices of a strategy."""
    if batch_on_tp:
        return AxisRole.DATA
    return AxisRole.SEQUENCE if sequence_parallel else AxisRole.TENSOR


@dataclass(frozen=True)
class ProgramTyping:
    """A typing and its price per region, what fraction of the bytes of shardable parameters the tp
    axis shards (1 without a tp axis), and per region the ops that run whole for want of a rule."""

    typings: tuple[RegionTyping, ...]
    prices: tuple[RegionPrice, ...]
    sharded_fraction: float
    fallback_ops: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Chosen:
    """A region's solution and the ladder price it was found at."""

    solution: RegionSolution
    price: float
    fraction: float


class MeshSearch:
    """Searches of one folded program on one mesh. Rules, tables and the dp axis are shared.

    followed: what other meshes found on the dp axis, to use and to add to.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        mesh: Mesh,
        batch_size: int,
        followed: Followed | None = None,
    ) -> None:
        self.folded = folded
        self.mesh = mesh
        self.batch_size = batch_size
        self.costs = CostModel(cluster, mesh)
        self.followed = {} if followed is None else followed
        self.boundaries: Boundaries = find_boundaries(folded)
        self.counts = num_instances(folded)
        self.graphs: list[OpGraph] = [region.graph for region in folded.regions]
        self.rules: list[RuleTable] = [region_rules(g, mesh.sizes) for g in self.graphs]
        self.dp_axis = mesh.index("dp") if "dp" in mesh.names else None
        self.tp_axis = mesh.index("tp") if "tp" in mesh.names else None
        self.data: DataParallel | None = None
        if self.dp_axis is not None:
            assert self.dp_axis == 0, "dp is the outermost axis"
            self.data = self._followed(mesh.sizes[0])
        self.tables = {role: SearchTables(mesh, self.costs, self._roles(role)) for role in TP_ROLES}
        self.stored = [
            {
                i: self._stored(r, i)
                for i, slot in enumerate(g.slots)
                if slot.kind is SlotKind.PARAMETER
            }
            for r, g in enumerate(self.graphs)
        ]
        self.fallback_ops = tuple(map(_fallback_ops, self.graphs))
        self._found: dict[AxisRole, tuple[list[_Chosen], float]] = {}
        self._like: dict[int, RegionProblem] = {}

    def solve(
        self, *, zero: int, sequence_parallel: bool = False, batch_on_tp: bool = False
    ) -> ProgramTyping:
        """Typing of every region for these choices on this mesh."""
        role = tp_role(sequence_parallel=sequence_parallel, batch_on_tp=batch_on_tp)
        if role not in self._found:
            self._found[role] = self._search(role)
        chosen, fraction = self._found[role]
        if zero != 3:
            return ProgramTyping(
                tuple(c.solution.typing for c in chosen),
                tuple(c.solution.price for c in chosen),
                fraction,
                self.fallback_ops,
            )
        return self._shard_states([c.solution for c in chosen], fraction)

    def solutions(
        self, *, sequence_parallel: bool = False, batch_on_tp: bool = False
    ) -> list[RegionSolution]:
        """The region solutions behind `solve`, after it ran."""
        role = tp_role(sequence_parallel=sequence_parallel, batch_on_tp=batch_on_tp)
        return [c.solution for c in self._found[role][0]]

    def _search(self, role: AxisRole) -> tuple[list[_Chosen], float]:
        problems = [self._problem(r, role) for r in range(len(self.graphs))]
        chosen = [self._climb(r, problem, role) for r, problem in enumerate(problems)]
        for group in tied_parameter_slots(self.folded):
            self._agree(group, problems, chosen)
        typings = [(r, c.solution.typing) for r, c in enumerate(chosen)]
        return chosen, self._fraction(typings, if_none=0.0)

    def problem(
        self, region: int, *, sequence_parallel: bool, joint: bool = False
    ) -> RegionProblem:
        """The search problem of one region. joint: leave the rules on the dp axis open, too: slower
        and under these boundaries and roles it finds the same."""
        role = tp_role(sequence_parallel=sequence_parallel)
        return self._problem(region, role, joint=joint)

    def _problem(self, region: int, role: AxisRole, *, joint: bool = False) -> RegionProblem:
        graph, boundaries = self.graphs[region], self.boundaries
        classes = boundaries.slots[region]
        slots: list[list[Layout]] = []
        for i, slot in enumerate(graph.slots):
            if slot.kind is not SlotKind.PARAMETER:
                slots.append([self._boundary(classes[i], role)])
            elif role is AxisRole.DATA:
                slots.append([self._layout(INVARIANT, INVARIANT)])
            else:
                slots.append(self.stored[region][i])
        fixed = {}
        if self.data is not None and self.dp_axis is not None and not joint:
            fixed[self.dp_axis] = self.data.rules(region)
        shared = role is not AxisRole.DATA and not joint
        problem = prepare_region(
            graph,
            self.mesh,
            self.costs,
            self.tables[role],
            slot_layouts=slots,
            output_layouts=[[self._boundary(c, role)] for c in boundaries.outputs[region]],
            fixed_rules=fixed,
            rules=self._rules_of_data(region) if role is AxisRole.DATA else self.rules[region],
            like=self._like.get(region) if shared else None,
        )
        if shared:
            self._like.setdefault(region, problem)
        return problem

    @cached_property
    def _batch_on_tp(self) -> DataParallel:
        """The batch followed on the tp axis of a mesh without dp."""
        assert self.data is None and self.tp_axis is not None
        return self._followed(self.mesh.sizes[self.tp_axis])

    def _followed(self, axis_size: int) -> DataParallel:
        alone = [tuple(per_axis[:1] for per_axis in table) for table in self.rules]
        boundaries, batch_size = self.boundaries, self.batch_size
        key = batch_problem(boundaries, axis_size, alone, batch_size)
        if key not in self.followed:
            self.followed[key] = follow_batch(
                self.folded, boundaries, axis_size, alone, self.costs, batch_size
            )
        return self.followed[key]

    def _rules_of_data(self, region: int) -> RuleTable:
        """On tp every op goes on with its rule on dp, or runs whole."""
        data = self.data or self._batch_on_tp
        sizes = self.mesh.sizes
        table = []
        for k, (name, rules) in enumerate(zip(data.rules(region), self.rules[region], strict=True)):
            (chosen,) = (rule for rule in rules[0] if rule.name == name)
            inside: AxisRule | None = chosen
            if len(sizes) > 1:
                inside = rule_inside(self.graphs[region], k, chosen, *sizes)
            whole = rules[-1][0]
            on_tp = (whole, inside) if inside and inside.name != whole.name else (whole,)
            table.append((*rules[:-1], on_tp))
        return tuple(table)

    def _layout(self, dp: SpmdType, tp: SpmdType) -> Layout:
        of_axis = {self.dp_axis: dp, self.tp_axis: tp}
        return tuple(of_axis[k] for k in range(len(self.mesh.axes)))

    def _boundary(self, boundary_class: int | None, role: AxisRole) -> Layout:
        if boundary_class is None:
            return self._layout(INVARIANT, INVARIANT)
        dp = INVARIANT if self.data is None else self.data.types[boundary_class]
        b = self.boundaries
        carried = boundary_class not in b.inputs | b.results
        tp = INVARIANT
        value = b.values[boundary_class]
        if role is AxisRole.SEQUENCE and carried and self.tp_axis is not None:
            tp = sequence_type(value, dp, self.mesh.sizes[self.tp_axis])
        elif role is AxisRole.DATA and self.data is None:
            tp = self._batch_on_tp.types[boundary_class]
        elif role is AxisRole.DATA and dp.is_shard:
            tp = Shard(dp.dim, dp.blocks * self.mesh.sizes[0])
        if not is_legal(value.shape, self._layout(dp, tp), self.mesh.sizes):
            tp = INVARIANT
        return self._layout(dp, tp)

    def _roles(self, role: AxisRole) -> tuple[AxisRole, ...]:
        of_axis = {"dp": AxisRole.DATA, "tp": role}
        return tuple(of_axis[name] for name in self.mesh.names)

    def _stored(self, region: int, slot: int) -> list[Layout]:
        if self.tp_axis is None:
            return [self._layout(INVARIANT, INVARIANT)]
        options = stored_options(self.graphs[region], slot, self.rules[region], self.tp_axis)
        return [self._layout(INVARIANT, t) for t in options]

    def _climb(self, region: int, problem: RegionProblem, role: AxisRole) -> _Chosen:
        """Up the price ladder until enough is sharded; nothing is in the role DATA."""
        best: _Chosen | None = None
        for price in PRICE_LADDER if role is not AxisRole.DATA else PRICE_LADDER[:1]:
            solution = problem.solve(Prices(used_s_per_byte=price))
            assert solution is not None, "running everything Invariant is always possible"
            fraction = self._fraction([(region, solution.typing)])
            if best is None or fraction > best.fraction:
                best = _Chosen(solution, price, fraction)
            if fraction >= WANTED_FRACTION:
                break
        assert best is not None
        return best

    def _agree(
        self,
        group: Sequence[tuple[int, int]],
        problems: list[RegionProblem],
        chosen: list[_Chosen],
    ) -> None:
        """Give the parameter of `group` one stored layout; rewrites `problems` and `chosen`."""
        proposals = sorted({chosen[r].solution.typing.slots[i] for r, i in group})
        if len(proposals) == 1 and len(group) == len({r for r, _ in group}):
            for r, i in group:
                problems[r] = problems[r].with_stored({i: proposals[0]})
            return
        regions = sorted({r for r, _ in group})
        proposals.append(self._layout(INVARIANT, INVARIANT))
        best: tuple[float, int] | None = None
        for number, layout in enumerate(dict.fromkeys(proposals)):
            trial = self._with_layout(group, regions, layout, problems, chosen)
            if trial is None:
                continue
            total = sum(self.counts[r] * trial[r][1].solution.objective_s for r in regions)
            if best is None or total < best[0]:
                best, kept = (total, number), trial
        assert best is not None, "Invariant is allowed everywhere"
        for r in regions:
            problems[r], chosen[r] = kept[r]

    def _with_layout(
        self,
        group: Sequence[tuple[int, int]],
        regions: Sequence[int],
        layout: Layout,
        problems: Sequence[RegionProblem],
        chosen: Sequence[_Chosen],
    ) -> dict[int, tuple[RegionProblem, _Chosen]] | None:
        """The regions of a group solved with this stored layout, at the prices chosen before."""
        out = {}
        for r in regions:
            problem = problems[r].with_stored({i: layout for q, i in group if q == r})
            solution = problem.solve(Prices(used_s_per_byte=chosen[r].price))
            if solution is None:
                return None
            fraction = self._fraction([(r, solution.typing)])
            out[r] = (problem, _Chosen(solution, chosen[r].price, fraction))
        return out

    def _shard_states(self, solutions: Sequence[RegionSolution], fraction: float) -> ProgramTyping:
        """ZeRO-3: the same ops, every parameter stored as a shard on dp as well."""
        assert self.dp_axis is not None, "ZeRO-3 needs a dp axis"
        typings, prices, whole = [], [], set()
        for graph, solution in zip(self.graphs, solutions, strict=True):
            slots = list(solution.typing.slots)
            for i, slot in enumerate(graph.slots):
                if slot.kind is SlotKind.PARAMETER:
                    value = graph.values[i]
                    slots[i] = zero3_layout(value, slots[i], self.mesh.sizes, self.dp_axis)
                    if not slots[i][self.dp_axis].is_shard:
                        whole.add(f"{slot.name} {list(value.shape)}")
            typing = replace(solution.typing, slots=tuple(slots))
            typings.append(typing)
            prices.append(solution.pricer.price(typing.slots))
        dp = self.mesh.sizes[self.dp_axis]
        notes = [f"ZeRO-3 keeps {name} whole: no dim divides over {dp} ranks" for name in whole]
        return ProgramTyping(
            tuple(typings), tuple(prices), fraction, self.fallback_ops, tuple(sorted(notes))
        )

    def _fraction(self, typings: Sequence[tuple[int, RegionTyping]], if_none: float = 1.0) -> float:
        """Sharded bytes on tp over shardable bytes, parameters of two dims and more; `if_none`
        where nothing can be sharded."""
        if self.tp_axis is None:
            return 1.0
        sharded = shardable = 0
        for r, typing in typings:
            graph = self.graphs[r]
            for i, options in self.stored[r].items():
                value = graph.values[i]
                if len(value.shape) < 2 or len(options) == 1:
                    continue
                shardable += self.counts[r] * value.num_bytes
                if typing.slots[i][self.tp_axis].is_shard:
                    sharded += self.counts[r] * value.num_bytes
        return sharded / shardable if shardable else if_none


def _fallback_ops(graph: OpGraph) -> tuple[str, ...]:
    """Names of the ops that have no rule but running whole, each once."""
    names = {
        op.target
        for k, op in enumerate(graph.ops)
        if op_labels(graph, op) is None and not is_constant_op(graph, k)
    }
    return tuple(sorted(names))
