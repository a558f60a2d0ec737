"""The plan of a folded program on a cluster, with the proof of how good it is.

    decision tree (passes/decision_tree.py)   what is left of dp x cp x tp, ZeRO, recomputation
        -> every mesh typed and bounded       (passes/uniform_search.py)
        -> meshes in order of their bound: the best program on each, strategies mixed by layer
           (passes/mesh_plan.py), until the next bound reaches the best program found
        -> Plan, with the lower bound, the cuts and the named baselines

Ties are broken by (step time to seven digits, regions to emit, peak memory, label): same input,
same plan.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from meshfold.cluster import ClusterSpec
from meshfold.cost_models.meshes import build_mesh
from meshfold.cost_models.step_memory import STATE_FACTOR
from meshfold.errors import InfeasibleError, OptionError
from meshfold.opgraph import FoldedGraph
from meshfold.options import CompileOptions
from meshfold.passes.baselines import baseline_rows, named_baselines
from meshfold.passes.boundaries import carried_sequences, carries_feature_maps
from meshfold.passes.data_parallel import Followed
from meshfold.passes.decision_tree import NODE, PRUNINGS, Situation, Tree, grow_tree
from meshfold.passes.mesh_plan import MeshPlanner
from meshfold.passes.pipeline_planner import (
    excludes_pipelines,
    is_pipeline_pinned,
    plan_with_pipelines,
)
from meshfold.passes.plan_assembly import assemble_plan
from meshfold.passes.priced import MeshPlan, Priced, order_of
from meshfold.passes.region_memory import Probe
from meshfold.passes.uniform_search import MeshSearch
from meshfold.plan import MemoryEstimate, MeshOutcome, Plan, SearchStats
from meshfold.strategy import Degrees, UniformStrategy
from meshfold.units import bytes_text

Progress = Callable[[int, int, str], None]
"""Called with (meshes done, meshes in all, the mesh at hand)."""

UNSHARDED = "tp shards no weights"
BOUND = "bound of the mesh above the best plan"


def find_plan_for(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    options: CompileOptions,
    *,
    model_name: str,
    batch_size: int,
    probe: Probe,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan on all devices of `cluster` that fits the memory budget.

    batch_size: global batch, the size of dim 0 of the inputs that are to be sharded. probe: what
    the memory model asks about local ops. Raises OptionError for a pin or batch that cannot be
    kept, InfeasibleError when nothing fits.
    """
    _check_prunings(options.without_cuts)
    needs_pipeline = is_pipeline_pinned(options.pins)
    if needs_pipeline and not options.allow_planned:
        raise OptionError(
            "pins pp, microbatches, schedule, chunks: pipelines can be planned, not run yet; say "
            "--allow planned"
        )
    plan: Plan | None = None
    if not needs_pipeline:
        try:
            plan = _plan_in_one_pass(
                folded, cluster, options, model_name, batch_size, probe, progress
            )
        except InfeasibleError:
            if not options.allow_planned or excludes_pipelines(options.pins):
                raise
    if not options.allow_planned or excludes_pipelines(options.pins):
        assert plan is not None
        return plan
    return plan_with_pipelines(
        folded,
        cluster,
        options,
        plan,
        model_name=model_name,
        batch_size=batch_size,
        probe=probe,
    )


def _plan_in_one_pass(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    options: CompileOptions,
    model_name: str,
    batch_size: int,
    probe: Probe,
    progress: Progress | None,
) -> Plan:
    """The fastest plan that runs the batch of a rank in one pass."""
    search = _Search(folded, cluster, options, batch_size, probe, progress)
    found = search.best()
    named = named_baselines(cluster)
    rows = {
        name: _planner_of(s, found, search).uniform(s)
        for name, s in named.items()
        if batch_size % s.dp == 0
    }
    return assemble_plan(
        folded,
        cluster,
        options,
        found.best,
        found.planner,
        model_name=model_name,
        batch_size=batch_size,
        baselines=baseline_rows(rows, found.planners),
        stats=found.stats,
        notes=(
            *found.notes,
            *_planned_notes(found.best),
            *(
                f"baseline {name} is not priced: a batch of {batch_size} does not divide over "
                f"{s.dp} ranks"
                for name, s in named.items()
                if name not in rows
            ),
        ),
    )


def _check_prunings(names: Sequence[str]) -> None:
    known = (*PRUNINGS, BOUND)
    for name in names:
        if name not in known:
            raise OptionError(f"no pruning is called {name!r}; they are {', '.join(known)}")


