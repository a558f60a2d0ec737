"""What one instance of a region costs under every leaf of the decision tree, on one mesh.

The region search (passes/uniform_search.py) has typed the ops; below it a leaf decides which
parameters are stored as shards on dp and whether the forward runs again. Nothing of that changes
the types of ops, so a leaf is priced from the region's price and memory by arithmetic:

    time_s      max(f + c, g) + max(b + c, g + d) + optimizer       (passes/step_time.py)
    held        parameters and optimizer states, and gradients where they outlive the activations
    kept        activations for the backward, values handed to the next instance included
    passing     beside that while the instance runs: gathered parameters, buckets, temporaries

ZeRO-3 is decided parameter by parameter (OSDP, Jiang et al. 2023): gathers and reductions of a
region share buckets, so every byte sharded costs alike and the leaves in between shard the largest
parameters first. A parameter that several instances read has one layout: all such parameters are
sharded together or not at all, and a leaf says which (ties).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.cost_models.cost_model import CostModel
from meshfold.cost_models.memory import RegionMemory
from meshfold.cost_models.step_memory import STATE_FACTOR
from meshfold.opgraph import OpGraph, SlotKind
from meshfold.passes.data_parallel import zero3_layout
from meshfold.passes.parameter_prices import local_bytes
from meshfold.passes.region_price import RegionPrice, RegionPricer, layouts_of_values
from meshfold.passes.step_time import ends_s, instance_s, optimizer_s
from meshfold.spmd import REPLICATE, Layout
from meshfold.strategy import RegionTyping, UniformStrategy

MemoryOf = Callable[[RegionTyping], RegionMemory]


@dataclass(frozen=True)
class SlotFacts:
    """Which parameter slots of a region stand apart. tied: another slot or instance reads the same
    parameter. first: this region is the first to read it, so its states are counted here."""

    tied: frozenset[int]
    first: frozenset[int]


@dataclass(frozen=True, eq=False)
class Leaf:
    """One region under one strategy: the module docstring says what each figure is. All are of one
    instance and rank, in seconds and bytes.

    sharded: parameter slots stored as shards on dp beyond what the ops read. ties: whether tied
    parameters are among them; None for a region without. is_partial: of the others some are
    sharded and some are not.
    """

    strategy: UniformStrategy
    sharded: tuple[int, ...]
    num_shardable: int
    ties: bool | None
    is_partial: bool
    typing: RegionTyping
    price: RegionPrice
    memory: RegionMemory
    time_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    passing_bytes: int

    @property
    def again_s(self) -> float:
        """Seconds that run again."""
        if self.strategy.recompute == "none":
            return 0.0
        return self.price.again.compute_s + self.price.again.graph_s

    @property
    def ends_s(self) -> float:
        return ends_s(self.price)

    @cached_property
    def name(self) -> str:
        """Unique among the leaves of a region."""
        part = len(self.sharded)
        if 0 < part < self.num_shardable:
            return f"{self.strategy.label} for {part} of {self.num_shardable} parameters"
        return self.strategy.label

    @property
    def states_bytes(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes

    @property
    def held_bytes(self) -> int:
        """States, and the larger of activations and gradients."""
        return self.states_bytes + max(self.memory.saved_bytes, self.gradient_bytes)


@dataclass(frozen=True)
class RegionChoices:
    """A region as the leaves see it: its typing with every parameter whole on dp, prices for any
    stored layouts, the memory of a typing, its parameters."""

    graph: OpGraph
    typing: RegionTyping
    pricer: RegionPricer
    memory_of: MemoryOf
    slots: SlotFacts


def region_leaves(
    region: RegionChoices,
    strategies: Sequence[UniformStrategy],
    costs: CostModel,
    optimizer: str,
) -> list[Leaf]:
    """The leaves of a region for strategies that differ in ZeRO level and recomputation."""
    parameters = _Parameters(region, costs, optimizer)
    leaves = []
    for recompute in dict.fromkeys(s.recompute for s in strategies):
        typing = replace(region.typing, recompute=recompute)
        memory = region.memory_of(typing)
        levels = {s.zero: s for s in strategies if s.recompute == recompute}
        for level, sharded in parameters.choices(set(levels)):
            leaves.append(parameters.leaf(levels[level], sharded, typing, memory))
    return leaves


class _Parameters:
    """The parameters of one region on the data parallel axis."""

    def __init__(self, region: RegionChoices, costs: CostModel, optimizer: str) -> None:
        self.region = region
        self.costs = costs
        self.optimizer = optimizer
        self.mesh = costs.mesh
        self.axis = self.mesh.index("dp") if "dp" in self.mesh.names else None
        graph = region.graph
        self.slots = [i for i, s in enumerate(graph.slots) if s.kind is SlotKind.PARAMETER]
        self.demands = layouts_of_values(graph, region.typing)
        shards = {i: self._shard(i) for i in self.slots}
        self.shards = {i: layout for i, layout in shards.items() if layout is not None}
        """Slot -> layout when also sharded on dp, for those that can be."""

    def choices(self, levels: set[int]) -> list[tuple[int, tuple[int, ...]]]:
        """The (ZeRO level, sharded slots) worth a leaf: none, the largest few, all; tied ones
        together. Every byte sharded costs alike, so sets in between differ in size alone."""
        found: list[tuple[int, tuple[int, ...]]] = [(level, ()) for level in sorted(levels - {3})]
        if 3 not in levels:
            return found
        if not found:
            return [(3, tuple(sorted(self.shards)))]
        tied = sorted(self.region.slots.tied & self.shards.keys())
        free = sorted(self.shards.keys() - set(tied), key=lambda i: (-self._used_bytes(i), i))
        for also in ([], tied) if tied else ([],):
            for k in range(len(free) + 1):
                sharded = tuple(sorted((*free[:k], *also)))
                found += [(3, sharded)] if sharded else []
        return found

    def leaf(
        self,
        strategy: UniformStrategy,
        sharded: tuple[int, ...],
        typing: RegionTyping,
        memory: RegionMemory,
    ) -> Leaf:
        """The figures of one leaf."""
        slots = list(typing.slots)
        for i in sharded:
            slots[i] = self.shards[i]
        priced = self.region.pricer.price(slots, typing.recompute)
        sizes = self._state_bytes(slots, strategy.zero)
        tied = self.region.slots.tied & self.shards.keys()
        return Leaf(
            strategy=strategy,
            sharded=sharded,
            num_shardable=len(self.shards),
            ties=bool(tied & set(sharded)) if tied else None,
            is_partial=bool(set(sharded) - tied) and len(set(sharded) | tied) < len(self.shards),
            typing=replace(typing, slots=tuple(slots)),
            price=priced,
            memory=memory,
            time_s=instance_s(priced) + self._optimizer_s(sizes[2]),
            parameter_bytes=sizes[0],
            gradient_bytes=sizes[1],
            optimizer_bytes=STATE_FACTOR[self.optimizer] * sizes[2],
            gathered_bytes=sum(self._used_bytes(i) for i in sharded),
            passing_bytes=self._passing_bytes(memory, sharded),
        )

    def _state_bytes(self, slots: Sequence[Layout], zero: int) -> tuple[int, int, int]:
        """Local bytes of (parameters, gradients, parameters whose optimizer states are here)."""
        values, sizes = self.region.graph.values, self.mesh.sizes
        stored = gradients = updated = 0
        for i in sorted(self.region.slots.first):
            here = local_bytes(values[i], slots[i], sizes)
            part = local_bytes(values[i], self.shards.get(i, slots[i]), sizes)
            stored += here
            if values[i].requires_grad:
                # Under ZeRO-3 a parameter that is not sharded itself is whole in everything.
                gradients += part if zero == 2 else here
                updated += part if zero in (1, 2) else here
        return stored, gradients, updated

    def _optimizer_s(self, num_bytes: int) -> float:
        """A share of the optimizer's one pass: without its launch."""
        whole_s = optimizer_s(num_bytes, self.costs, self.optimizer)
        return whole_s - self.costs.launch_s if num_bytes else 0.0

    def _shard(self, i: int) -> Layout | None:
        """Slot i sharded on dp, if it divides and the ops read it through a bucket."""
        if self.axis is None:
            return None
        stored, demands = self.demands[i]
        if any(layout[self.axis] != REPLICATE for layout in demands):
            return None
        layout = zero3_layout(self.region.graph.values[i], stored, self.mesh.sizes, self.axis)
        return layout if layout[self.axis].is_shard else None

    def _used_bytes(self, i: int) -> int:
        return local_bytes(self.region.graph.values[i], self.demands[i][0], self.mesh.sizes)

    def _passing_bytes(self, memory: RegionMemory, sharded: tuple[int, ...]) -> int:
        """The worst of forward and backward: what is made inside, two regions' gathered
        parameters, buckets that are reduced."""
        gathered = sum(self._used_bytes(i) for i in sharded)
        inside = max(
            memory.forward_peak_bytes,
            memory.backward_peak_bytes - memory.saved_bytes,
            memory.reduction_bytes,
        )
        return inside + 2 * gathered
