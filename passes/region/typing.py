"""Turns a uniform strategy into one typing per region, by region searches under boundary policies.

What a region may choose on every axis of the mesh is passes/region/space.py; the region search
(passes/region/search.py) finds the rest, given the dp axis, on the others jointly. ZeRO-3 stores
every parameter as a shard on dp as well.

A tp axis is there to shard weights, so the search pays a price per byte of a parameter on a rank:
the smallest of PRICE_LADDER at which SHARDED_FRACTION_WANTED of the bytes that could be sharded
(parameters of two dims and more) are, or the one that shards most. Slow links would otherwise leave
weights unsharded wherever one more all-reduce costs more than the compute it saves.

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
from meshfold.passes.memory.zero import sharded_layout, unsharded_note, zero_axes
from meshfold.passes.price.op_time import OpTimers
from meshfold.passes.price.region import RegionPrice
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
from meshfold.passes.region.space import KeptSlots, SearchCache, SearchSpace

PRICE_LADDER = (0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
"""Seconds per byte of parameter on a rank. Chosen: decades around the time that a link takes for a
byte."""

SHARDED_FRACTION_WANTED = 0.95
"""Share of the shardable bytes at which the price is raised no further. Chosen, not
measured: small parameters whose shard costs a collective may stay unsharded."""

ROLES: Final[Mapping[TpMode, AxisRole]] = MappingProxyType(
    {"tensor": AxisRole.TENSOR, "sequence": AxisRole.SEQUENCE, "data": AxisRole.DATA}
)
"""What the tp axis is for in each mode."""


@dataclass(frozen=True)
class ProgramTyping:
    """A typing and its price per region, what fraction of the bytes of shardable parameters the tp
    axis shards (1 without a tp axis), and per region the ops that run unsharded for want of a
    rule."""

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


class MeshSearch:
    """Searches of one folded program on one mesh. Rules, tables and the dp axis are shared.

    cache: what other meshes of this program found, to use and to add to. pinned: parameters whose
    layout the user fixed; kept: those that are stored already.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        mesh: Mesh,
        batch_size: int,
        cache: SearchCache | None = None,
        pinned: PinnedSlots = MappingProxyType({}),
        kept: KeptSlots = MappingProxyType({}),
    ) -> None:
        self.folded = folded
        self.mesh = mesh
        self.batch_size = batch_size
        self.costs = CostModel(cluster, mesh)
        cache = cache or SearchCache.of(folded)
        self.space = SearchSpace(folded, self.costs, batch_size, cache, pinned, kept)
        self.counts = num_instances(folded)
        self.graphs: list[OpGraph] = self.space.graphs
        timers = OpTimers(self.costs, cache.works)
        self.tables = {
            role: SearchTables(self.costs, self.space.roles(role), timers, cache.plans)
            for role in ROLES.values()
        }
        self.fallback_ops = tuple(map(cache.rules.fallback_ops, range(len(self.graphs))))
        self._alone: dict[tuple[int, AxisRole], tuple[RegionProblem, _Chosen]] = {}
        self._found: dict[AxisRole, tuple[list[RegionSolution], float]] = {}
        self._like: dict[int, RegionProblem] = {}

    def solve(self, *, zero: int, mode: TpMode = "tensor") -> ProgramTyping:
        """Typing of every region under a ZeRO level and a mode of tp. Raises UnkeptPinError."""
        role = ROLES[mode]
        if role not in self._found:
            self._found[role] = self._search(role)
        solutions, fraction = self._found[role]
        if zero == 0:
            return ProgramTyping(
                tuple(s.typing for s in solutions),
                tuple(s.price for s in solutions),
                fraction,
                self.fallback_ops,
            )
        return self._shard_states(solutions, fraction, reshard=zero == 3)

    def solutions(self, mode: TpMode = "tensor") -> list[RegionSolution]:
        """The region solutions behind `solve`, after it ran."""
        return self._found[ROLES[mode]][0]

    def ops_s(self, region: int, mode: TpMode) -> float:
        """Seconds of the ops of one instance, typed by itself: the layout of a tied parameter may
        yet change. Less what a better typing could save, where the search was not exact. Raises
        UnkeptPinError."""
        solution = self._typed_alone(region, ROLES[mode])[1].solution
        return max(0.0, solution.price.ops_s - solution.slack_s)

    def slack_notes(self) -> list[str]:
        """The regions that an exact search could not type, a line each."""
        slacks: dict[int, float] = {}
        for solutions, _ in self._found.values():
            for r, solution in enumerate(solutions):
                if solution.slack_s:
                    share = solution.slack_s / solution.objective_s
                    slacks[r] = max(slacks.get(r, 0.0), share)
        names = [self.folded.regions[r].name.partition(",") for r in sorted(slacks)]
        return [
            f"{first}{' and what follows' if more else ''}: more values meet than an exact search "
            f"can join; with the best layouts it could be up to {100 * share:.2g} % faster"
            for (first, more, _), (_, share) in zip(names, sorted(slacks.items()), strict=True)
        ]

    def _search(self, role: AxisRole) -> tuple[list[RegionSolution], float]:
        if not self.space.keeps_pins(role):
            raise UnkeptPinError
        alone = [self._typed_alone(r, role) for r in range(len(self.graphs))]
        problems, chosen = [problem for problem, _ in alone], [found for _, found in alone]
        for group in self.folded.tied_slots:
            self._agree(group, problems, chosen)
        solutions = [c.solution for c in chosen]
        slots = [(r, s.typing.slots) for r, s in enumerate(solutions)]
        return solutions, self._fraction(slots, if_none=0.0)

    def problem(self, region: int, mode: TpMode, *, joint: bool = False) -> RegionProblem:
        """The search problem of one region. joint: leave the rules on the dp axis open, too: slower
        and under these boundaries and roles it finds the same."""
        return self._problem(region, ROLES[mode], joint=joint)

    def _problem(self, region: int, role: AxisRole, *, joint: bool = False) -> RegionProblem:
        space = self.space
        shared = role is not AxisRole.DATA and not joint
        problem = prepare_region(
            self.graphs[region],
            self.costs,
            self.tables[role],
            slot_layouts=space.slot_layouts(region, role),
            output_layouts=space.output_layouts(region, role),
            fixed_rules={} if joint else space.fixed_rules(region),
            rules=space.rules_of(region, role),
            like=self._like.get(region) if shared else None,
            apart=space.priced_apart(region),
        )
        if shared:
            self._like.setdefault(region, problem)
        return problem

    def _typed_alone(self, region: int, role: AxisRole) -> tuple[RegionProblem, _Chosen]:
        """The search problem of a region and what it chooses while no other has a say."""
        if (region, role) not in self._alone:
            problem = self._problem(region, role)
            self._alone[region, role] = problem, self._up_the_ladder(region, problem, role)
        return self._alone[region, role]

    def _up_the_ladder(self, region: int, problem: RegionProblem, role: AxisRole) -> _Chosen:
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
            if fraction >= SHARDED_FRACTION_WANTED:
                break
        assert best is not None
        optimum, _ = best
        return _Chosen(optimum.solution(), optimum.prices.used_s_per_byte)

    def _optima(self, problem: RegionProblem, role: AxisRole) -> Iterator[Optimum | None]:
        """The optimum at every price of the ladder; above the first they are found together while
        tables are small, which takes no longer than one."""
        prices = [Prices(used_s_per_byte=price) for price in PRICE_LADDER]
        (first,) = problem.optima(prices[:1])
        yield first
        if role is AxisRole.DATA:
            return
        if first is not None and first.is_small:
            yield from problem.optima(prices[1:])
            return
        for price in prices[1:]:
            yield from problem.optima([price])

    def _agree(
        self, group: Sequence[tuple[int, int]], problems: list[RegionProblem], chosen: list[_Chosen]
    ) -> None:
        """Give the parameter of `group` one stored layout; rewrites `problems` and `chosen`."""
        proposals = sorted({chosen[r].solution.typing.slots[i] for r, i in group})
        if len(proposals) == 1 and len(group) == len({r for r, _ in group}):
            for r, i in group:
                problems[r] = problems[r].with_stored({i: proposals[0]})
            return
        regions = sorted({r for r, _ in group})
        proposals.append(self.space.unsharded)
        best: tuple[float, int] | None = None
        for number, layout in enumerate(dict.fromkeys(proposals)):
            trial = self._with_layout(group, regions, layout, problems, chosen)
            if trial is None:
                continue
            total = sum(self.counts[r] * trial[r][1].solution.objective_s for r in regions)
            if best is None or total < best[0]:
                best, agreed = (total, number), trial
        assert best is not None, "Invariant is allowed everywhere"
        for r in regions:
            problems[r], chosen[r] = agreed[r]

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
            out[r] = (problem, _Chosen(solution, chosen[r].price))
        return out

    def _shard_states(
        self, solutions: Sequence[RegionSolution], fraction: float, *, reshard: bool
    ) -> ProgramTyping:
        """ZeRO: the same ops, every parameter stored as a shard on the axes of ZeRO as well.
        reshard: what is gathered is released after the forward."""
        axes = zero_axes(self.mesh)
        typings, prices, unsharded = [], [], set()
        for graph, solution in zip(self.graphs, solutions, strict=True):
            slots = list(solution.typing.slots)
            for i, slot in enumerate(graph.slots):
                if slot.kind is SlotKind.PARAMETER:
                    value = graph.values[i]
                    slots[i] = sharded_layout(value, slots[i], self.mesh)
                    if not any(slots[i][axis].is_shard for axis in axes):
                        unsharded.add(f"{slot.name} {list(value.shape)}")
            typing = replace(solution.typing, slots=tuple(slots), reshard_after_forward=reshard)
            typings.append(typing)
            prices.append(solution.pricer.price(typing.slots, reshard_after_forward=reshard))
        num_ranks = math.prod(self.mesh.sizes[axis] for axis in axes) // self.mesh.replicas
        notes = tuple(unsharded_note(name, num_ranks) for name in sorted(unsharded))
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
