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
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class LayerCopies:
    """Seconds of copies into and out of buckets (passes/price/parameters.py) beyond those of a
    program without dp: with every forward and backward of a microbatch, and once per step. alone:
    by kind of collective and group of ranks the bytes of each parameter with a bucket of its own.
    """

    forward_s: float
    backward_s: float
    once_s: float
    alone: Mapping[tuple[str, Axes], Sequence[int]]


def copies_of(
    parameters: Sequence[Parameter], zero: int, mesh: Mesh, costs: CostModel
) -> LayerCopies:
    """Copies of the parameters of a region. mesh: as for ParameterSums; costs: of a mesh with its
    axes, and others."""
    forward_s = backward_s = once_s = 0.0
    alone = defaultdict[tuple[str, Axes], list[int]](list)
    costs = costs.storage
    for parameter in parameters:
        value, placed = parameter.value, _place(parameter, zero, mesh)
        unsharded, layout = (
            _on(costs.mesh, mesh.storage, x) for x in (placed.unsharded, placed.layout)
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
        if is_unbucketed(value, layout, gather, costs):
            used = local_bytes(value, unsharded, costs.mesh.sizes)
            alone["all_gather", placed.shard_axes].append(used)
            if value.requires_grad:
                alone["reduce_scatter", placed.shard_axes].append(widening(value) * used)
        backward_s += reduced.reduced_s - before.reduced_s
        is_once = bool(placed.shard_axes) and zero < 3
        once_s += gathered.gathered_s if is_once else 0.0
        repeated_s = (0.0 if is_once else gathered.gathered_s) - before.packed_s
        forward_s += repeated_s
        backward_s += repeated_s
    return LayerCopies(forward_s, backward_s, once_s, alone)


def _on(mesh: Mesh, own: Mesh, layout: Layout) -> Layout:
    """A layout on `own` on a mesh that has its axes, and others."""
    types = dict(zip(own.names, layout, strict=True))
    return tuple(types.get(name, INVARIANT) for name in mesh.names)


class ParameterSums:
    """Sums over the parameters of a region under one ZeRO level. mesh: the axes dp, ep, cp and
    tp that have several ranks. num_stages: that the layers are divided into.

    stored, gradients, updated (parameters whose optimizer states are here), update (what the
    optimizer keeps and does for these), copied (the device's
    copies of these, if the host stores them), gathered_once_bytes (gathered once and unsharded for
    the step); by group of ranks: gathered_once, gathered (twice
    per microbatch), scattered (gradients, per microbatch), scattered_once, reduced (all-reduced
    once); tied: (bytes, holders).
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        zero: int,
        mesh: Mesh,
        optimizer: str,
        num_stages: int,
    ) -> None:
        self.stored = self.gradients = self.results = self.updated = self.gathered_once_bytes = 0
        self.copied = 0
        self.optimizer, self.update = optimizer, Update()
        self.gathered_once: Counter[Axes] = Counter()
        self.gathered: Counter[Axes] = Counter()
        self.scattered: Counter[Axes] = Counter()
        self.scattered_once: Counter[Axes] = Counter()
        self.reduced: Counter[Axes] = Counter()
        self.tied: list[tuple[int, int]] = []
        for parameter in parameters:
            self._add(parameter, zero, mesh, parameter.least_holders if num_stages == 1 else 1)

    def _add(self, parameter: Parameter, zero: int, mesh: Mesh, num_sharers: int) -> None:
        value, placed = parameter.value, _place(parameter, zero, mesh)
        used, shard_bytes = (
            local_bytes(value, x, mesh.storage.sizes) for x in (placed.unsharded, placed.layout)
        )
        shard_axes, rest = placed.shard_axes, placed.rest
        wide = widening(value)
        kept = -(-wide * shard_bytes // num_sharers)
        self.stored += kept
        if shard_axes and zero == 3:
            self.gathered[shard_axes] += used
        elif shard_axes:
            self.gathered_once[shard_axes] += used
            self.gathered_once_bytes += used
        if not value.requires_grad:
            return
        # Gradients that are reduced are added up over microbatches for each use by itself
        # (meshfold.zero.microbatch_state), others in the one parameter.
        full = wide * (used if zero == 1 else shard_bytes)
        self.gradients += full if rest or num_sharers == 1 else kept
        self.results += wide * shard_bytes
        self.updated += kept
        update = local_update(value, placed.layout, mesh.storage.sizes, self.optimizer)
        self.update += update.shared_by(num_sharers)
        self.copied += shard_bytes if parameter.num_holders == 1 else kept
        if shard_axes:
            (self.scattered_once if zero == 1 else self.scattered)[shard_axes] += wide * used
        if rest:
            self.reduced[rest] += wide * shard_bytes
        if parameter.num_holders > 1 and num_sharers == 1:
            self.tied.append((wide * used, parameter.num_holders))

    def workspace_bytes(self, memory: RegionMemory) -> int:
        """The worst of forward, backward and reduction: temporaries, two layers' gathered
        parameters, a reduction in flight, flat buffers and results of the layer's own."""
        inside = memory.backward_peak_bytes - memory.saved_bytes
        gathered, scattered = self.gathered.total(), self.scattered.total()
        buckets = scattered + self.scattered_once.total() + self.reduced.total()
        result = self.results if buckets else 0
        return max(
            memory.forward_peak_bytes + 2 * gathered + self.gathered_once.total(),
            inside + 2 * gathered + scattered,
            sum(memory.slot_gradient_bytes) + gathered + buckets + result,
        )
