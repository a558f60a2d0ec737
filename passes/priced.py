"""A program with exact figures, and what the search found on one mesh."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from meshfold.mesh import Mesh
from meshfold.opgraph import FoldedGraph
from meshfold.passes.leaf_costs import Leaf
from meshfold.passes.region_price import RegionPrice
from meshfold.plan import MemoryEstimate, TimeEstimate
from meshfold.strategy import RegionTyping, UniformStrategy


@dataclass(frozen=True, eq=False)
class Priced:
    """A program with exact figures. leaves: per region of `split`, the folded graph in which
    layers that differ are regions of their own; saved_bytes likewise."""

    mesh: Mesh
    split: FoldedGraph
    leaves: tuple[Leaf, ...]
    prices: tuple[RegionPrice, ...]
    time: TimeEstimate
    memory: MemoryEstimate
    saved_bytes: tuple[int, ...]

    @property
    def typings(self) -> tuple[RegionTyping, ...]:
        return tuple(leaf.typing for leaf in self.leaves)

    @cached_property
    def strategy(self) -> UniformStrategy:
        """What most ops do."""
        weights: Counter[UniformStrategy] = Counter()
        for instance in self.split.instances:
            num_ops = len(self.split.regions[instance.region].graph.ops)
            weights[self.leaves[instance.region].strategy] += num_ops
        return max(weights, key=lambda s: (weights[s], s.label))


@dataclass(frozen=True, eq=False)
class MeshPlan:
    """The outcome on one mesh. best: the fastest program found that fits; smallest: the one with
    the least memory, if none fits and there is no other. lower_bound_s: no program of these leaves
    that fits is faster. gap_before: how far rounding the relaxation would have been off.
    unlimited_s: step time if memory were unlimited. num_priced: programs whose
    exact figures were taken, num_infeasible of them did not fit."""

    best: Priced | None
    smallest: Priced | None
    lower_bound_s: float
    gap_before: float
    unlimited_s: float
    capped: bool
    num_priced: int
    num_infeasible: int


def order_of(priced: Priced) -> tuple[float, int, int, str]:
    """Sort key: the better first. Time to seven digits, then fewer regions to emit."""
    step_s = float(f"{priced.time.step_s:.6e}")
    return step_s, len(priced.split.regions), priced.memory.peak, priced.strategy.label