@dataclass(frozen=True)
class _Found:
    """The winner, who planned it, and everybody whose leaves were priced."""

    best: Priced
    planner: MeshPlanner
    planners: tuple[MeshPlanner, ...]
    stats: SearchStats
    notes: tuple[str, ...]


def _planner_of(strategy: UniformStrategy, found: _Found, search: "_Search") -> MeshPlanner:
    """Who has priced the leaves of `strategy`, or a planner for it alone."""
    for planner in found.planners:
        if strategy in planner.strategies:
            return planner
    return search.mesh_planner(strategy.degrees, [strategy])


class _Search:
    """One search; region typings are shared by everything that asks for the same mesh."""

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        options: CompileOptions,
        batch_size: int,
        probe: Probe,
        progress: Progress | None,
    ) -> None:
        self.folded = folded
        self.cluster = cluster
        self.options = options
        self.batch_size = batch_size
        self.probe = probe
        self.progress = progress
        self._searches: dict[Degrees, MeshSearch] = {}
        self._followed: Followed = {}

    def best(self) -> _Found:
        """The fastest plan that fits; leaves that a pruning took come back when nothing fits."""
        found = self._over(self._tree(self.options.without_cuts))
        if isinstance(found, _Found):
            return found
        if NODE in self.options.without_cuts:
            raise self._infeasible(found)
        wider = self._tree((*self.options.without_cuts, NODE))
        again = self._over(wider) if len(wider.leaves) > len(self._tree(()).leaves) else found
        if isinstance(again, _Found):
            note = "nothing fits while tp stays inside a node: this plan's tp leaves it"
            return _Found(again.best, again.planner, again.planners, again.stats, (note,))
        raise self._infeasible([*found, *again])

    def mesh_planner(self, degrees: Degrees, strategies: Sequence[UniformStrategy]) -> MeshPlanner:
        """A planner for these leaves of one mesh."""
        if degrees not in self._searches:
            mesh = build_mesh(self.cluster, degrees.dp, degrees.tp, cp=degrees.cp)
            self._searches[degrees] = MeshSearch(
                self.folded, self.cluster, mesh, self.batch_size, self._followed
            )
        return MeshPlanner(
            self.folded,
            self.cluster,
            self._searches[degrees],
            strategies,
            self.options,
            self.probe,
        )

    def _tree(self, without: Sequence[str]) -> Tree:
        cluster = self.cluster
        situation = Situation(
            num_devices=cluster.num_devices,
            devices_per_node=min(group.devices_per_node for group in cluster.groups),
            batch_size=self.batch_size,
            pins=self.options.pins,
            allow_planned=self.options.allow_planned,
            switched_off=without,
            host_bytes_per_s=cluster.host_bytes_per_s,
            has_states=STATE_FACTOR[self.options.optimizer] > 0,
            has_feature_maps=carries_feature_maps(self.folded),
            sequences=carried_sequences(self.folded),
        )
        return grow_tree(situation)

    def _over(self, tree: Tree) -> "_Found | list[Priced]":
        """The best of a tree, or per mesh the program with the least memory."""
        by_mesh: dict[Degrees, list[UniformStrategy]] = {}
        # In an order of our own, so that the order of the leaves decides nothing.
        for leaf in sorted(tree.leaves, key=lambda s: (-s.dp, s.cp, s.label)):
            by_mesh.setdefault(leaf.degrees, []).append(leaf)
        cuts = Counter(tree.cuts)
        planners = self._bounded(by_mesh, cuts)
        best: tuple[Priced, MeshPlanner] | None = None
        plans: dict[MeshPlanner, MeshPlan] = {}
        for planner in sorted(planners, key=lambda p: (p.fastest_s, p.mesh.sizes)):
            if best and planner.fastest_s >= best[0].time.step_s and self._prunes(BOUND):
                cuts[BOUND] += len(planner.strategies)
                continue
            incumbent_s = best[0].time.step_s if best else math.inf
            plans[planner] = plan = planner.plan(incumbent_s)
            if plan.best and (not best or order_of(plan.best) < order_of(best[0])):
                best = plan.best, planner
        if best is None:
            return [p.smallest for p in plans.values() if p.smallest is not None]
        stats = _stats(tree, cuts, planners, plans, best)
        return _Found(*best, tuple(plans), stats, ())

    def _prunes(self, name: str) -> bool:
        return name not in self.options.without_cuts

    def _bounded(
        self, by_mesh: Mapping[Degrees, list[UniformStrategy]], cuts: Counter[str]
    ) -> list[MeshPlanner]:
        """A planner per mesh, those whose tp axis shards no weights left out."""
        planners = []
        for done, (degrees, strategies) in enumerate(by_mesh.items()):
            if self.progress is not None:
                bare = UniformStrategy(**degrees._asdict())
                self.progress(done + 1, len(by_mesh), bare.label)
            planner = self.mesh_planner(degrees, strategies)
            if planner.sharded_fraction > 0:
                planners.append(planner)
            else:
                cuts[UNSHARDED] += len(strategies)
        if not planners:
            degrees_text = ", ".join(f"tp={d}" for d in sorted({d.tp for d in by_mesh}))
            raise OptionError(
                f"{'pin ' if 'tp' in self.options.pins else ''}{degrees_text}: no parameter of "
                f"this model can be sharded over so many ranks"
            )
        return planners

    def _infeasible(self, smallest: Sequence[Priced]) -> InfeasibleError:
        best = min(smallest, key=lambda p: (p.memory.peak, p.strategy.label))
        memory, label = best.memory, best.strategy.label
        component, size = _largest_component(memory)
        missing = memory.peak - memory.capacity
        return InfeasibleError(
            f"nothing fits in {bytes_text(memory.capacity)} per device on "
            f"{self.cluster.num_devices} devices: the best candidate, {label}, needs "
            f"{bytes_text(memory.peak)}, most of it {component} ({bytes_text(size)}); "
            f"{bytes_text(missing)} are missing; use more devices, more memory or a smaller batch",
            binding_constraint=component,
            best_candidate=label,
            required_bytes=memory.peak,
            available_bytes=memory.capacity,
        )


