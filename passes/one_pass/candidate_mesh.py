"""A mesh that may win: the bound on its programs rises while its regions are typed one by one.

    bound_s = max(bare_s, sum over regions of n * ( typed: the fastest of its typings
                                                    else:  its ops, sharded over all ranks ))

The mesh of the lowest bound goes on, by the region that weighs most: a mesh that cannot win is left
as soon as what is typed of it and the bare bounds of the rest reach the best program found. Once
all of it is typed, the bound counts memory too, before any program is sought. A
region with a tied parameter is typed last: its typing may change when regions agree on a layout.
"""

import math
from collections.abc import Callable, Sequence

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.strategy import Degrees, UniformStrategy
from meshfold.passes.graph.boundaries import num_instances
from meshfold.passes.one_pass.best_first import Order, Solution
from meshfold.passes.one_pass.bounds import LeastCompute, least_compute
from meshfold.passes.one_pass.priced import MeshPlan, order_of
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.region.typing import MeshSearch

ROUNDING = 1e-12
"""Relative: what adding up the bounds of many regions may be off by."""


class CandidateMesh:
    """One mesh. bare_s: a bound of its own on all its programs, from bounds.py. search: the
    search of this mesh, built when it is first asked for. typed: its planner, all regions typed;
    None where it has no programs. compute: as for least_step_s. planned: its best program, and
    the planner that has it.

    planner: once all of it is typed; plan: once it is solved."""

    def __init__(
        self,
        folded: FoldedGraph,
        costs: CostModel,
        degrees: Degrees,
        strategies: Sequence[UniformStrategy],
        bare_s: float,
        search: Callable[[], MeshSearch],
        typed: Callable[["CandidateMesh"], MeshPlanner | None],
        compute: LeastCompute | None = None,
        planned: Callable[[MeshPlanner, float], tuple[MeshPlanner, MeshPlan]] | None = None,
    ) -> None:
        self.mesh = costs.mesh
        self.degrees = degrees
        self.strategies = strategies
        self.planner: MeshPlanner | None = None
        self.plan: MeshPlan | None = None
        self._is_bounded = False
        """Whether the bound counts memory."""
        self._bare_s = bare_s
        self.search, self._typed = search, typed
        self._planned = planned or (lambda planner, beat_s: (planner, planner.plan(beat_s)))
        self._modes = list(dict.fromkeys(s.tp_mode for s in strategies))
        self._counts = num_instances(folded)
        compute = compute or least_compute(folded, costs)
        self._region_s = {r: n * sum(compute[r]) for r, n in self._counts.items()}
        self._sum_s = sum(self._region_s.values())
        tied = {r for group in folded.tied_slots for r, _ in group}
        by_weight = sorted(self._counts, key=lambda r: (self._region_s[r], -r))
        self._untyped = [r for r in by_weight if r not in tied]

    @property
    def bound_s(self) -> float:
        """No program of the mesh takes less; infinite where it is typed and has none."""
        if self.planner is not None:
            return self.planner.bound_s if self._is_bounded else self.planner.fastest_s
        return max(self._bare_s, self._sum_s * (1 - ROUNDING))

    @property
    def order(self) -> Order:
        return self.mesh.sizes

    def raise_bound(self) -> bool:
        """Type one more region alone; then all that is left; then count memory. False if all of it
        is done."""
        if self._is_bounded:
            return False
        if self.planner is not None:
            self._is_bounded = True
        elif not self._untyped or self.search().space.pinned:
            self.planner = self._typed(self)
            if self.planner is None:
                self._bare_s = math.inf
        else:
            r = self._untyped.pop()
            least_s = self._counts[r] * min(self.search().ops_s(r, mode) for mode in self._modes)
            self._sum_s += least_s - self._region_s[r]
            self._region_s[r] = least_s
        return True

    def solve(self, beat_s: float, /) -> Solution:
        """Its best program that may take less."""
        assert self.planner is not None, "nothing raises its bound any more"
        self.planner, plan = self._planned(self.planner, beat_s)
        self.plan = plan
        return Solution(plan.lower_bound_s, plan.best_s, order_of(plan.best) if plan.best else ())
