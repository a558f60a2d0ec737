"""Placement of the states and activations of a region: on which ranks, on the device or its host.

    ZeRO 1, 2          parameters are stored as shards as under ZeRO 3, gathered once and unsharded
                       from the forward of a region to its backward (Rajbhandari et al. 2020,
                       arXiv:1910.02054)
    offload optimizer  parameters are stored on the host, in the dtype of their masters. They come
                       to the device with every forward, gradients go to the host when they are
                       reduced, the host updates its states (Ren et al. 2021, arXiv:2101.06840).
                       Gradients of a parameter with several uses wait for the last one
    offload            the same, and a parameter with one use is on the device only while its region
    parameters         runs, forward and backward, and the one before
    offload            what the region saves inside for its backward goes to the host in forward and
    activations        comes back in backward; values between regions remain

The link to the host carries both directions at once, both overlapped with compute
(passes/price/step.py).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.memory.step_memory import States
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.op_costs.optimizers import Update, update_of
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import (
    ITEM_BYTES,
    FoldedGraph,
    OpGraph,
    SlotKind,
    Value,
)
from meshfold.ir.spmd import INVARIANT, REPLICATE, Layout, PaddedShard, Shard, is_legal
from meshfold.ir.strategy import UPDATED_BY_HOST, Offload, RegionTyping, TpMode
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.price.parameters import copy_bytes, local_update, stored_bytes
from meshfold.passes.price.region import HostTraffic


@dataclass(frozen=True)
class SlotFacts:
    """Which parameter slots of a region are special."""

    tied: frozenset[int]
    """Another slot or instance reads the same parameter, or another slice of it."""
    first: frozenset[int]
    """This region is the first to read the parameter, so its states are counted here."""


def program_shards(
    folded: FoldedGraph, typings: Sequence[RegionTyping], mesh: Mesh, mode: TpMode = "tensor"
) -> list[dict[int, Layout]]:
    """Parameter slot -> its layout when also sharded on the axes of ZeRO, of each region, for
    those that can be: some dim divides, or nearly, and the ops read it through a bucket. A
    parameter that several slots read is sharded on the axes on which all of them gather it: it is
    stored once. mode: of tp in these typings."""
    pairs = list(zip((r.graph for r in folded.regions), typings, strict=True))
    axes = [gathered_axes(graph, typing, mesh, mode) for graph, typing in pairs]
    for group in folded.tied_slots:
        common = [k for k in zero_axes(mesh, mode) if all(k in axes[r][i] for r, i in group)]
        for r, i in group:
            axes[r][i] = common
    found = [zero_layouts(*pair, mesh, of) for pair, of in zip(pairs, axes, strict=True)]
    for instance in folded.instances:
        for i, source in enumerate(instance.sources):
            layout = found[instance.region].get(i)
            # Slices one after the other are whole rows; padding between them is not.
            if (
                source.slice
                and layout
                and any(t.padded and t.dim == source.slice.dim for t in layout)
            ):
                del found[instance.region][i]
    return found


def gathered_axes(
    graph: OpGraph, typing: RegionTyping, mesh: Mesh, mode: TpMode = "tensor"
) -> dict[int, list[int]]:
    """Parameter slot -> axes of ZeRO on which the ops want it unsharded. mode: of tp."""
    axes = zero_axes(mesh, mode)
    wanted = layouts_of_values(graph, typing)
    return {
        i: [k for k in axes if all(layout[k] == REPLICATE for layout in wanted[i][1])]
        for i, slot in enumerate(graph.slots)
        if slot.kind is SlotKind.PARAMETER
    }


def zero_layouts(
    graph: OpGraph, typing: RegionTyping, mesh: Mesh, axes: Mapping[int, Sequence[int]]
) -> dict[int, Layout]:
    """Slot -> layout, where sharding the parameter on the axes changes it."""
    found = {}
    for i, of_slot in axes.items():
        layout = zero3_layout(graph.values[i], typing.slots[i], mesh, of_slot)
        if layout != typing.slots[i]:
            found[i] = layout
    return found


def updated_bytes(graph: OpGraph, layouts: Sequence[Layout], slots: SlotFacts, mesh: Mesh) -> int:
    """Local bytes of the parameters whose optimizer states are counted with this region. layouts:
    of its slots."""
    return sum(
        stored_bytes(graph.values[i], layouts[i], mesh.sizes)
        for i in slots.first
        if graph.values[i].requires_grad
    )


def copied_bytes(
    graph: OpGraph,
    layouts: Sequence[Layout],
    slots: Iterable[int],
    tied: Collection[int],
    mesh: Mesh,
) -> int:
    """Local bytes of the device's copies of these parameters, if the host stores them."""
    return sum(
        copy_bytes(graph.values[i], layouts[i], mesh.sizes, is_tied=i in tied) for i in slots
    )


