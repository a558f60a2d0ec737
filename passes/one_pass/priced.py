"""A program with exact costs, and what the search found on one mesh."""

import math
from dataclasses import dataclass, fields
from functools import cached_property

from meshfold.errors import InfeasibleError
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import TimeEstimate
from meshfold.ir.strategy import RegionTyping, UniformStrategy
from meshfold.passes.graph.variants import most_used
from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.price.region import RegionPrice
from meshfold.units import bytes_text


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
    """The outcome on one mesh. best: the fastest program found that fits; smallest: the one with
    the least memory, if none fits and there is no other. lower_bound_s: no program of these
    candidates that fits is faster. gap_before: how far rounding the relaxation would have been off.
    unlimited_s: step time if memory were unlimited. num_priced: programs whose
    exact costs were taken, num_infeasible of them did not fit."""

    best: Priced | None
    smallest: Priced | None
    lower_bound_s: float
    gap_before: float
    unlimited_s: float
    capped: bool
    num_priced: int
    num_infeasible: int

    @property
    def best_s(self) -> float:
        return self.best.time.step_s if self.best else math.inf


def order_of(priced: Priced) -> tuple[float, int, int, str]:
    """Sort key: the better first. Time to seven digits, then fewer regions to emit."""
    step_s = float(f"{priced.time.step_s:.6e}")
    return step_s, len(priced.split.regions), priced.memory.peak, priced.strategy.label


@dataclass(frozen=True)
class NoMeshFits:
    """A search that found no plan."""

    smallest: tuple[Priced, ...]
    """The program with the least memory of each mesh."""
    is_proven: bool
    """Whether a bound excludes every other program, too; the search may else have missed one."""

    @property
    def words(self) -> str:
        """What a message may say of it."""
        return "nothing fits" if self.is_proven else "found nothing that fits"

    def and_in(self, other: "NoMeshFits") -> "NoMeshFits":
        """This search and another one."""
        return NoMeshFits((*self.smallest, *other.smallest), self.is_proven and other.is_proven)

    def error(self, num_devices: int) -> InfeasibleError:
        """What to say of it."""
        best = min(self.smallest, key=lambda p: (p.memory.peak, p.strategy.label))
        memory, label = best.memory, best.strategy.label
        component, size = _largest_component(memory)
        return InfeasibleError(
            f"{self.words} in {bytes_text(memory.capacity)} per device on {num_devices} devices: "
            f"the best candidate, {label}, needs {bytes_text(memory.peak)}, most of it {component} "
            f"({bytes_text(size)}); {bytes_text(memory.peak - memory.capacity)} are missing; use "
            "more devices, more memory or a smaller batch",
            binding_constraint=component,
            best_candidate=label,
            required_bytes=memory.peak,
            available_bytes=memory.capacity,
        )


def _largest_component(memory: MemoryEstimate) -> tuple[str, int]:
    sizes = {f.name: getattr(memory, f.name) for f in fields(memory) if f.name != "capacity"}
    name = max(sizes, key=lambda n: (sizes[n], n))
    return name.replace("_", " "), sizes[name]
