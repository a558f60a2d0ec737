"""Where the states and activations of a region live: on which ranks, on the device or on its host.

    ZeRO 1, 2          parameters are stored as shards as under ZeRO 3, gathered once and whole from
                       the forward of a region to its backward (Rajbhandari et al. 2020,
                       arXiv:1910.02054)
    offload optimizer  gradients go to the host when they are reduced, the host updates its states,
                       parameters come back (Ren et al. 2021, arXiv:2101.06840). What the host needs
                       for its update is not priced: no figure of a host's memory is known
    offload            what the region keeps inside for its backward goes to the host in forward and
    activations        comes back in backward; values between regions stay

The link to the host carries both directions at once, each beside compute (passes/step_time.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.memory.step_memory import States
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import ITEM_BYTES, FoldedGraph, OpGraph, SlotKind, SourceKind
from meshfold.ir.spmd import REPLICATE, Layout
from meshfold.ir.strategy import Offload, RegionTyping
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.price.region import HostTraffic, layouts_of_values
from meshfold.passes.region.data_parallel import zero3_layout, zero_axes
from meshfold.passes.region.parameter_tables import stored_bytes


@dataclass(frozen=True)
class SlotFacts:
    """Which parameter slots of a region stand apart. tied: another slot or instance reads the same
    parameter. first: this region is the first to read it, so its states are counted here."""

    tied: frozenset[int]
    first: frozenset[int]


def data_shards(graph: OpGraph, typing: RegionTyping, mesh: Mesh) -> dict[int, Layout]:
    """Parameter slot -> its layout when also sharded on the axes of ZeRO, for those that can be:
    some dim divides, or nearly, and the ops read it through a bucket."""
    return _sharded(graph, typing, mesh, _gathered_axes(graph, typing, mesh))


def program_shards(
    folded: FoldedGraph, typings: Sequence[RegionTyping], mesh: Mesh
) -> list[dict[int, Layout]]:
    """data_shards per region; a parameter that several slots read is cut on the axes on which all
    of them gather it, since it is stored once."""
    pairs = list(zip((r.graph for r in folded.regions), typings, strict=True))
    axes = [_gathered_axes(graph, typing, mesh) for graph, typing in pairs]
    for group in folded.tied_slots:
        common = [k for k in zero_axes(mesh) if all(k in axes[r][i] for r, i in group)]
        for r, i in group:
            axes[r][i] = common
    return [_sharded(*pair, mesh, of) for pair, of in zip(pairs, axes, strict=True)]


def _gathered_axes(graph: OpGraph, typing: RegionTyping, mesh: Mesh) -> dict[int, list[int]]:
    """Parameter slot -> axes of ZeRO on which the ops want it whole."""
    axes = zero_axes(mesh)
    wanted = layouts_of_values(graph, typing)
    return {
        i: [k for k in axes if all(layout[k] == REPLICATE for layout in wanted[i][1])]
        for i, slot in enumerate(graph.slots)
        if slot.kind is SlotKind.PARAMETER
    }


def _sharded(
    graph: OpGraph, typing: RegionTyping, mesh: Mesh, axes: Mapping[int, Sequence[int]]
) -> dict[int, Layout]:
    """Slot -> layout, where cutting the parameter on the axes changes it."""
    found = {}
    for i, of_slot in axes.items():
        layout = zero3_layout(graph.values[i], typing.slots[i], mesh.sizes, of_slot)
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


def host_traffic(
    offload: Offload, memory: RegionMemory, num_updated_bytes: int, costs: CostModel
) -> HostTraffic:
    """What one instance sends over the link to the host."""
    if offload == "activations":
        return HostTraffic(kept_s=costs.host_s(memory.saved_bytes))
    if offload == "optimizer":
        return HostTraffic(gradients_s=costs.host_s(num_updated_bytes))
    return HostTraffic()


def slot_facts(folded: FoldedGraph) -> list[SlotFacts]:
    """Per region."""
    users: dict[str, list[tuple[int, int]]] = {}
    for k, instance in enumerate(folded.instances):
        for i, source in enumerate(instance.sources):
            if source.kind is SourceKind.PARAMETER:
                users.setdefault(source.name, []).append((k, i))
    tied: list[set[int]] = [set() for _ in folded.regions]
    later: list[set[int]] = [set() for _ in folded.regions]
    every: list[set[int]] = [set() for _ in folded.regions]
    for places in users.values():
        for n, (k, i) in enumerate(places):
            region = folded.instances[k].region
            every[region].add(i)
            if len(places) > 1:
                tied[region].add(i)
            if n:
                later[region].add(i)
    return [
        SlotFacts(frozenset(t), frozenset(e - late))
        for t, e, late in zip(tied, every, later, strict=True)
    ]


def program_states(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    mesh: Mesh,
    offloads: Sequence[Offload] | None = None,
    reads: ProgramReads | None = None,
) -> States:
    """What is there all the time. A source that several instances read counts once; parameters
    that no op reads are whole, and so are their states. offloads, reads: as for step_memory."""
    reads = reads or program_reads(folded)
    parameters = trained = buffers = inputs = 0
    for p in reads.unread:
        num_bytes = math.prod(p.shape) * ITEM_BYTES[p.dtype]
        parameters += num_bytes
        trained += num_bytes if p.requires_grad else 0
    for (r, first), count in reads.count_first(folded).items():
        graph, layouts = folded.regions[r].graph, typings[r].slots
        parameters += count * _slots_bytes(graph, first.parameters, layouts, mesh)
        buffers += count * _slots_bytes(graph, first.buffers, layouts, mesh)
        inputs += count * _slots_bytes(graph, first.inputs, layouts, mesh)
        if offloads is None or offloads[r] != "optimizer":
            trained += count * _slots_bytes(graph, first.trained, layouts, mesh)
    return States(parameters, trained, buffers, inputs)


def _slots_bytes(
    graph: OpGraph, slots: Sequence[int], layouts: Sequence[Layout], mesh: Mesh
) -> int:
    """Local bytes of these slots, `layouts` being those of all slots."""
    return sum(stored_bytes(graph.values[i], layouts[i], mesh.sizes) for i in slots)