def host_traffic(
    offload: Offload,
    memory: RegionMemory,
    num_updated_bytes: int,
    num_copied_bytes: int,
    num_tied_bytes: int,
    costs: CostModel,
) -> HostTraffic:
    """What one instance sends over the link to the host. num_updated_bytes: of gradients that leave
    for it; num_copied_bytes: of parameters that come from it; num_tied_bytes: of those that others
    read, too."""
    if offload == "activations":
        return HostTraffic(saved_s=costs.host_s(memory.saved_bytes))
    if offload not in UPDATED_BY_HOST:
        return HostTraffic()
    return HostTraffic(
        gradients_s=costs.host_s(num_updated_bytes),
        parameters_s=costs.host_s(num_copied_bytes),
        by_layer_s=costs.host_s((num_copied_bytes - num_tied_bytes) * (offload == "parameters")),
    )


def slot_facts(folded: FoldedGraph, reads: ProgramReads) -> list[SlotFacts]:
    """The facts of every region. reads: of `folded`."""
    tied: list[frozenset[int]] = [frozenset()] * len(folded.regions)
    first: list[frozenset[int] | None] = [None] * len(folded.regions)
    for instance, of in zip(folded.instances, reads.instances, strict=True):
        r, before = instance.region, first[instance.region]
        # The slices of a parameter are stored alike, too.
        tied[r] |= of.tied.keys() | {i for i, s in enumerate(instance.sources) if s.slice}
        here = frozenset(of.first.parameters)
        first[r] = here if before is None else before & here
    return [SlotFacts(t, f or frozenset()) for t, f in zip(tied, first, strict=True)]


SCALAR_BYTES = 64
"""Of a step: the loss, what it is divided by, the gradient that the backward starts with. Counted
with the batch, whose inputs they outlive."""


def program_states(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    mesh: Mesh,
    offloads: Sequence[Offload] | None = None,
    reads: ProgramReads | None = None,
    *,
    optimizer: str | None = None,
) -> States:
    """What is resident all the time. A source that several instances read counts once; parameters
    that no op reads are unsharded, and so are their states. offloads, reads: as for
    MemoryModel.step. optimizer: None leaves out what it keeps and does."""
    reads = reads or program_reads(folded)
    parameters = trained = 0
    inputs = SCALAR_BYTES if folded.returns.has_loss else 0
    buffers = sum(math.prod(b.shape) * ITEM_BYTES[b.dtype] for b in reads.unread_buffers)
    update = Update()
    for p in reads.unread:
        num_bytes = math.prod(p.shape) * ITEM_BYTES[p.dtype]
        parameters += num_bytes
        trained += num_bytes if p.requires_grad else 0
        if optimizer and p.requires_grad:
            update += update_of(optimizer, p.shape, num_bytes, ITEM_BYTES[p.dtype])
    for (r, first), count in reads.count_first(folded).items():
        graph, layouts = folded.regions[r].graph, typings[r].slots
        offload = offloads[r] if offloads else "none"
        is_here = offload not in UPDATED_BY_HOST
        stored = first.parameters if is_here else sorted({*first.parameters} - {*first.trained})
        parameters += count * _slots_bytes(graph, stored, layouts, mesh)
        if not is_here:
            staying = first.tied if offload == "parameters" else first.trained
            parameters += count * copied_bytes(graph, layouts, staying, first.tied, mesh)
        buffers += count * _slots_bytes(graph, first.buffers, layouts, mesh)
        inputs += count * _slots_bytes(graph, first.inputs, layouts, mesh)
        if is_here:
            trained += count * _slots_bytes(graph, first.trained, layouts, mesh)
        if optimizer and is_here:
            for i in first.trained:
                of = local_update(graph.values[i], layouts[i], mesh.sizes, optimizer)
                update += of.times(count)
    return States(parameters, trained, buffers, inputs, update)


def _slots_bytes(
    graph: OpGraph, slots: Sequence[int], layouts: Sequence[Layout], mesh: Mesh
) -> int:
    """Local bytes of these slots, `layouts` being those of all slots."""
    return sum(stored_bytes(graph.values[i], layouts[i], mesh.sizes) for i in slots)


