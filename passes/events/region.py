"""The events of one region (meshfold.ir.step_events): its local program, priced and traced.

    local program         passes/memory/local_program.py     ops and steps of conversions, as
                                                             emitted
    seconds               RegionPricer.op_times, passes/price/conversions.py
    bytes alive inside    cost_models/memory/live_ranges.py
    parameter groups      passes/price/parameter_groups.py

Forward and backward are one walk over the local program each, the backward in reverse: autograd
runs nodes in falling order of creation. A group is opened before the first step that reads a
member, so its gradients are complete after the backward of that step.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from meshfold.cost_models.memory.put_off_bytes import PutOffBytes
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.conversion_step import Step
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout
from meshfold.ir.step_events import CollectiveEvent, Event, ParameterGroupEvents, RegionEvents
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.memory.region import GradientsOf, MemoryModel, TracedRegion
from meshfold.passes.price.conversions import COLLECTIVES, step_actions
from meshfold.passes.price.op_time import InsideCollective, OpTimer
from meshfold.passes.price.parameter_groups import (
    ParameterGroupKey,
    changed_axes,
    group_copies,
    parameter_group_key,
)
from meshfold.passes.price.parameters import (
    GroupCopies,
    local_bytes,
    member_copies,
    stored_bytes,
)
from meshfold.passes.price.region import RegionPricer

ReducedAtEnd = Mapping[tuple[tuple[int, ...], str], int]
"""(axes of the storage mesh, dtype) -> bytes of gradients of one instance that are all-reduced at
the end."""

_Work = tuple[float, CollectiveEvent | None]
"""Kernels of so many seconds, or a collective."""


class Microbatch(Enum):
    """Which microbatch of a step events are of (meshfold.zero.microbatch_state)."""

    ONLY = auto()
    EDGE = auto()
    """Of several: the forward is that of the first, which gathers what stays unsharded, the
    backward that of the last, which reduces what was added up."""
    INNER = auto()
    """Of several: a forward behind the first, a backward between the first and the last."""
    BEGUN = auto()
    """As INNER, but with the backward of the first, which allocates the sums of gradients."""

    @property
    def is_last(self) -> bool:
        """Whether what is reduced once per step is so behind this backward."""
        return self in (Microbatch.ONLY, Microbatch.EDGE)


@dataclass(frozen=True)
class PricedRegion:
    """The events of one instance of a region, and the gradients reduced at the end of the step."""

    events: RegionEvents
    reduced_at_end: ReducedAtEnd
    put_off: PutOffBytes = PutOffBytes()


def collective(
    kind: str, num_bytes: int, axes: Sequence[int], costs: CostModel, seconds: float | None = None
) -> CollectiveEvent:
    """A collective over axes of the mesh of `costs` by number. seconds: if known."""
    if seconds is None:
        seconds = costs.collective_s(kind, num_bytes, axes)
    names = tuple(costs.mesh.names[k] for k in axes)
    return CollectiveEvent(kind, names, costs.group_link(axes).name, num_bytes, seconds)


def summed_over(
    of: CollectiveEvent, replicas: Sequence[int], num_shards: int, costs: CostModel
) -> CollectiveEvent:
    """A reduce-scatter among num_shards ranks whose shards are then all-reduced over replicas."""
    steps = of, collective("all_reduce", of.num_bytes // num_shards, replicas, costs)
    return replace(of, seconds=sum(step.seconds for step in steps), steps=steps)


def region_events(
    name: str,
    typing: RegionTyping,
    arriving: tuple[Layout, ...],
    pricer: RegionPricer,
    model: MemoryModel,
    floats: Sequence[float],
    microbatch: Microbatch = Microbatch.ONLY,
    gradients: GradientsOf = "one pass",
) -> PricedRegion:
    """The events of one instance whose values arrive as `arriving`. pricer: of the same ops under
    the same rules; model: on its mesh with the replicas of HSDP, which the pricer need not know;
    floats: its bindings; microbatch: that they are of; gradients: what becomes of those of
    parameters."""
    traced = model.traced(pricer.graph, typing, arriving, floats, gradients)
    return _Writer(name, pricer, typing, arriving, traced, model.costs, microbatch).write()


def bytes_inside(
    typing: RegionTyping,
    arriving: tuple[Layout, ...],
    graph: OpGraph,
    model: MemoryModel,
    floats: Sequence[float],
) -> dict[int | tuple[int, Step], tuple[int, int]]:
    """Bytes alive inside an instance at the worst moment of each op and each step of a conversion,
    forward and backward, in the order of the graph. Arguments are those of region_events."""
    traced = model.traced(graph, typing, arriving, floats)
    pairs = zip(traced.trace.forward_bytes, traced.trace.backward_bytes, strict=True)
    return dict(zip(traced.origins, pairs, strict=True))


class _Writer:
    """traced: with the values arriving as said."""

    def __init__(
        self,
        name: str,
        pricer: RegionPricer,
        typing: RegionTyping,
        arriving: tuple[Layout, ...],
        traced: TracedRegion,
        costs: CostModel,
        microbatch: Microbatch = Microbatch.ONLY,
    ) -> None:
        self.name = name
        self.microbatch = microbatch
        self.pricer = pricer
        self.costs = costs
        self.mesh = costs.mesh
        self.graph = pricer.graph
        self.typing, self.arriving = typing, arriving
        self.traced = traced
        self.program, self.trace = traced.program, traced.trace
        self.storage = self.costs.storage
        self.stored = [self.mesh.on_storage(x) for x in self.arriving]
        groups: dict[ParameterGroupKey, list[tuple[int, Layout]]] = {}
        for v, used in self.traced.materialized:
            read = self.mesh.on_storage(used)
            key = parameter_group_key(v, self.graph.values[v], self.stored[v], read, self.storage)
            if key is not None:
                groups.setdefault(key, []).append((v, used))
        self.groups = list(groups.items())
        tensor_of = traced.materialized
        self.group_of = {
            tensor_of[use]: b for b, (_, uses) in enumerate(self.groups) for use in uses
        }
        self.opened_at = self._opened_at()
        self.copies = [self._copies(key, uses) for key, uses in self.groups]

    def write(self) -> PricedRegion:
        at_end: dict[tuple[tuple[int, ...], str], int] = {}
        for key, uses in self.groups:
            if not (key.gather and key.requires_grad and self.microbatch.is_last):
                continue
            for v, used in uses:
                _, reduce = changed_axes(self.stored[v], self.mesh.on_storage(used))
                if self.sums_replicas:
                    reduce = tuple(k for k in reduce if k not in key.replicas)
                if reduce:
                    value = self.graph.values[v]
                    num_bytes = stored_bytes(value, self.arriving[v], self.mesh.sizes)
                    where = reduce, value.stored_dtype
                    at_end[where] = at_end.get(where, 0) + num_bytes
        events = RegionEvents(
            self.name,
            tuple(coalesced(self._forward())),
            tuple(coalesced(self._backward())),
            tuple(self._group_events(b) for b in range(len(self.groups))),
            self.typing.reshard_after_forward,
            tuple(coalesced(self._recomputation())),
        )
        return PricedRegion(events, at_end, self.trace.put_off)

    # Parameter groups.

    def _copies(self, key: ParameterGroupKey, uses: Sequence[tuple[int, Layout]]) -> GroupCopies:
        members = [(self.graph.values[v], self.stored[v]) for v, _ in uses]
        copies = group_copies(members, key.gather, self.storage)
        if self._is_summed(key):
            # Also where one parameter is alone: autograd may share its gradient.
            of = (
                member_copies(value, stored, key.gather, self.storage) for value, stored in members
            )
            copies = replace(copies, reduced_s=sum(each.reduced_s for each in of))
        return GroupCopies(reduced_s=copies.reduced_s) if self._is_there(key) else copies

    def _is_there(self, key: ParameterGroupKey) -> bool:
        """Whether the first microbatch has gathered the group for this one, too."""
        is_kept = bool(key.gather) and not self.typing.reshard_after_forward
        return is_kept and not self.microbatch.is_last

    def _is_left(self, key: ParameterGroupKey) -> bool:
        """Whether gradients are left to the last microbatch."""
        return self._is_summed(key) and not self.microbatch.is_last

    def _is_summed(self, key: ParameterGroupKey) -> bool:
        """Whether gradients are added up over microbatches before they are reduced."""
        is_once = self.typing.accumulate_unsharded or not key.gather
        return is_once and self.microbatch is not Microbatch.ONLY

    @property
    def sums_replicas(self) -> bool:
        """Whether the reductions of HSDP include those over replicas; else shards of earlier
        microbatches wait for them until the end."""
        return self.microbatch is Microbatch.ONLY or self.typing.accumulate_unsharded

    def _opened_at(self) -> list[int]:
        """First step that reads a member of each group; past the end if none does."""
        first = [len(self.program.steps)] * len(self.groups)
        for k in reversed(range(len(self.program.steps))):
            for t in self.program.steps[k].operands:
                if t in self.group_of:
                    first[self.group_of[t]] = k
        return first

    def _is_materialized(self, b: int) -> bool:
        key, _ = self.groups[b]
        return bool(key.gather or key.master)

    def _is_saved(self, b: int) -> bool:
        """Whether the backward reads what was gathered."""
        if not self._is_materialized(b) or not self.typing.reshard_after_forward:
            return False
        if self.trace.recompute_at >= 0:
            return True
        members = {self.traced.materialized[use] for use in self.groups[b][1]}
        return any(members & needs for needs in self.trace.needs)

    def _group_events(self, b: int) -> ParameterGroupEvents:
        key, uses = self.groups[b]
        gather, is_trained = key.gather, key.requires_grad
        costs = self.storage
        sizes = costs.mesh.sizes
        shards = math.prod(sizes[k] for k in gather)
        pairs = [(self.graph.values[v], self.stored[v]) for v, _ in uses]
        full_bytes = shards * sum(local_bytes(value, stored, sizes) for value, stored in pairs)
        shard_bytes = sum(stored_bytes(value, stored, sizes) for value, stored in pairs)
        reduction = None
        is_there = self._is_there(key)
        if is_trained and gather and not self._is_left(key):
            reduction = collective("reduce_scatter", shards * shard_bytes, gather, costs)
            if key.replicas and self.sums_replicas:
                reduction = summed_over(reduction, key.replicas, shards, costs)
        elif is_trained and key.reduce and not self._is_left(key):
            reduction = collective("all_reduce", shard_bytes, key.reduce, costs)
        return ParameterGroupEvents(
            gather=collective("all_gather", full_bytes, gather, costs)
            if gather and not is_there
            else None,
            reduce=reduction,
            unsharded_bytes=full_bytes if (gather or key.master) and not is_there else 0,
            flat_bytes=shards * shard_bytes if is_trained else 0,
            adds_to_sum=self._is_summed(key) and self.microbatch is not Microbatch.BEGUN,
            # What is all-reduced is so in place.
            result_bytes=shard_bytes if reduction is not None and gather else 0,
            saved=self._is_saved(b),
            dtype=pairs[0][0].stored_dtype,
            read_dtype=pairs[0][0].dtype,
            is_unbucketed=key.unbucketed is not None,
        )

    # The two walks.

    def _forward(self) -> Iterator[Event]:
        is_ahead = False
        for k in range(len(self.program.steps) + 1):
            inside = self.trace.forward_bytes[min(k, len(self.program.steps) - 1)]
            for b in self._opened(k):
                yield from _compute(self.copies[b].packed_s, inside)
                yield Event("unshard", inside_bytes=inside, number=b)
                yield from _compute(self.copies[b].unpacked_s, inside)
                if self._is_materialized(b) and not is_ahead:
                    yield Event("forward_prefetch", inside_bytes=inside)
                    is_ahead = True
            if k < len(self.program.steps):
                yield from _events(self._step_forward(k), inside)

    def _backward(self) -> Iterator[Event]:
        has_arrived = not any(map(self._is_saved, range(len(self.groups))))
        materialized = {t for t, b in self.group_of.items() if self._is_materialized(b)}
        before = self.trace.memory.saved_bytes
        for k in reversed(range(-1, len(self.program.steps) + 1)):
            is_step = 0 <= k < len(self.program.steps)
            inside = self.trace.backward_bytes[k] if is_step else before
            is_first_read = is_step and (
                k == self.trace.recompute_at or not materialized.isdisjoint(self.trace.needs[k])
            )
            if is_first_read and not has_arrived:
                has_arrived = True
                saved = [self.copies[b] for b in range(len(self.groups)) if self._is_saved(b)]
                yield from _compute(sum(c.packed_s for c in saved), before)
                yield Event("pre_backward", inside_bytes=before)
                yield from _compute(sum(c.unpacked_s for c in saved), before)
            if is_step and k == self.trace.recompute_at:
                yield Event("recompute", inside_bytes=self.trace.recompute_bytes)
            if is_step:
                yield from _events(self._step_backward(k), inside)
                before = self.trace.after_bytes[k]
            for b in self._opened(k):
                if self.groups[b][0].requires_grad:
                    yield from _compute(self.copies[b].reduced_s, before)
                    yield Event("reduce", inside_bytes=before, number=b)

    def _recomputation(self) -> Iterator[Event]:
        for k in sorted(self.trace.recomputed):
            yield from _events(self._step_forward(k, recomputed=True), self.trace.recompute_bytes)

    def _opened(self, k: int) -> list[int]:
        return [b for b, at in enumerate(self.opened_at) if at == k]

    def _step_forward(self, k: int, *, recomputed: bool = False) -> Iterator[_Work]:
        """The forward of a step; the first one, or one that is recomputed."""
        origin = self.traced.origins[k]
        if not isinstance(origin, int):
            yield from self._conversion(origin, 0)
            return
        yield self.pricer.op_times[origin].forward_s, None
        inside = self._inside(origin, is_backward=False)
        yield from (self._inline(c) for c in inside if not (recomputed and c.is_saved))

    def _step_backward(self, k: int) -> Iterator[_Work]:
        """The backward of a step."""
        origin = self.traced.origins[k]
        if not isinstance(origin, int):
            yield from self._conversion(origin, 1)
            return
        yield from (self._inline(c) for c in self._inside(origin, is_backward=True))
        yield self.pricer.op_times[origin].backward_s, None

    def _conversion(self, origin: tuple[int, Step], direction: int) -> Iterator[_Work]:
        """A step of a conversion, forward (0) or backward (1)."""
        v, step = origin
        action = step_actions(self.graph.values[v], step, self.costs)[direction]
        if action.kind not in COLLECTIVES:
            yield action.seconds, None
            return
        of = collective(action.kind, action.num_bytes, (step.axis,), self.costs, action.seconds)
        yield from ((action.before_s, None), (0.0, of), (action.after_s, None))

    def _inside(self, k: int, *, is_backward: bool) -> Iterator[InsideCollective]:
        """The collectives inside the rule of an op."""
        rules = self.pricer.rules[k]
        if not any(rule.comm for rule in rules):
            return
        timer = OpTimer(self.graph, self.graph.ops[k], self.costs)
        yield from (c for c in timer.inside(rules) if c.is_backward == is_backward)

    def _inline(self, c: InsideCollective) -> _Work:
        return 0.0, collective(c.kind, c.num_bytes, (c.axis,), self.costs, c.seconds)


def _events(works: Iterable[_Work], inside_bytes: int) -> Iterator[Event]:
    for seconds, of in works:
        if of is None:
            yield from _compute(seconds, inside_bytes)
        else:
            yield Event("inline", inside_bytes=inside_bytes, collective=of)


def _compute(seconds: float, inside_bytes: int) -> Iterator[Event]:
    if seconds or inside_bytes:
        yield Event("compute", seconds, inside_bytes)


def coalesced(events: Iterable[Event]) -> Iterator[Event]:
    """Kernels that follow each other are one event, at its worst moment."""
    open_event: Event | None = None
    for event in events:
        if event.kind == "compute" and open_event is not None:
            open_event = replace(
                open_event,
                seconds=open_event.seconds + event.seconds,
                inside_bytes=max(open_event.inside_bytes, event.inside_bytes),
            )
            continue
        if open_event is not None:
            yield open_event
        open_event = event if event.kind == "compute" else None
        if open_event is None:
            yield event
    if open_event is not None:
        yield open_event
