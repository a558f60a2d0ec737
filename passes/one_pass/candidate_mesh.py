"""A mesh that may win: the bound on its programs rises while its regions are typed one by one.

    bound_s = max(bare_s, sum over regions of n * ( typed: the fastest of its typings
                                                    else:  its ops, sharded over all ranks ))

The mesh of the lowest bound goes on, by the region that weighs most: a mesh that cannot win is left
as soon as what is typed of it and the bare bounds of the rest reach the best program found. Once
all of it is typed, the bound counts memory too, before any program is sought. A
region with a tied parameter is typed last: its typing may change when regions agree on a layout.
"""

from collections.abc import Callable, Sequence

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.strategy import Degrees, UniformStrategy
from meshfold.passes.graph.boundaries import num_instances
from meshfold.passes.one_pass.bounds import LeastCompute, least_compute
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.region.typing import MeshSearch

ROUNDING = 1e-12
"""Relative: what adding up the bounds of many regions may be off by."""


class CandidateMesh:
    """One mesh. bare_s: a bound of its own on all its programs, from bounds.py. search: the
    search of this mesh, built when it is first asked for. compute: as for least_step_s."""

    def __init__(
        self,
        folded: FoldedGraph,
        costs: CostModel,
        degrees: Degrees,
        strategies: Sequence[UniformStrategy],
        bare_s: float,
        search: Callable[[], MeshSearch],
        compute: LeastCompute | None = None,
    ) -> None:
        self.mesh = costs.mesh
        self.degrees = degrees
        self.strategies = strategies
        self.planner: MeshPlanner | None = None
        self.is_bounded = False
        """Whether the bound counts memory."""
        self._bare_s = bare_s
        self.search = search
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
        """No program of the mesh takes less."""
        if self.planner is not None:
            return self.planner.bound_s if self.is_bounded else self.planner.fastest_s
        return max(self._bare_s, self._sum_s * (1 - ROUNDING))

    def raise_bound(self) -> bool:
        """Count memory in the bound of a mesh that is typed, or type one more region; False if
        there is none left to type alone."""
        if self.planner is not None:
            self.is_bounded = True
            return True
        search = self.search()
        if not self._untyped or search.space.pinned:
            return False
        r = self._untyped.pop()
        least_s = self._counts[r] * min(search.ops_s(r, mode) for mode in self._modes)
        self._sum_s += least_s - self._region_s[r]
        self._region_s[r] = least_s
        return True
