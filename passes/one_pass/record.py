"""What a search over meshes writes down while it goes, and what a plan tells of it."""

import math
from collections import Counter
from dataclasses import dataclass, field

from meshfold.ir.plan import MeshOutcome, SearchStats
from meshfold.passes.one_pass.priced import MeshPlan, Priced
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import RESTRICTIONS, Tree


@dataclass
class MeshRecord:
    """What a search over meshes has found so far. pruned: candidates that each rule took; planners:
    of meshes that were typed; skipped: (mesh, bound) of those that were not; num_done: meshes
    met."""

    pruned: Counter[str]
    best: tuple[Priced, MeshPlanner] | None = None
    planners: list[MeshPlanner] = field(default_factory=list)
    plans: dict[MeshPlanner, MeshPlan] = field(default_factory=dict)
    skipped: list[tuple[str, float]] = field(default_factory=list)
    num_done: int = 0
    simulated_s: dict[MeshPlanner, float] = field(default_factory=dict)
    """Step times of the shortlist, as simulated."""

    @property
    def best_s(self) -> float:
        return self.best[0].time.step_s if self.best else math.inf


def search_stats(tree: Tree, state: MeshRecord) -> SearchStats:
    """What a plan says about the search that found it."""
    assert state.best is not None
    step_s, plans = state.best_s, state.plans
    least_s = min(p.best.time.step_s for p in plans.values() if p.best is not None)
    outcomes = [_outcome(p, plans.get(p), state) for p in state.planners]
    outcomes += [MeshOutcome(name, s, None, _too_slow(s, step_s)) for name, s in state.skipped]
    return SearchStats(
        num_leaves=tree.num_strategies,
        num_priced=sum(p.num_priced for p in plans.values()),
        num_infeasible=sum(p.num_infeasible for p in plans.values()),
        pruned=dict(sorted((name, n) for name, n in state.pruned.items() if n)),
        lower_bound_s=min(least_s, *(p.lower_bound_s for p in plans.values())),
        gap_before=plans[state.best[1]].gap_before,
        unlimited_s=min(
            plans[p].unlimited_s if p in plans else p.unlimited_s for p in state.planners
        ),
        capped=any(p.capped for p in plans.values()),
        meshes=tuple(outcomes),
        left_out={rule: n for rule in sorted(RESTRICTIONS) if (n := state.pruned[rule])},
    )


def _outcome(planner: MeshPlanner, plan: MeshPlan | None, state: MeshRecord) -> MeshOutcome:
    """What came of one mesh that was typed."""
    assert state.best is not None
    name, step_s = str(planner.mesh), state.best_s
    if plan is None or plan.best is None:
        fits = plan is None or math.isfinite(plan.lower_bound_s)
        bound_s = plan.lower_bound_s if plan and fits else planner.bound_s
        return MeshOutcome(
            name, bound_s, None, _too_slow(bound_s, step_s) if fits else "does not fit"
        )
    own_s = plan.best.time.step_s
    is_best = planner is state.best[1]
    reason = "taken" if is_best else f"{own_s / step_s:.2f} of this plan's time"
    if not is_best and planner in state.simulated_s:
        ratio = state.simulated_s[planner] / state.simulated_s[state.best[1]]
        reason += f", {ratio:.2f} as simulated"
    return MeshOutcome(name, plan.lower_bound_s, own_s, reason)


def _too_slow(bound_s: float, step_s: float) -> str:
    return f"cannot be faster than {bound_s / step_s:.2f} of this plan"
