"""The parameters of one layer of a pipeline: what is stored, gathered and reduced, in bytes.

    ZeRO  between steps  in a step                   gradients                 optimizer states
    0     unsharded      unsharded                   unsharded, reduced once   unsharded
    1     shards         gathered once               unsharded, reduced once   shards
    2     shards         gathered once               shards, every microbatch  shards
    3     shards         gathered for every forward  shards, every microbatch  shards
                         and backward

`once` is once per step, for all of its microbatches. A parameter that several layers read is stored
unsharded, since devices that have it must have the same. With one stage it is there once: each of
its layers is charged an equal share of parameter and states, rounded up; the gradient of each use
is reduced by itself. With several stages each layer is charged all of it, too much where they are
on one stage. Expert weights are shards on ep already and are sharded on dp alone. All costs are of
one rank.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.op_costs.optimizers import Update
from meshfold.ir.mesh import DATA_AXIS, REPLICATE_AXIS, SHARD_AXIS, Mesh
from meshfold.ir.op_graph import OpGraph, SlotKind, Value
from meshfold.ir.spmd import INVARIANT, Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.memory.zero import sharded_layout
from meshfold.passes.price.parameter_groups import is_unbucketed, parameter_copies
from meshfold.passes.price.parameters import (
    GroupCopies,
    local_bytes,
    local_update,
    member_copies,
    widening,
)

PIPELINE_ZERO_LEVELS = (0, 1, 2, 3)

Axes = tuple[str, ...]
"""Names of the axes of one group of ranks, of the storage mesh (meshfold.ir.mesh)."""


@dataclass(frozen=True)
class Parameter:
    """One parameter slot: its value and layout on the mesh without dp, the axes of that mesh on
    which its gradient is a pending sum, and how many layers of the program read it, at the instance
    where most do and where fewest do."""

    value: Value
    layout: Layout
    summed: Axes
    num_holders: int
    least_holders: int = 1


def parameters_of(
    graph: OpGraph, typing: RegionTyping, mesh: Mesh, num_holders: Sequence[tuple[int, int]]
) -> tuple[Parameter, ...]:
    """The parameter slots of a region typed on `mesh`. num_holders: per slot, most and fewest."""
    wanted = layouts_of_values(graph, typing)
    found = []
    for i, slot in enumerate(graph.slots):
        if slot.kind is SlotKind.PARAMETER:
            stored, demands = wanted[i]
            summed = tuple(
                name
                for k, name in enumerate(mesh.names)
                if stored[k] == INVARIANT and any(layout[k].kind == "R" for layout in demands)
            )
            found.append(Parameter(graph.values[i], stored, summed, *num_holders[i]))
    return tuple(found)


def data_axes(mesh: Mesh) -> Axes:
    """The axes of the storage mesh that dp is."""
    if mesh.names[:1] != (DATA_AXIS,):
        return ()
    return (REPLICATE_AXIS, SHARD_AXIS) if mesh.replicas > 1 else (DATA_AXIS,)


@dataclass(frozen=True)
class _Placed:
    """A parameter under one ZeRO level, on the storage mesh. unsharded, layout: in a step and
    between steps; shard_axes: the axes between them, in the order of the mesh; rest: those that its
    gradient is all-reduced over."""

    unsharded: Layout
    layout: Layout
    shard_axes: Axes
    rest: Axes


def _place(parameter: Parameter, zero: int, mesh: Mesh) -> _Placed:
    has_data = mesh.names[:1] == (DATA_AXIS,)
    unsharded = (*(INVARIANT for _ in range(has_data)), *parameter.layout)
    is_unsharded = parameter.num_holders > 1 or not zero
    layout = unsharded if is_unsharded else sharded_layout(parameter.value, unsharded, mesh)
    unsharded, layout = mesh.on_storage(unsharded), mesh.on_storage(layout)
    names = mesh.storage.names
    shard_axes = tuple(n for n, a, b in zip(names, unsharded, layout, strict=True) if a != b)
    summed = *data_axes(mesh), *parameter.summed
    rest = tuple(name for name in summed if name not in shard_axes)
    return _Placed(unsharded, layout, shard_axes, rest)


def _is_summed(placed: _Placed, zero: int, value: Value) -> bool:
    """Whether gradients are added up in a buffer that is reduced, or cast, once per step
    (meshfold.zero.microbatch_state)."""
    return zero == 1 if placed.shard_axes else bool(placed.rest or value.master)


@dataclass(frozen=True, slots=True)
class HostShare:
    """What the host has of parameters that it updates: bytes of these, and of the device's copies
    of them; what the optimizer keeps and does."""

    updated: int = 0
    copied: int = 0
    update: Update = Update()

    def __add__(self, other: "HostShare") -> "HostShare":
        update = self.update + other.update
        return HostShare(self.updated + other.updated, self.copied + other.copied, update)


class LayerParameters:
    """The parameters of a region under one ZeRO level: sums of bytes, the buckets of their
    collectives, and seconds of copies. mesh: the axes dp, ep, cp and tp that have several ranks;
    costs: of a mesh with these axes, and others. num_stages: that the layers are divided into.

    stored, gradients, results (of reductions); tied: (bytes, holders); leaving: gradients that are
    final with every backward. alone, also_elsewhere: what the host would have of trained parameters
    that no other layer reads, and of the others.

    seconds: of the collectives of one kind, as far as they are known (layers.StageContext).

    copies_forward_s, copies_backward_s, copies_once_s: seconds of copies into and out of buckets
    (passes/price/parameters.py) beyond those of a program without dp: with every forward and
    backward of a microbatch, and once per step.

    added_s: seconds in which gradients of a microbatch are added to those before; left_s: of these,
    what is not for gradients that leave for the host.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        zero: int,
        mesh: Mesh,
        costs: CostModel,
        optimizer: str,
        num_stages: int,
    ) -> None:
        self.stored = self.gradients = self.results = self.leaving = 0
        self.optimizer = optimizer
        self.alone = self.also_elsewhere = HostShare()
        self.tied: list[tuple[int, int]] = []
        self.copies_forward_s = self.copies_backward_s = self.copies_once_s = 0.0
        self.added_s = self.left_s = 0.0
        self._packed_last = 0
        """Bytes of shards that are copied into a buffer once per step (HSDP)."""
        self.seconds: dict[tuple[str, bool], float] = {}
        self._shared = Counter[tuple[str, bool, Axes]]()
        self._own = defaultdict[tuple[str, bool, Axes], list[int]](list)
        self._zero, self._mesh, self._costs = zero, mesh, costs.storage
        for parameter in parameters:
            self._add(parameter, parameter.least_holders if num_stages == 1 else 1)

    @property
    def trained(self) -> "HostShare":
        """What the host would have of all parameters that the optimizer updates."""
        return self.alone + self.also_elsewhere

    def buckets(self, kind: str, *, is_once: bool = False) -> Iterator[tuple[Axes, int]]:
        """(group of ranks, bytes) of each collective of one kind: once per step; or for every
        microbatch, gathers twice. One a group, and those that parameters have of their own."""
        groups = sorted({key for key in (*self._own, *self._shared) if key[:2] == (kind, is_once)})
        for key in groups:
            shared = [self._shared[key]] if self._shared[key] else []
            yield from ((key[2], num_bytes) for num_bytes in (*self._own[key], *shared))

    def num_bytes(self, kind: str, *, is_once: bool = False) -> int:
        """Of these collectives together."""
        return sum(num_bytes for _, num_bytes in self.buckets(kind, is_once=is_once))

    def _add(self, parameter: Parameter, num_sharers: int) -> None:
        value, zero, placed = parameter.value, self._zero, _place(parameter, self._zero, self._mesh)
        used, shard_bytes = (
            local_bytes(value, x, self._mesh.storage.sizes)
            for x in (placed.unsharded, placed.layout)
        )
        wide = widening(value)
        is_alone = self._add_copies(parameter, placed)
        kept = -(-wide * shard_bytes // num_sharers)
        self.stored += kept
        if placed.shard_axes:
            self._send("all_gather", zero < 3, placed.shard_axes, used, is_alone)
        if not value.requires_grad:
            return
        # Gradients that are reduced are added up over microbatches for each use by itself
        # (meshfold.zero.microbatch_state), others in the one parameter.
        full = wide * (used if zero == 1 else shard_bytes)
        gradient_bytes = full if placed.rest or num_sharers == 1 else kept
        self.gradients += gradient_bytes
        self.results += wide * shard_bytes
        is_summed = _is_summed(placed, zero, value)
        if is_summed:
            # Added where the first ones were copied to: the sum is read besides.
            added_s = self._costs.compute_s(0.0, gradient_bytes, value.stored_dtype)
            added_s = max(0.0, added_s - self._costs.launch_s)
        else:
            # Both are read, and the sum is written.
            added_s = self._costs.compute_s(0.0, 3 * gradient_bytes, value.stored_dtype)
        self.added_s += added_s
        update = local_update(value, placed.layout, self._mesh.storage.sizes, self.optimizer)
        is_read_once = parameter.num_holders == 1
        copied = shard_bytes if is_read_once else kept
        share = HostShare(kept, copied, update.shared_by(num_sharers))
        if is_read_once:
            self.alone += share
        else:
            self.also_elsewhere += share
        # Others are added up on the device and reduced, or cast, once.
        is_final = zero > 1 if placed.shard_axes else not value.master
        if is_read_once and is_final and not placed.rest:
            self.leaving += gradient_bytes
        else:
            self.left_s += added_s
        if placed.shard_axes:
            self._send("reduce_scatter", zero == 1, placed.shard_axes, wide * used, is_alone)
        if placed.rest:
            self._send("all_reduce", True, placed.rest, wide * shard_bytes, False)
            self._packed_last += 0 if is_summed else wide * shard_bytes
        if parameter.num_holders > 1 and num_sharers == 1:
            self.tied.append((wide * used, parameter.num_holders))

    def _send(self, kind: str, is_once: bool, axes: Axes, num_bytes: int, is_alone: bool) -> None:
        if is_alone:
            self._own[kind, is_once, axes].append(num_bytes)
        else:
            self._shared[kind, is_once, axes] += num_bytes

    def _add_copies(self, parameter: Parameter, placed: _Placed) -> bool:
        """Whether the parameter has collectives of its own, once its copies are added."""
        value, costs, zero = parameter.value, self._costs, self._zero
        unsharded, layout = (
            _on(costs.mesh, self._mesh.storage, x) for x in (placed.unsharded, placed.layout)
        )
        gather = [costs.mesh.index(name) for name in placed.shard_axes]
        before, (gathered, reduced) = GroupCopies(), (GroupCopies(), GroupCopies())
        if parameter.summed or value.master:
            before = member_copies(value, unsharded, (), costs)
        if placed.shard_axes or placed.rest or value.master:
            gathered = reduced = parameter_copies(value, layout, gather, costs)
            if zero == 1:
                # Gradients that are added up over microbatches are copied: autograd may share them.
                reduced = member_copies(value, layout, gather, costs)
        self.copies_backward_s += reduced.reduced_s - before.reduced_s
        is_once = bool(placed.shard_axes) and zero < 3
        self.copies_once_s += gathered.gathered_s if is_once else 0.0
        repeated_s = (0.0 if is_once else gathered.gathered_s) - before.packed_s
        self.copies_forward_s += repeated_s
        self.copies_backward_s += repeated_s
        return is_unbucketed(value, layout, gather, costs)

    def workspace_bytes(self, memory: RegionMemory, *, is_only: bool) -> int:
        """The worst of forward, backward and reduction: temporaries, two layers' gathered
        parameters, a reduction in flight, flat buffers and results of the layer's own. is_only:
        whether there is one microbatch; the sums of several are what is reduced once per step."""
        inside = memory.backward_peak_bytes - memory.saved_bytes
        gathered, scattered = self.num_bytes("all_gather"), self.num_bytes("reduce_scatter")
        late = self.num_bytes("reduce_scatter", is_once=True)
        summed = self.num_bytes("all_reduce", is_once=True)
        buckets = scattered + (late + summed if is_only else self._packed_last)
        results = self.results * bool(buckets + late)
        return max(
            memory.forward_peak_bytes + 2 * gathered + self.num_bytes("all_gather", is_once=True),
            inside + 2 * gathered + scattered,
            sum(memory.slot_gradient_bytes) + gathered + buckets + results,
        )


def _on(mesh: Mesh, own: Mesh, layout: Layout) -> Layout:
    """A layout on `own` on a mesh that has its axes, and others."""
    types = dict(zip(own.names, layout, strict=True))
    return tuple(types.get(name, INVARIANT) for name in mesh.names)
