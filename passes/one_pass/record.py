"""What a search over meshes writes down while it goes, and what a plan tells of it."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from meshfold.ir.plan import MeshOutcome, SearchStats
from meshfold.passes.one_pass.candidate_mesh import CandidateMesh
from meshfold.passes.one_pass.priced import MeshPlan, Priced
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import RESTRICTIONS, Tree


@dataclass
class MeshRecord:
    """What a search over meshes has found so far. pruned: candidates that each rule took, but those
    that a bound did; meshes: all of them; planned: those that were solved, in that order."""

    pruned: Counter[str]
    meshes: list[CandidateMesh] = field(default_factory=list)
    planned: list[CandidateMesh] = field(default_factory=list)
    best: tuple[Priced, MeshPlanner] | None = None
    num_done: int = 0
    simulated_s: dict[MeshPlanner, float] = field(default_factory=dict)
    """Step times of the shortlist, as simulated."""

    @property
    def best_s(self) -> float:
        return self.best[0].time.step_s if self.best else math.inf

    @property
    def plans(self) -> dict[MeshPlanner, MeshPlan]:
        """Of the meshes that were planned."""
        return {m.planner: m.plan for m in self.planned if m.planner and m.plan}

    @property
    def typed(self) -> list[CandidateMesh]:
        """Meshes of which all regions are typed."""
        return [m for m in self.meshes if m.planner is not None]

    @property
    def left(self) -> list[CandidateMesh]:
        """Meshes that may have programs, and were not planned."""
        return [m for m in self.meshes if m.plan is None and math.isfinite(m.bound_s)]


def search_stats(tree: Tree, state: MeshRecord, bound: str) -> SearchStats:
    """What a plan says about the search that found it. bound: the name of what leaves meshes."""
    assert state.best is not None
    best, plans = state.best, list(state.plans.values())
    state.pruned[bound] += sum(len(m.strategies) for m in state.left)
    return SearchStats(
        num_leaves=tree.num_strategies,
        num_priced=sum(p.num_priced for p in plans),
        num_infeasible=sum(p.num_infeasible for p in plans),
        pruned=dict(sorted((name, n) for name, n in state.pruned.items() if n)),
        lower_bound_s=min(min(p.lower_bound_s, p.best_s) for p in plans),
        least_s=min(p.best_s for p in plans),
        gap_before=state.plans[best[1]].gap_before,
        unlimited_s=min(
            m.plan.unlimited_s if m.plan else m.planner.unlimited_s
            for m in state.typed
            if m.planner
        ),
        capped=any(p.capped for p in plans),
        meshes=_outcomes(state, best),
        left_out={rule: n for rule in sorted(RESTRICTIONS) if (n := state.pruned[rule])},
    )


def stats_of(
    found: SearchStats, state: MeshRecord, best: tuple[Priced, MeshPlanner]
) -> SearchStats:
    """`found`, what search_stats says of the winner, as the plan of another program says it."""
    gap_before = state.plans[best[1]].gap_before
    return replace(found, gap_before=gap_before, meshes=_outcomes(state, best))


def _outcomes(state: MeshRecord, best: tuple[Priced, MeshPlanner]) -> tuple[MeshOutcome, ...]:
    """What came of each mesh, beside the program that is taken."""
    skipped = [m for m in state.left if m.planner is None]
    return tuple(_outcome(m, state, best) for m in (*state.typed, *skipped))


def _outcome(
    mesh: CandidateMesh, state: MeshRecord, taken: tuple[Priced, MeshPlanner]
) -> MeshOutcome:
    """What came of one mesh."""
    best, planner = taken
    name, step_s, plan = str(mesh.mesh), best.time.step_s, mesh.plan
    if plan is None or plan.best is None:
        bound_s = plan.lower_bound_s if plan else mesh.bound_s
        fits = math.isfinite(bound_s)
        if mesh.planner and not fits:
            bound_s = mesh.planner.fastest_s
        too_slow = f"cannot be faster than {bound_s / step_s:.2f} of this plan"
        return MeshOutcome(name, bound_s, None, too_slow if fits else "does not fit")
    is_best = mesh.planner is planner
    own_s = step_s if is_best else plan.best.time.step_s
    reason = "taken" if is_best else f"{own_s / step_s:.2f} of this plan's time"
    simulated_s = state.simulated_s
    if not is_best and mesh.planner in simulated_s and planner in simulated_s:
        ratio = simulated_s[mesh.planner] / simulated_s[planner]
        reason += f", {ratio:.2f} as simulated"
    return MeshOutcome(name, plan.lower_bound_s, own_s, reason)
