"""Turns a uniform strategy into one typing per region, by region searches under boundary policies.

What a region may choose on every axis of the mesh is passes/search_space.py; the region search
(passes/region_search.py) finds the rest, given the dp axis, on the others jointly. ZeRO-3 stores
every parameter as a shard on dp as well.

A tp axis is there to shard weights, so the search pays a price per byte of a parameter on a rank:
the smallest of PRICE_LADDER at which WANTED_FRACTION of the bytes that could be sharded (parameters
of two dims and more) are, or the one that shards most. Slow links would otherwise leave weights
whole wherever one more all-reduce costs more than the compute it saves.

A parameter that several regions share has one stored layout: each region proposes its own, and the
proposal with the smallest sum of their objectives wins.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SlotKind
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping, TpMode
from meshfold.passes.graph.boundaries import num_instances
from meshfold.passes.price.op_time import OpTimers
from meshfold.passes.price.region import RegionPrice
from meshfold.passes.region.data_parallel import kept_whole_note, sharded_layout, zero_axes
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.pins import PinnedSlots, UnkeptPinError
from meshfold.passes.region.roles import AxisRole
from meshfold.passes.region.search import (
    Optimum,
    RegionProblem,
    RegionSolution,
    SearchTables,
    prepare_region,
)
from meshfold.passes.region.space import SearchSpace, Shared

PRICE_LADDER = (0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
"""Seconds per byte of parameter on a rank."""

WANTED_FRACTION = 0.95

TOGETHER = 20_000
"""Entries of the largest table up to which a region is solved at many prices at once."""

TP_ROLES = (AxisRole.TENSOR, AxisRole.SEQUENCE, AxisRole.DATA)


MODE_CHOICES: Final[Mapping[TpMode, Mapping[str, bool]]] = MappingProxyType(
    {
        "tensor": {},
        "sequence": {"sequence_parallel": True},
        "data": {"batch_on_tp": True},
    }
)
"""A mode as the choices that MeshSearch takes."""


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

    shared: what other meshes of this program found, to use and to add to. pinned: parameters whose
    layout the user fixed.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        mesh: Mesh,
        batch_size: int,
        shared: Shared | None = None,
        pinned: PinnedSlots = MappingProxyType({}),
    ) -> None:
        self.folded = folded
        self.mesh = mesh
        self.batch_size = batch_size
        self.costs = CostModel(cluster, mesh)
        shared = shared or Shared.of(folded)
        self.space = SearchSpace(folded, mesh, self.costs, batch_size, shared, pinned)
        self.counts = num_instances(folded)
        self.graphs: list[OpGraph] = self.space.graphs
        timers = OpTimers(mesh, self.costs, shared.works)
        self.tables = {
            role: SearchTables(mesh, self.costs, self.space.roles(role), timers, shared.plans)
            for role in TP_ROLES
        }
        self.fallback_ops = tuple(map(shared.rules.fallback_ops, range(len(self.graphs))))
        self._alone: dict[tuple[int, AxisRole], tuple[RegionProblem, _Chosen]] = {}
        self._found: dict[AxisRole, tuple[list[_Chosen], float]] = {}
        self._like: dict[int, RegionProblem] = {}

    def solve(
        self, *, zero: int, sequence_parallel: bool = False, batch_on_tp: bool = False
    ) -> ProgramTyping:
        """Typing of every region for these choices on this mesh. Raises UnkeptPinError."""
        role = tp_role(sequence_parallel=sequence_parallel, batch_on_tp=batch_on_tp)
        if role not in self._found:
            self._found[role] = self._search(role)
        chosen, fraction = self._found[role]
        if zero == 0:
            return ProgramTyping(
                tuple(c.solution.typing for c in chosen),
                tuple(c.solution.price for c in chosen),
                fraction,
                self.fallback_ops,
            )
        return self._shard_states([c.solution for c in chosen], fraction, keeps=zero < 3)

    def solutions(
        self, *, sequence_parallel: bool = False, batch_on_tp: bool = False
    ) -> list[RegionSolution]:
        """The region solutions behind `solve`, after it ran."""
        role = tp_role(sequence_parallel=sequence_parallel, batch_on_tp=batch_on_tp)
        return [c.solution for c in self._found[role][0]]

    def solution(
        self, region: int, *, sequence_parallel: bool = False, batch_on_tp: bool = False
    ) -> RegionSolution:
        """One of them."""
        role = tp_role(sequence_parallel=sequence_parallel, batch_on_tp=batch_on_tp)
        return self._found[role][0][region].solution

    def ops_s(
        self, region: int, *, sequence_parallel: bool = False, batch_on_tp: bool = False
    ) -> float:
        """Seconds of the ops of one instance, typed by itself: the layout of a tied parameter may
        yet change. Raises UnkeptPinError."""
        role = tp_role(sequence_parallel=sequence_parallel, batch_on_tp=batch_on_tp)
        return self._typed_alone(region, role)[1].solution.price.ops_s

    def _search(self, role: AxisRole) -> tuple[list[_Chosen], float]:
        if not self.space.keeps_pins(role):
            raise UnkeptPinError
        alone = [self._typed_alone(r, role) for r in range(len(self.graphs))]
        problems, chosen = [problem for problem, _ in alone], [found for _, found in alone]
        for group in self.folded.tied_slots:
            self._agree(group, problems, chosen)
        slots = [(r, c.solution.typing.slots) for r, c in enumerate(chosen)]
        return chosen, self._fraction(slots, if_none=0.0)

    def problem(
        self, region: int, *, sequence_parallel: bool, joint: bool = False
    ) -> RegionProblem:
        """The search problem of one region. joint: leave the rules on the dp axis open, too: slower
        and under these boundaries and roles it finds the same."""
        role = tp_role(sequence_parallel=sequence_parallel)
        return self._problem(region, role, joint=joint)

    def _problem(self, region: int, role: AxisRole, *, joint: bool = False) -> RegionProblem:
        space = self.space
        shared = role is not AxisRole.DATA and not joint
        problem = prepare_region(
            self.graphs[region],
            self.mesh,
            self.costs,
            self.tables[role],
            slot_layouts=space.slot_layouts(region, role),
            output_layouts=space.output_layouts(region, role),
            fixed_rules={} if joint else space.fixed_rules(region),
            rules=space.rules_of(region, role),
            like=self._like.get(region) if shared else None,
        )
        if shared:
            self._like.setdefault(region, problem)
        return problem

    def _typed_alone(self, region: int, role: AxisRole) -> tuple[RegionProblem, _Chosen]:
        """The search problem of a region and what it chooses while no other has a say."""
        if (region, role) not in self._alone:
            problem = self._problem(region, role)
            self._alone[region, role] = problem, self._climb(region, problem, role)
        return self._alone[region, role]

    def _climb(self, region: int, problem: RegionProblem, role: AxisRole) -> _Chosen:
        """Up the price ladder until enough is sharded; nothing is in the role DATA. Raises
        UnkeptPinError."""
        best: tuple[Optimum, float] | None = None
        for optimum in self._optima(problem, role):
            if optimum is None:
                assert self.space.pinned, "running everything Invariant is always possible"
                raise UnkeptPinError
            fraction = self._fraction([(region, optimum.slots)])
            if best is None or fraction > best[1]:
                best = optimum, fraction
            if fraction >= WANTED_FRACTION:
                break
        assert best is not None
        optimum, fraction = best
        return _Chosen(optimum.solution(), optimum.prices.used_s_per_byte, fraction)

    def _optima(self, problem: RegionProblem, role: AxisRole) -> Iterator[Optimum | None]:
        """The optimum at every price of the ladder; above the first they are found together while
        tables are small, which takes no longer than one."""
        prices = [Prices(used_s_per_byte=price) for price in PRICE_LADDER]
        (first,) = problem.optima(prices[:1])
        yield first
        if role is AxisRole.DATA:
            return
        if first is not None and first.found.largest_table <= TOGETHER:
            yield from problem.optima(prices[1:])
            return
        for price in prices[1:]:
            yield from problem.optima([price])

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
        proposals.append(self.space.whole)
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
            fraction = self._fraction([(r, solution.typing.slots)])
            out[r] = (problem, _Chosen(solution, chosen[r].price, fraction))
        return out

    def _shard_states(
        self, solutions: Sequence[RegionSolution], fraction: float, *, keeps: bool
    ) -> ProgramTyping:
        """ZeRO: the same ops, every parameter stored as a shard on the axes of ZeRO as well. keeps:
        what is gathered stays for the backward."""
        axes = zero_axes(self.mesh)
        typings, prices, whole = [], [], set()
        for graph, solution in zip(self.graphs, solutions, strict=True):
            slots = list(solution.typing.slots)
            for i, slot in enumerate(graph.slots):
                if slot.kind is SlotKind.PARAMETER:
                    value = graph.values[i]
                    slots[i] = sharded_layout(value, slots[i], self.mesh)
                    if not any(slots[i][axis].is_shard for axis in axes):
                        whole.add(f"{slot.name} {list(value.shape)}")
            typing = replace(solution.typing, slots=tuple(slots), keeps_gathered=keeps)
            typings.append(typing)
            prices.append(solution.pricer.price(typing.slots, keeps_gathered=keeps))
        num_ranks = math.prod(self.mesh.sizes[axis] for axis in axes)
        notes = tuple(kept_whole_note(name, num_ranks) for name in sorted(whole))
        return ProgramTyping(tuple(typings), tuple(prices), fraction, self.fallback_ops, notes)

    def _fraction(
        self, slots: Sequence[tuple[int, Sequence[Layout]]], if_none: float = 1.0
    ) -> float:
        """Sharded bytes on tp over shardable bytes, parameters of two dims and more; `if_none`
        where nothing can be sharded."""
        axis = self.space.tp_axis
        if axis is None:
            return 1.0
        sharded = shardable = 0
        for r, layouts in slots:
            graph = self.graphs[r]
            for i, options in self.space.stored[r].items():
                value = graph.values[i]
                if len(value.shape) < 2 or len(options) == 1:
                    continue
                shardable += self.counts[r] * value.num_bytes
                if layouts[i][axis].is_shard:
                    sharded += self.counts[r] * value.num_bytes
        return sharded / shardable if shardable else if_none