def _stats(
    tree: Tree,
    cuts: Counter[str],
    planners: Sequence[MeshPlanner],
    plans: Mapping[MeshPlanner, MeshPlan],
    best: tuple[Priced, MeshPlanner],
) -> SearchStats:
    step_s = best[0].time.step_s
    outcomes = []
    for planner in planners:
        plan = plans.get(planner)
        name = str(planner.mesh)
        if plan is None:
            reason = f"cannot be faster than {planner.fastest_s / step_s:.2f} of this plan"
            outcomes.append(MeshOutcome(name, planner.fastest_s, None, reason))
        elif plan.best is None:
            fits = math.isfinite(plan.lower_bound_s)
            bound_s = plan.lower_bound_s if fits else planner.fastest_s
            reason = f"cannot be faster than {bound_s / step_s:.2f} of this plan"
            outcomes.append(MeshOutcome(name, bound_s, None, reason if fits else "does not fit"))
        else:
            own_s = plan.best.time.step_s
            reason = "taken" if planner is best[1] else f"{own_s / step_s:.2f} of this plan's time"
            outcomes.append(MeshOutcome(name, plan.lower_bound_s, own_s, reason))
    return SearchStats(
        num_leaves=tree.num_leaves,
        num_candidates=sum(p.num_priced for p in plans.values()),
        num_infeasible=sum(p.num_infeasible for p in plans.values()),
        cuts=dict(sorted((name, n) for name, n in cuts.items() if n)),
        lower_bound_s=min(step_s, *(p.lower_bound_s for p in plans.values())),
        gap_before=plans[best[1]].gap_before,
        unlimited_s=min(p.unlimited_s for p in plans.values()),
        capped=any(p.capped for p in plans.values()),
        meshes=tuple(outcomes),
    )


def _planned_notes(best: Priced) -> list[str]:
    """A plan that uses what cannot run yet says so."""
    names = dict.fromkeys(leaf.strategy.label for leaf in best.leaves if not leaf.strategy.runs)
    notes = [f"{name}: planned, cannot run yet" for name in names]
    if any(leaf.strategy.offload == "optimizer" for leaf in best.leaves):
        notes.append("the host's own work on offloaded optimizer states is not in the step time")
    return notes


def _largest_component(memory: MemoryEstimate) -> tuple[str, int]:
    sizes = {f.name: getattr(memory, f.name) for f in fields(memory) if f.name != "capacity"}
    name = max(sizes, key=lambda n: (sizes[n], n))
    return name.replace("_", " "), sizes[name]
