"""What one instance of a region costs under every candidate of the decision tree, on one mesh.

The region search (passes/region/typing.py) has typed the ops; below it a candidate decides which
parameters are stored as shards on dp, what of the forward is recomputed, what is in the host's
memory (passes/memory/zero.py). Nothing of that changes the types of ops, so a candidate is priced
from the region's price and memory by arithmetic:

    time_s      max(f + c, g, k, p) + max(b + c, g + d, k, u) + optimizer   (passes/price/step.py)
    states      parameters and optimizer states, and gradients where they outlive the activations
    retained    activations for the backward, values passed to the next instance included
    stepping    what the optimizer makes of these parameters while it steps
    reducing    buckets of the gradients of shards, and what is scattered from them
    in_flight   of these, what is still read while the next instance runs
    workspace   besides, while the instance runs: parameters that are gathered, or come from the
                host, for as long, buckets, temporaries

ZeRO-3 is decided parameter by parameter (OSDP, Jiang et al. 2023): gathers and reductions of a
region share buckets, so every byte sharded costs alike and the candidates in between shard the
largest parameters first. A parameter that several instances read has one layout: all such
parameters are sharded together or not at all, and a candidate says which (ties).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.op_costs.optimizers import Update
from meshfold.ir.options import LayoutPin
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import (
    BESIDE_SELECTIVE,
    UPDATED_BY_HOST,
    Offload,
    Recompute,
    RegionTyping,
    UniformStrategy,
)
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.memory.local_program import parameter_use
from meshfold.passes.memory.typed_region import TypedRegion
from meshfold.passes.memory.zero import SlotFacts, copied_bytes, host_traffic
from meshfold.passes.price.parameters import local_bytes, local_update, stored_bytes
from meshfold.passes.price.region import RegionPrice
from meshfold.passes.price.step import ends_s, host_optimizer_s, instance_s, optimizer_s


@dataclass(frozen=True, eq=False)
class StrategyCandidate:
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
    stepping_bytes: int
    gathered_bytes: int
    reducing_bytes: int
    in_flight_bytes: int
    workspace_bytes: int

    @property
    def overlapped_s(self) -> float:
        """Seconds of work that other work may hide: recomputation, copies to the host and back."""
        host = self.price.host
        moved_s = 2 * host.saved_s + host.gradients_s + host.parameters_s + host.by_layer_s
        if self.strategy.recompute == "none":
            return moved_s
        return moved_s + self.price.recomputed.compute_s + self.price.recomputed.graph_s

    @property
    def retained_bytes(self) -> int:
        """Activations inside, and gathered parameters, resident until the backward."""
        inside = 0 if self.strategy.offload == "activations" else self.memory.saved_bytes
        return inside + (0 if self.typing.reshard_after_forward else self.gathered_bytes)

    @property
    def ends_s(self) -> float:
        return ends_s(self.price)

    @property
    def key(self) -> tuple[UniformStrategy, tuple[int, ...]]:
        """Unique among all candidates of a region."""
        return self.strategy, self.sharded

    @cached_property
    def name(self) -> str:
        """How people read it; unique among the candidates of a region that may stand together."""
        sharded = len(self.sharded)
        if 0 < sharded < self.num_shardable:
            level = f"zero{self.strategy.zero}"
            only = f"{level} for {sharded} of {self.num_shardable} parameters"
            return self.strategy.label.replace(level, only)
        return self.strategy.label

    @property
    def states_bytes(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes

    @property
    def resident_bytes(self) -> int:
        """States, and the larger of activations and what there is while the optimizer steps."""
        return self.states_bytes + max(
            self.retained_bytes, self.gradient_bytes + self.stepping_bytes
        )


@dataclass(frozen=True)
class RegionChoices:
    """A region as the candidates see it."""

    typed: TypedRegion
    slots: SlotFacts
    shards: Mapping[int, Layout]
    """Layouts of the parameters that can be shards on dp."""

    pinned: Mapping[int, LayoutPin]


def region_candidates(
    region: RegionChoices, strategies: Sequence[UniformStrategy], costs: CostModel, optimizer: str
) -> list[StrategyCandidate]:
    """The candidates of a region for strategies that differ below the role of tp."""
    parameters = _Parameters(region, costs, optimizer)
    candidates = []
    distinct = region.typed.distinct(list(dict.fromkeys(s.recompute for s in strategies)))
    kinds = dict.fromkeys((s.recompute, s.offload) for s in strategies if s.recompute in distinct)
    for recompute, offload in kinds:
        alike = [s for s in strategies if (s.recompute, s.offload) == (recompute, offload)]
        levels = {s.zero: s for s in alike}
        for level, sharded in parameters.choices(set(levels)):
            candidates.append(parameters.candidate(levels[level], sharded))
    return candidates


def most_sharded(
    candidates: Sequence[StrategyCandidate],
) -> dict[UniformStrategy, StrategyCandidate]:
    """The candidate of each strategy with most parameters sharded, of equal ones the first."""
    found: dict[UniformStrategy, StrategyCandidate] = {}
    for candidate in candidates:
        known = found.setdefault(candidate.strategy, candidate)
        if len(candidate.sharded) > len(known.sharded):
            found[candidate.strategy] = candidate
    return found


def alike(strategy: UniformStrategy) -> list[UniformStrategy]:
    """`strategy`, and what it is in a region that has no candidate for it: one without ZeRO where
    nothing can be sharded, selective recomputation where light or heavy is no other."""
    words: list[Recompute] = [strategy.recompute]
    if strategy.recompute in BESIDE_SELECTIVE:
        words.append("selective")
    return [replace(strategy, zero=zero, recompute=x) for zero in (strategy.zero, 0) for x in words]


def _update(summed: Sequence[int]) -> Update:
    """Of bytes of states, made at once in a step and moved by it, and flops."""
    state_bytes, together_bytes, moved_bytes, flops = summed
    return Update(state_bytes, together_bytes, 0, moved_bytes, flops)


class _Parameters:
    """The parameters of one region on the data parallel axis."""

    def __init__(self, region: RegionChoices, costs: CostModel, optimizer: str) -> None:
        self.region = region
        self.costs = costs
        self.optimizer = optimizer
        self.mesh = costs.mesh
        graph = region.typed.graph
        pinned = region.pinned
        replicated = {i for i, pin in pinned.items() if pin.value == "replicate"}
        self.shards = {i: x for i, x in region.shards.items() if i not in replicated}
        self._wanted = {i for i, pin in pinned.items() if pin.on_dp}
        demands = layouts_of_values(graph, region.typed.typing)
        sizes = self.mesh.sizes
        self._used_bytes = {
            i: local_bytes(graph.values[i], demands[i][0], sizes) for i in self.shards
        }
        """Local bytes of a parameter as ops read it."""
        self._reduced = {i: self._reduction(i, demands[i][0]) for i in self.shards}
        """Bytes of the buckets of its gradient, and of these in flight."""
        unsharded = dict(enumerate(region.typed.typing.slots))
        self._unsharded = self._states(region.slots.first, unsharded)
        self._saved: dict[int, tuple[int, ...]] = {}
        """What the shards of each parameter take off that."""
        for i, layout in self.shards.items():
            before, after = self._states((i,), unsharded), self._states((i,), {i: layout})
            self._saved[i] = tuple(a - b for a, b in zip(before, after, strict=True))
        self._tied = region.slots.tied & self.shards.keys()

    def choices(self, levels: set[int]) -> list[tuple[int, tuple[int, ...]]]:
        """The (ZeRO level, sharded slots) worth a candidate: none, the largest few, all; tied ones
        together. Every byte sharded costs alike, so sets in between differ in size alone."""
        wanted = self._wanted
        if wanted - self.shards.keys():
            return []
        everything = tuple(sorted(self.shards))
        found: list[tuple[int, tuple[int, ...]]] = [(0, ())] if 0 in levels and not wanted else []
        found += [
            (level, everything)
            for level in (1, 2)
            if level in levels and (everything or levels == {level})
        ]
        if 3 not in levels:
            return found
        if levels == {3}:
            return [(3, everything)]
        tied = self._tied
        optional = self.shards.keys() - tied - wanted
        by_size = sorted(optional, key=lambda i: (-self._used_bytes[i], i))
        together = [wanted | tied] if wanted & tied or not tied else [wanted, wanted | tied]
        for also in together:
            for k in range(len(by_size) + 1):
                sharded = tuple(sorted({*by_size[:k], *also}))
                found += [(3, sharded)] if sharded else []
        return found

    def candidate(self, strategy: UniformStrategy, sharded: tuple[int, ...]) -> StrategyCandidate:
        """The costs of one candidate."""
        typed = self.region.typed
        typing, memory = typed.typed(strategy.recompute), typed.memory(strategy.recompute)
        slots = list(typing.slots)
        saved = [self._saved[i] for i in sharded]
        stored, updated, copied, tied_bytes, *of_update = (
            whole - sum(less) for whole, *less in zip(self._unsharded, *saved, strict=True)
        )
        update = _update(of_update)
        for i in sharded:
            slots[i] = self.shards[i]
        is_here, reshard = strategy.offload not in UPDATED_BY_HOST, strategy.reshard_after_forward
        by_layer = (copied - tied_bytes) * (strategy.offload == "parameters")
        price = typed.pricer.price(
            slots,
            typing.recompute,
            reshard_after_forward=reshard,
            host=host_traffic(strategy.offload, memory, updated, copied, tied_bytes, self.costs),
            selective=typed.added(strategy.recompute),
        )
        tied = self._tied
        num_free = sum(i not in tied for i in sharded)
        return StrategyCandidate(
            strategy=strategy,
            sharded=sharded,
            num_shardable=len(self.shards),
            ties=num_free < len(sharded) if tied else None,
            is_partial=0 < num_free < len(self.shards) - len(tied),
            typing=replace(typing, slots=tuple(slots), reshard_after_forward=reshard),
            price=price,
            memory=memory,
            time_s=instance_s(price, self.costs.cluster.overlap_slowdown)
            + self._optimizer_s(update, strategy.offload),
            parameter_bytes=stored if is_here else stored - updated + copied - by_layer,
            gradient_bytes=updated * is_here,
            optimizer_bytes=update.state_bytes * is_here,
            stepping_bytes=update.together_bytes * is_here,
            gathered_bytes=sum([self._used_bytes[i] for i in sharded]),
            reducing_bytes=sum([self._reduced[i][0] for i in sharded]),
            in_flight_bytes=sum([self._reduced[i][1] for i in sharded]),
            workspace_bytes=self._workspace_bytes(memory, sharded, strategy) + 2 * by_layer,
        )

    def _reduction(self, slot: int, used: Layout) -> tuple[int, int]:
        value = self.region.typed.graph.values[slot]
        use = parameter_use(slot, value, self.shards[slot], used, self.costs)
        if use.how != "gathered" or not value.requires_grad:
            return 0, 0
        bucket = 0 if use.is_unbucketed else use.flat_bytes
        return bucket + use.stored_bytes, use.in_flight_bytes

    def _states(self, slots: Collection[int], layouts: Mapping[int, Layout]) -> tuple[int, ...]:
        """Local bytes of those of these parameters whose states are counted here, of those of them
        that are updated, of the device's copies of these, if the host stores them, and of those
        of them that others read, too; then what the optimizer keeps and does for them, as _update
        takes it."""
        values, sizes = self.region.typed.graph.values, self.mesh.sizes
        counted = self.region.slots.first.intersection(slots)
        stored = {i: stored_bytes(values[i], layouts[i], sizes) for i in counted}
        updated = sum(size for i, size in stored.items() if values[i].requires_grad)
        trained = [i for i in stored if values[i].requires_grad]
        tied, graph = self.region.slots.tied, self.region.typed.graph
        unsharded = [layouts.get(i, ()) for i in range(len(graph.slots))]
        shared = [i for i in trained if i in tied]
        copied, of_tied = (
            copied_bytes(graph, unsharded, of, tied, self.mesh) for of in (trained, shared)
        )
        update = Update()
        for i in trained:
            update += local_update(values[i], layouts[i], sizes, self.optimizer)
        summed = update.state_bytes, update.together_bytes, update.moved_bytes, update.flops
        return sum(stored.values()), updated, copied, of_tied, *summed

    def _optimizer_s(self, update: Update, offload: Offload) -> float:
        """A share of the optimizer's one pass, without its launch, or of the host's."""
        if offload in UPDATED_BY_HOST:
            return host_optimizer_s(update, self.costs, on_disk=offload == "disk")
        return optimizer_s(update, self.costs) - self.costs.launch_s if update.moved_bytes else 0.0

    def _workspace_bytes(
        self, memory: RegionMemory, sharded: tuple[int, ...], strategy: UniformStrategy
    ) -> int:
        """The worst of forward and backward: temporaries, two regions' gathered parameters where
        they are resharded, buckets that are reduced, a neighbour's activations in transfer."""
        gathered = 0
        if strategy.reshard_after_forward:
            gathered = sum([self._used_bytes[i] for i in sharded])
        backward, moving = memory.backward_peak_bytes, 0
        if strategy.offload == "activations":
            moving = memory.saved_bytes
        else:
            backward -= memory.saved_bytes
        return (
            max(memory.forward_peak_bytes, backward, memory.reduction_bytes) + moving + 2 * gathered
        )
