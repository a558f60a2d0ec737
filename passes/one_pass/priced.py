"""A program with exact costs, and what the search found on one mesh."""

import math
from dataclasses import dataclass
from functools import cached_property

from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import TimeEstimate
from meshfold.ir.strategy import RegionTyping, UniformStrategy
from meshfold.passes.graph.variants import most_used
from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.price.region import RegionPrice


@dataclass(frozen=True, eq=False)
class Priced:
    """A program with exact costs. candidates: per region of `split`, the folded graph in which
    layers that differ are regions of their own; saved_bytes likewise."""

    mesh: Mesh
    split: FoldedGraph
    candidates: tuple[StrategyCandidate, ...]
    prices: tuple[RegionPrice, ...]
    time: TimeEstimate
    memory: MemoryEstimate
    saved_bytes: tuple[int, ...]

    @property
    def typings(self) -> tuple[RegionTyping, ...]:
        return tuple(candidate.typing for candidate in self.candidates)

    @cached_property
    def overlapped_s(self) -> float:
        """Seconds of recomputation and of copies to the host and back, hidden or not."""
        return sum(self.candidates[i.region].overlapped_s for i in self.split.instances)

    @cached_property
    def strategy(self) -> UniformStrategy:
        """What most ops do."""
        return most_used(self.split, [candidate.strategy for candidate in self.candidates])


@dataclass(frozen=True)
class ClosedChain:
    """What a chain found and proved: bound_s and unlimited_s are without the optimizer's launch,
    best_s is the step time of the best program that fits."""

    bound_s: float
    best_s: float
    gap_before: float
    unlimited_s: float
    capped: bool


@dataclass(frozen=True, eq=False)
class MeshPlan:
    """The outcome on one mesh. best: the fastest program found that fits. lower_bound_s: no program
    of these candidates that fits is faster. gap_before: how far rounding the relaxation would have
    been off. unlimited_s: step time if memory were unlimited. num_priced: programs whose exact
    costs were taken, num_infeasible of them did not fit."""

    best: Priced | None
    lower_bound_s: float
    gap_before: float
    unlimited_s: float
    capped: bool
    num_priced: int
    num_infeasible: int

    @property
    def best_s(self) -> float:
        return self.best.time.step_s if self.best else math.inf


def order_of(priced: Priced) -> tuple[float, float, int, int, str]:
    """Sort key: the better first. Time to seven digits, then less work that other work hides, then
    fewer regions to emit."""
    step_s = float(f"{priced.time.step_s:.6e}")
    hidden_s = float(f"{priced.overlapped_s:.3e}")
    regions, peak = len(priced.split.regions), priced.memory.peak
    return step_s, hidden_s, regions, peak, priced.strategy.label
