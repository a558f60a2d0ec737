"""The best mesh of a plan in one pass, and its program.

Meshes go in order of their bound, which rises while their regions are typed one by one
(one_pass/candidate_mesh.py, region/typing.py); the best program on each mixes strategies by layer
(one_pass/search.py), until the next bound reaches the best program found. The best by the sum are
simulated, and meshes whose bound is below what they simulate to (one_pass/shortlist.py).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.op_costs.optimizers import least_share
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.mesh import Mesh
from meshfold.ir.plan import SearchStats
from meshfold.ir.strategy import BESIDE_SELECTIVE, Degrees, UniformStrategy
from meshfold.passes.graph.reads import program_reads
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.one_pass.best_first import BoundQueue, best_first
from meshfold.passes.one_pass.bounds import LeastCompute, Room, least_compute, least_step_s
from meshfold.passes.one_pass.candidate_mesh import CandidateMesh
from meshfold.passes.one_pass.no_fit import NoMeshFits
from meshfold.passes.one_pass.priced import MeshPlan, order_of
from meshfold.passes.one_pass.record import MeshRecord, search_stats, stats_of
from meshfold.passes.one_pass.rivals import EMITTED_GAIN, MOST_RIVALS, rivals
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.shortlist import (
    MOST_BEYOND,
    Shortlisted,
    by_simulation,
    rank_shortlist,
    simulated,
    simulated_step_s,
    simulated_times,
)
from meshfold.passes.one_pass.tree import NODE, Tree, grow_tree
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.find_pipeline import search_spec, too_many_ranks
from meshfold.passes.region.pins import pinned_slots
from meshfold.passes.region.typing import MeshSearch

Progress = Callable[[int, int, str], None]
"""Called with (meshes done, meshes in all, the mesh at hand)."""

UNSHARDED = "tp shards no weights"
LAYOUT_PIN = "pinned layout cannot be kept"
BOUND = "bound of the mesh above the best plan"


@dataclass(frozen=True)
class Found:
    """The winner, and everybody whose candidates were priced. rivals: other programs that may win
    where they are emitted, each with the statistics of its plan."""

    best: Shortlisted
    planners: tuple[MeshPlanner, ...]
    stats: SearchStats
    notes: tuple[str, ...]
    rivals: tuple[tuple[Shortlisted, SearchStats], ...] = ()


def planner_of(strategy: UniformStrategy, found: Found, search: "MeshRace") -> MeshPlanner:
    """Who has priced the candidates of `strategy`, or a planner for it alone. Baselines keep no
    pinned layouts."""
    for planner in found.planners:
        if strategy in planner.strategies and planner.search.space.pinned == search.pinned:
            return planner
    return search.mesh_planner(strategy.degrees, [strategy])


CLOSE = 1.03
"""Programs that take less than this times the best one, as simulated, may change places with it.
Chosen, not measured."""


class MeshRace:
    """One search; region typings are shared by everything that asks for the same mesh."""

    def __init__(self, request: PlanRequest, progress: Progress | None) -> None:
        self.request, self.progress = request, progress
        folded = self.folded = request.folded
        self.cluster, self.options = request.cluster, request.options
        self.pinned = pinned_slots(folded, self.options.layout_pins)
        self._typed = request.shared.meshes(folded, self.options)
        self._searches: dict[Degrees, MeshSearch] = {}  # of this search alone: bounds come of them
        self._reads = program_reads(folded)

    def best(self) -> Found:
        """The fastest plan that fits; without the rule NODE when nothing fits."""
        found = self._over(self._tree(self.options.without_rules))
        if isinstance(found, Found):
            return found
        if NODE in self.options.without_rules:
            raise self._error(found)
        wider = self._tree((*self.options.without_rules, NODE))
        is_wider = len(wider.strategies) > len(self._tree(()).strategies)
        over_nodes = self._over(wider) if is_wider else found
        if isinstance(over_nodes, Found):
            note = f"{found.words} while tp stays inside a node: this plan's tp leaves it"
            return replace(over_nodes, notes=(note,))
        raise self._error(found.and_in(over_nodes))

    def _error(self, found: NoMeshFits) -> InfeasibleError:
        return found.error(self.cluster.num_devices, explains=self.request.explains)

    def mesh_planner(self, degrees: Degrees, strategies: Sequence[UniformStrategy]) -> MeshPlanner:
        """A planner for these strategies of one mesh."""
        search = self._search(degrees)
        probe = self.request.probe
        return MeshPlanner(
            self.folded,
            self.cluster,
            search,
            strategies,
            self.options,
            probe,
            self._reads,
            self._typed.memory_models.setdefault(search, MemoryModel(search.costs, probe)),
        )

    def _search(self, degrees: Degrees) -> MeshSearch:
        """The typings of a mesh, which are the same whatever part of dp ZeRO shards over."""
        degrees = degrees._replace(dp_shard=0)
        if degrees not in self._searches:
            typed = self._typed
            if degrees not in typed.searches:
                mesh = self._mesh(degrees)
                of_mesh = self.cluster, mesh, self.request.batch_size, typed.cache, self.pinned
                typed.searches[degrees] = MeshSearch(self.folded, *of_mesh)
            self._searches[degrees] = typed.searches[degrees]
        return self._searches[degrees]

    def _mesh(self, degrees: Degrees) -> Mesh:
        return build_mesh(self.cluster, **degrees.of_mesh)

    def _tree(self, without: Sequence[str]) -> Tree:
        return grow_tree(search_spec(self.request, without))

    def _over(self, tree: Tree) -> "Found | NoMeshFits":
        """The best of a tree, or per mesh the program with the least memory."""
        by_mesh: dict[Degrees, list[UniformStrategy]] = {}
        # In an order of our own, so that the order of the strategies decides nothing.
        for strategy in sorted(
            tree.strategies, key=lambda s: (-s.dp, s.ep, s.cp, s.dp_shard, s.label)
        ):
            by_mesh.setdefault(strategy.degrees, []).append(strategy)
        state = MeshRecord(Counter(tree.pruned))
        for is_second in (False, True):
            wave = {
                d: strategies for d, strategies in by_mesh.items() if (d.ep * d.cp > 1) == is_second
            }
            self._best_first(wave, state, len(by_mesh))
        if not state.typed:
            raise self._no_mesh(by_mesh, state.pruned)
        if state.best is None:
            plans = state.plans.values()
            return NoMeshFits(
                tuple(m.planner for m in state.typed if m.planner is not None),
                all(math.isinf(p.lower_bound_s) for p in plans),
            )
        ranked = self._with_plainer(self._beyond_sums(state))
        state.best = ranked[0].priced, ranked[0].planner
        others = []
        if self.request.wants_rivals:
            self._plan_rivals(state, ranked[0])
            others = rivals(state, ranked, self.cluster.overlap_slowdown)
        state.simulated_s = simulated_times([*ranked, *others])
        stats = search_stats(tree, state, BOUND)
        of_others = tuple((f, stats_of(stats, state, (f.priced, f.planner))) for f in others)
        return Found(ranked[0], tuple(state.plans), stats, (), of_others)

    def _best_first(
        self,
        by_mesh: Mapping[Degrees, list[UniformStrategy]],
        state: MeshRecord,
        num_meshes: int,
    ) -> None:
        """Plan the meshes of a wave that may beat the best one so far."""

        def typed(mesh: CandidateMesh) -> MeshPlanner | None:
            self._tell(mesh, state, num_meshes)
            return self._typed_planner(mesh, state.pruned)

        def candidate(degrees: Degrees, strategies: list[UniformStrategy]) -> CandidateMesh:
            costs = CostModel(self.cluster, self._mesh(degrees))
            bare_s = self._bare_bound_s(degrees, costs)
            of = self.folded, costs, degrees, strategies, bare_s
            search = lambda: self._search(degrees)  # noqa: E731
            return CandidateMesh(*of, search, typed, self._least_compute, self._planned)

        meshes = [candidate(*item) for item in by_mesh.items()]
        prunes = BOUND not in self.options.without_rules
        beat_s = min(state.best_s, self.request.beat_s)
        for mesh in meshes:
            # In their own order: what the first finds on its dp axis serves the others, too.
            if not prunes or mesh.bound_s < beat_s:
                mesh.search()
        found = best_first(meshes, beat_s=beat_s, prunes=prunes)
        for mesh in found.left:
            if mesh.planner is None and math.isfinite(mesh.bound_s):
                self._tell(mesh, state, num_meshes)
        state.meshes += meshes
        state.planned += found.solved
        if found.best is not None:
            assert found.best.planner and found.best.plan and found.best.plan.best
            best = found.best.plan.best
            if state.best is None or order_of(best) < order_of(state.best[0]):
                state.best = best, found.best.planner

    def _beyond_sums(self, state: MeshRecord) -> list[Shortlisted]:
        """The shortlist, the best simulated step first. Where that is above the best sum, meshes
        whose bound is between them may simulate faster: MOST_BEYOND of them, planned already or
        now, are simulated, too, the lowest sum or bound first; all where no bound is in force."""
        ranked = rank_shortlist(state.plans)
        known = {f.planner for f in ranked}
        others = [
            Shortlisted(p.best, k) for k, p in state.plans.items() if p.best and k not in known
        ]
        others.sort(key=lambda f: order_of(f.priced))
        # What is planned already may fit and have had no program that beats the sums so far.
        without = [
            m
            for m in state.planned
            if m.plan and not m.plan.best and math.isfinite(m.plan.lower_bound_s)
        ]
        queue = BoundQueue([*without, *state.left])
        is_bounded = BOUND not in self.options.without_rules
        for _ in range(MOST_BEYOND if is_bounded else len(state.meshes)):
            limit_s = simulated_step_s(ranked[0])
            next_s = min([limit_s, *(f.priced.time.step_s for f in others[:1])])
            mesh = queue.pop(next_s)
            if mesh is not None and mesh.planner is not None:
                if mesh.plan is None:
                    state.planned.append(mesh)
                mesh.solve(limit_s)
                assert mesh.plan is not None
                if mesh.plan.best is None:
                    continue
                found = Shortlisted(mesh.plan.best, mesh.planner)
            elif others and next_s < limit_s:
                found = others.pop(0)
            else:
                break
            ranked = by_simulation([*ranked, simulated(found)])
        return ranked

    def _plan_rivals(self, state: MeshRecord, best: Shortlisted) -> None:
        """Plan MOST_RIVALS meshes whose programs, once emitted, may be faster than the best, though
        the search adds up to more, the lowest bound first; copies of states decide little there."""
        limit_s = EMITTED_GAIN * simulated_step_s(best)
        seen = {m.degrees._replace(dp_shard=0) for m in state.planned}
        queue, count = BoundQueue(state.left), 0
        while count < MOST_RIVALS and (mesh := queue.pop(limit_s)) is not None:
            alike = mesh.degrees._replace(dp_shard=0)
            if mesh.planner is not None and alike not in seen:
                seen.add(alike)
                state.planned.append(mesh)
                mesh.solve(limit_s)
                count += 1

    def _with_plainer(self, ranked: Sequence[Shortlisted]) -> list[Shortlisted]:
        """`ranked`, of close ones with light or heavy recomputation the best program of their mesh
        without it where that simulates faster: a layer in more variants parts buckets and gathers
        ahead, which sums do not see."""
        limit_s = simulated_step_s(ranked[0])
        found = []
        for listed in ranked:
            is_close = simulated_step_s(listed) < CLOSE * limit_s
            plainer = self._plainer(listed, limit_s) if is_close else None
            both = [listed, plainer] if plainer else [listed]
            found.append(by_simulation(both)[0])
        return by_simulation(found)

    def _plainer(self, listed: Shortlisted, limit_s: float) -> Shortlisted | None:
        """The best program of its mesh without light and heavy recomputation, if it has some and
        that adds up to less than limit_s."""
        if all(c.strategy.recompute not in BESIDE_SELECTIVE for c in listed.priced.candidates):
            return None
        every = listed.planner.strategies
        strategies = [s for s in every if s.recompute not in BESIDE_SELECTIVE]
        own = self.mesh_planner(every[0].degrees, strategies) if strategies else None
        plan = own.plan(limit_s) if own and own.has_candidates else None
        return simulated(Shortlisted(plan.best, listed.planner)) if plan and plan.best else None

    def _planned(self, planner: MeshPlanner, beat_s: float) -> tuple[MeshPlanner, MeshPlan]:
        """The plan of a mesh, and whose it is. A program in which tp is dp in all layers is that of
        the mesh with so much more dp: then the best one without such layers."""
        plan = planner.plan(beat_s)
        strategy = planner.strategies[0]
        has_twin = self.request.batch_size % (strategy.dp * strategy.tp) == 0
        is_free = self.options.pins.keys().isdisjoint(("dp", "tp"))
        if not (plan.best and has_twin and is_free):
            return planner, plan
        if not all(c.strategy.batch_on_tp for c in plan.best.candidates):
            return planner, plan
        others = [s for s in planner.strategies if not s.batch_on_tp]
        own = self.mesh_planner(strategy.degrees, others) if others else planner
        if own is planner or not own.has_candidates:
            return planner, replace(plan, best=None)
        of_others = own.plan(beat_s)
        bound_s = min(plan.lower_bound_s, of_others.lower_bound_s)
        return own, replace(of_others, lower_bound_s=bound_s)

    def _tell(self, mesh: CandidateMesh, state: MeshRecord, num_meshes: int) -> None:
        """Progress: one more mesh is typed, or left."""
        state.num_done += 1
        if self.progress is not None:
            bare = UniformStrategy(**mesh.degrees._asdict())
            self.progress(state.num_done, num_meshes, bare.label)

    def _typed_planner(self, mesh: CandidateMesh, pruned: Counter[str]) -> MeshPlanner | None:
        """All of a mesh typed; None if it cannot keep a pin or its tp axis shards no weights."""
        planner = self.mesh_planner(mesh.degrees, mesh.strategies)
        if planner.has_candidates and planner.sharded_fraction > 0:
            return planner
        pruned[UNSHARDED if planner.has_candidates else LAYOUT_PIN] += len(mesh.strategies)
        return None

    def _bare_bound_s(self, degrees: Degrees, costs: CostModel) -> float:
        """A bound on a mesh before its regions are typed; 0 if dp is not known from another."""
        for known, search in self._searches.items():
            if known.dp == degrees.dp and search.space.data and search.space.dp_axis is not None:
                data, compute = search.space.data, self._least_compute
                return least_step_s(self.folded, data, costs, self._room, compute)
        return 0.0

    @cached_property
    def _least_compute(self) -> LeastCompute:
        """The least compute of any mesh: all have as many ranks."""
        mesh = build_mesh(self.cluster, self.cluster.num_devices, 1)
        return least_compute(self.folded, CostModel(self.cluster, mesh))

    @property
    def _room(self) -> Room:
        """Unsharded parameters that fit with their gradients and optimizer states; with offload,
        copies of them. Parameters that stay gathered have neither."""
        factor = 2 + least_share(self.options.optimizer)
        capacity_bytes = self.options.memory_bytes or self.cluster.budget_bytes
        if search_spec(self.request, ()).offers_offload:
            if self.options.pins.get("offload", "parameters") == "parameters":
                return Room(math.inf, capacity_bytes)
            # Parameters alone, or copies of them in half the bytes.
            return Room(capacity_bytes * 2, capacity_bytes)
        return Room(capacity_bytes / factor, capacity_bytes)

    def _no_mesh(self, by_mesh: Mapping[Degrees, object], pruned: Counter[str]) -> OptionError:
        if pruned[LAYOUT_PIN]:
            pins = ", ".join(map(str, self.options.layout_pins))
            return OptionError(
                f"pin {pins}: no mesh of {self.cluster.num_devices} devices that the other pins "
                "leave can store it so: no op reads that shard, or nothing divides"
            )
        return too_many_ranks(self.options, {degrees.tp for degrees in by_mesh})