ZERO_AXES = ("dp", "ep", "cp")
"""Axes that shard the batch or the sequence."""


MOST_PADDING = 1.25
"""Most bytes of a shard relative to the even share: with more, a parameter is not sharded."""


def zero_axes(mesh: Mesh, mode: TpMode = "tensor") -> tuple[int, ...]:
    """The axes that ZeRO shards over: on ep, only parameters of no expert; tp, where its mode is to
    shard the batch."""
    names = (*ZERO_AXES, "tp") if mode == "data" else ZERO_AXES
    return tuple(k for k, a in enumerate(mesh.axes) if a.name in names and a.size > 1)


def zero3_layout(value: Value, stored: Layout, mesh: Mesh, axes: Sequence[int]) -> Layout:
    """`stored` with the parameter also sharded on the axes number `axes`, outermost first; on an
    axis where that would pad by more than MOST_PADDING it stays as it is. Under HSDP every replica
    of the mesh holds a copy.

    The first dim wins that all axes divide, on a dim that another axis shards the share inside of
    it: the local tensor is then split into contiguous equal shards. If none does, the axes are
    placed one by one, and where no dim divides, the one that needs the least padding is padded.
    """
    sizes = mesh.sizes
    inner = {t.dim: t.blocks * n for t, n in zip(stored, sizes, strict=True) if t.is_shard}
    for dim in range(len(value.shape)):
        for blocks in dict.fromkeys((inner.get(dim, 1), 1)):
            layout = list(stored)
            for axis in axes:
                layout[axis] = replace(Shard(dim, blocks), copies=mesh.axes[axis].replicas)
                blocks *= layout[axis].num_shards(sizes[axis])
            if is_legal(value.shape, tuple(layout), sizes):
                return tuple(layout)
    if len(axes) > 1:
        for axis in axes:
            stored = zero3_layout(value, stored, mesh, (axis,))
        return stored
    return _padded_layout(value, stored, mesh, axes[0]) if axes else stored


def sharded_layout(value: Value, layout: Layout, mesh: Mesh, mode: TpMode = "tensor") -> Layout:
    """`layout` with the parameter also sharded on the axes of ZeRO, where it is not yet. mode: of
    tp."""
    axes = [k for k in zero_axes(mesh, mode) if layout[k] == INVARIANT]
    return zero3_layout(value, layout, mesh, axes) if axes else layout


def _padded_layout(value: Value, stored: Layout, mesh: Mesh, axis: int) -> Layout:
    copies = mesh.axes[axis].replicas
    num_ranks = mesh.sizes[axis] // copies
    padding = {
        dim: -(-size // num_ranks) * num_ranks / size
        for dim, size in enumerate(value.shape)
        if size and all(t.dim != dim for t in stored)
    }
    dim = min(padding, key=lambda d: (padding[d], d), default=-1)
    if dim < 0 or padding[dim] > MOST_PADDING:
        return stored
    return (*stored[:axis], replace(PaddedShard(dim), copies=copies), *stored[axis + 1 :])


def whole_notes(
    graph: OpGraph, layouts: Sequence[Layout], slots: Iterable[int], mesh: Mesh, mode: TpMode
) -> list[str]:
    """What a plan says of parameters in these slots that ZeRO was to shard and did not. layouts: of
    all slots; mode: of tp. Nothing of those that ops read as shards on all axes of ZeRO."""
    axes = zero_axes(mesh, mode)
    num_ranks = math.prod(mesh.sizes[axis] for axis in axes) // mesh.replicas
    notes = []
    for i in slots:
        value, stored = graph.values[i], layouts[i]
        name = f"{graph.slots[i].name} {list(value.shape)}"
        if all(stored[axis].is_shard for axis in axes):
            continue
        if sharded_layout(value, stored, mesh, mode) == stored:
            notes.append(unsharded_note(name, num_ranks))
        else:
            notes.append(
                f"ZeRO keeps {name} whole: an op reads it as Invariant in the layouts that were "
                "found fastest, so that nothing gathers it"
            )
    return notes


def unsharded_note(name: str, num_ranks: int) -> str:
    """What a plan says of a parameter that zero3_layout leaves as it is."""
    return (
        f"ZeRO keeps {name} whole: no dim divides over {num_ranks} ranks, and padding one would "
        f"add more than {MOST_PADDING - 1:.0%}"
    )
