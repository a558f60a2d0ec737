"""The plan of a folded program on a cluster, with the proof of how good it is.

    decision tree (one_pass/tree.py)   what is left of dp x ep x cp x tp, ZeRO, recomputation
        -> meshes in order of their bound, which rises while their regions are typed one by one
           (one_pass/candidate_mesh.py, region/typing.py)
        -> the best program on each, strategies mixed by layer (one_pass/search.py), until the next
           bound reaches the best program found
        -> Plan, with the lower bound, the pruning and the named baselines

Ties are broken by (step time to seven digits, regions to emit, peak memory, label): same input,
same plan.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.memory.step_memory import FOREACH_FACTOR, STATE_FACTOR
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import InfeasibleError, OptionError
from meshfold.gc_pause import collector_paused
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan, SearchStats
from meshfold.ir.strategy import Degrees, UniformStrategy
from meshfold.passes.graph.reads import program_reads
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.one_pass.bounds import LeastCompute, Room, least_compute, least_step_s
from meshfold.passes.one_pass.candidate_mesh import CandidateMesh
from meshfold.passes.one_pass.priced import NoMeshFits, order_of
from meshfold.passes.one_pass.record import MeshRecord, search_stats
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.shortlist import Shortlisted, rank_shortlist, simulated_times
from meshfold.passes.one_pass.tree import NODE, PRUNING_RULES, Tree, grow_tree
from meshfold.passes.planner.accumulation import fitting_rows
from meshfold.passes.planner.assembly import PlanRequest, assemble_plan
from meshfold.passes.planner.baselines import baseline_rows, named_baselines
from meshfold.passes.planner.chunked_loss import NEEDS_CHUNKS, fitting
from meshfold.passes.planner.find_pipeline import (
    excludes_pipelines,
    is_pipeline_pinned,
    plan_with_pipelines,
    search_spec,
)
from meshfold.passes.planner.memory_prices import MOST_SEARCHES, with_prices
from meshfold.passes.planner.offload import NEEDS_OFFLOAD, host_notes, within
from meshfold.passes.planner.shared_work import SharedWork
from meshfold.passes.region.pins import pinned_slots
from meshfold.passes.region.typing import MeshSearch

Progress = Callable[[int, int, str], None]
"""Called with (meshes done, meshes in all, the mesh at hand)."""

UNSHARDED = "tp shards no weights"
LAYOUT_PIN = "pinned layout cannot be kept"
BOUND = "bound of the mesh above the best plan"


@collector_paused()
def find_plan_for(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    options: CompileOptions,
    *,
    model_name: str,
    batch_size: int,
    probe: Probe,
    progress: Progress | None = None,
    shared: SharedWork | None = None,
    prices_memory: bool = False,
) -> Plan:
    """The fastest plan on all devices of `cluster` that fits the memory budget: in one pass, with
    the batch in microbatches, or with the model in stages, whichever wins. Where nothing fits
    without, losses make their logits in chunks, optimizer states go to the host, or both.

    batch_size: global batch, the size of dim 0 of the inputs that are to be sharded. probe: what
    the memory model asks about local ops. shared: what earlier searches for the same graph, cluster
    and batch left; the plan does not depend on it. prices_memory: a note says what the budget
    costs. Raises OptionError for a pin or batch that cannot be
    kept, InfeasibleError when nothing fits."""
    shared = shared or SharedWork()
    request = PlanRequest(folded, cluster, options, model_name, batch_size, probe, shared)
    plan = fitting(request, lambda asked: _plan(asked, progress))
    if not prices_memory and not {NEEDS_CHUNKS, NEEDS_OFFLOAD}.intersection(plan.notes):
        return plan

    def plan_in(num_bytes: int) -> Plan:
        return fitting(within(request, num_bytes), lambda asked: _plan(asked, None))

    # Offload that nobody asked for says what it costs in any case, by one search.
    return with_prices(plan, plan_in, MOST_SEARCHES if prices_memory else 0)


def _plan(request: PlanRequest, progress: Progress | None) -> Plan:
    """The fastest plan of what is asked for."""
    options = request.options
    needs_pipeline = is_pipeline_pinned(options.pins)
    _check_options(options, needs_pipeline)
    if needs_pipeline:
        return plan_with_pipelines(request, None)
    plan: Plan | None = None
    too_large: InfeasibleError | None = None
    one_pass_only = excludes_pipelines(options.pins) or bool(options.layout_pins)
    try:
        plan = _plan_in_one_pass(request, progress)
        if one_pass_only:
            return replace(plan, baselines=fitting_rows(request, plan.baselines))
    except InfeasibleError as error:
        if one_pass_only:
            raise
        too_large = error
    try:
        return plan_with_pipelines(request, plan)
    except (OptionError, InfeasibleError) as error:
        if too_large is None:
            raise
        raise too_large from error  # it says what is missing without a pipeline


def _plan_in_one_pass(request: PlanRequest, progress: Progress | None) -> Plan:
    """The fastest plan that runs the batch of a rank in one pass."""
    search = _Search(request, progress)
    found = search.best()
    options, batch_size = request.options, request.batch_size
    unpinned = search
    if options.layout_pins:
        free = replace(options, pins=options.strategy_pins)
        unpinned = _Search(replace(request, options=free), None)
    named = named_baselines(request.cluster)
    rows = {
        name: _planner_of(s, found, unpinned).uniform(s)
        for name, s in named.items()
        if batch_size % s.dp == 0
    }
    return assemble_plan(
        request,
        found.best,
        baselines=baseline_rows(rows, found.planners),
        stats=found.stats,
        notes=(
            *found.notes,
            *host_notes(found.best.priced, options.optimizer),
            *(
                f"baseline {name} is not priced: a batch of {batch_size} does not divide over "
                f"{s.dp} ranks"
                for name, s in named.items()
                if name not in rows
            ),
        ),
    )


def _check_options(options: CompileOptions, needs_pipeline: bool) -> None:
    known = (*PRUNING_RULES, BOUND)
    for name in options.without_rules:
        if name not in known:
            raise OptionError(f"no pruning is called {name!r}; they are {', '.join(known)}")
    if needs_pipeline and options.layout_pins:
        raise OptionError(
            f"pin {options.layout_pins[0]}: layouts cannot be pinned in a pipeline yet; leave it "
            "out, or the pipeline"
        )


@dataclass(frozen=True)
class _Found:
    """The winner, and everybody whose candidates were priced."""

    best: Shortlisted
    planners: tuple[MeshPlanner, ...]
    stats: SearchStats
    notes: tuple[str, ...]


def _planner_of(strategy: UniformStrategy, found: _Found, search: "_Search") -> MeshPlanner:
    """Who has priced the candidates of `strategy`, or a planner for it alone. Baselines keep no
    pinned layouts."""
    for planner in found.planners:
        if strategy in planner.strategies and planner.search.space.pinned == search.pinned:
            return planner
    return search.mesh_planner(strategy.degrees, [strategy])


class _Search:
    """One search; region typings are shared by everything that asks for the same mesh."""

    def __init__(self, request: PlanRequest, progress: Progress | None) -> None:
        self.request, self.progress = request, progress
        folded = self.folded = request.folded
        self.cluster, self.options = request.cluster, request.options
        self.pinned = pinned_slots(folded, self.options.layout_pins)
        self._typed = request.shared.meshes(folded, self.options)
        self._searches: dict[Degrees, MeshSearch] = {}  # of this search alone: bounds come of them
        self._reads = program_reads(folded)

    def best(self) -> _Found:
        """The fastest plan that fits; without the rule NODE when nothing fits."""
        found = self._over(self._tree(self.options.without_rules))
        if isinstance(found, _Found):
            return found
        if NODE in self.options.without_rules:
            raise found.error(self.cluster.num_devices)
        wider = self._tree((*self.options.without_rules, NODE))
        is_wider = len(wider.strategies) > len(self._tree(()).strategies)
        over_nodes = self._over(wider) if is_wider else found
        if isinstance(over_nodes, _Found):
            note = f"{found.words} while tp stays inside a node: this plan's tp leaves it"
            return replace(over_nodes, notes=(note,))
        raise found.and_in(over_nodes).error(self.cluster.num_devices)

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

    def _over(self, tree: Tree) -> "_Found | NoMeshFits":
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
            self._best_first(
                [self._candidate_mesh(*item) for item in wave.items()], state, len(by_mesh)
            )
        if not state.planners and not state.skipped:
            raise self._no_mesh(by_mesh, state.pruned)
        if state.best is None:
            return NoMeshFits(
                tuple(p.smallest for p in state.plans.values() if p.smallest is not None),
                all(math.isinf(p.lower_bound_s) for p in state.plans.values()),
            )
        ranked = rank_shortlist(state.plans)
        state.best = ranked[0].priced, ranked[0].planner
        state.simulated_s = simulated_times(ranked)
        return _Found(ranked[0], tuple(state.plans), search_stats(tree, state), ())

    def _candidate_mesh(self, degrees: Degrees, strategies: list[UniformStrategy]) -> CandidateMesh:
        costs = CostModel(self.cluster, self._mesh(degrees))
        return CandidateMesh(
            self.folded,
            costs,
            degrees,
            strategies,
            self._bare_bound_s(degrees, costs),
            lambda: self._search(degrees),
            self._least_compute,
        )

    def _best_first(
        self, meshes: Sequence[CandidateMesh], state: MeshRecord, num_meshes: int
    ) -> None:
        """The mesh of the lowest bound goes on: its next region is typed, then it is planned; until
        none can beat the best. Those whose tp axis shards no weights are left out."""
        for mesh in meshes:
            # In their own order: what the first finds on its dp axis serves the others, too.
            if not self._is_beaten(mesh.bound_s, state):
                mesh.search()
        queue = [(c.bound_s, c.mesh.sizes, k) for k, c in enumerate(meshes)]
        heapq.heapify(queue)
        skipped: dict[int, float] = {}
        while queue:
            bound_s, _, k = heapq.heappop(queue)
            mesh = meshes[k]
            if self._is_beaten(bound_s, state):
                state.pruned[BOUND] += len(mesh.strategies)
                if mesh.planner is None:
                    skipped[k] = bound_s
                    self._tell(mesh, state, num_meshes)
            elif mesh.planner is not None and mesh.is_bounded:
                self._plan(mesh.planner, state)
            elif mesh.raise_bound() or self._is_typed(mesh, state, num_meshes):
                heapq.heappush(queue, (mesh.bound_s, mesh.mesh.sizes, k))
        state.planners += [c.planner for c in meshes if c.planner is not None]
        state.skipped += [(str(meshes[k].mesh), skipped[k]) for k in sorted(skipped)]

    def _plan(self, planner: MeshPlanner, state: MeshRecord) -> None:
        plan = state.plans[planner] = planner.plan(state.best_s)
        if plan.best and (not state.best or order_of(plan.best) < order_of(state.best[0])):
            state.best = plan.best, planner

    def _is_beaten(self, bound_s: float, state: MeshRecord) -> bool:
        return bound_s >= state.best_s and BOUND not in self.options.without_rules

    def _tell(self, mesh: CandidateMesh, state: MeshRecord, num_meshes: int) -> None:
        """Progress: one more mesh is typed, or left."""
        state.num_done += 1
        if self.progress is not None:
            bare = UniformStrategy(**mesh.degrees._asdict())
            self.progress(state.num_done, num_meshes, bare.label)

    def _is_typed(self, mesh: CandidateMesh, state: MeshRecord, num_meshes: int) -> bool:
        """Type all of a mesh; False if it cannot keep a pin or its tp axis shards no weights."""
        self._tell(mesh, state, num_meshes)
        planner = self.mesh_planner(mesh.degrees, mesh.strategies)
        if not planner.has_candidates:
            state.pruned[LAYOUT_PIN] += len(mesh.strategies)
        elif planner.sharded_fraction > 0:
            mesh.planner = planner
        else:
            state.pruned[UNSHARDED] += len(mesh.strategies)
        return mesh.planner is not None

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
        optimizer = self.options.optimizer
        factor = 2 + STATE_FACTOR[optimizer] + FOREACH_FACTOR[optimizer]
        capacity_bytes = self.options.memory_bytes or self.cluster.budget_bytes
        if search_spec(self.request, ()).offers_offload:
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
        degrees_text = ", ".join(f"tp={d}" for d in sorted({d.tp for d in by_mesh}))
        return OptionError(
            f"{'pin ' if 'tp' in self.options.pins else ''}{degrees_text}: no parameter of "
            f"this model can be sharded over so many ranks"
        )
