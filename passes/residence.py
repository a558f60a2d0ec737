"""Where the states and activations of a region live: on which ranks, on the device or on its host.

    ZeRO 1, 2          optimizer states, and under 2 gradients, as shards on dp of parameters that
                       are stored whole (Rajbhandari et al. 2020, arXiv:1910.02054)
    offload optimizer  gradients go to the host when they are reduced, the host updates its states,
                       parameters come back (Ren et al. 2021, arXiv:2101.06840). What the host needs
                       for its update is not priced: no figure of a host's memory is known
    offload            what the region keeps inside for its backward goes to the host in forward and
    activations        comes back in backward; values between regions stay

The link to the host carries both directions at once, each beside compute (passes/step_time.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.cost_model import CostModel
from meshfold.cost_models.memory import RegionMemory
from meshfold.cost_models.step_memory import InstanceMemory, States
from meshfold.mesh import Mesh
from meshfold.opgraph import ITEM_BYTES, FoldedGraph, OpGraph, SlotKind, Source, SourceKind
from meshfold.passes.data_parallel import zero3_layout
from meshfold.passes.parameter_prices import local_bytes
from meshfold.passes.region_price import HostTraffic, layouts_of_values
from meshfold.spmd import REPLICATE, Layout
from meshfold.strategy import Offload, RegionTyping, UniformStrategy


@dataclass(frozen=True)
class SlotFacts:
    """Which parameter slots of a region stand apart. tied: another slot or instance reads the same
    parameter. first: this region is the first to read it, so its states are counted here."""

    tied: frozenset[int]
    first: frozenset[int]


@dataclass(frozen=True)
class Residence:
    """Per slot (those of parameters matter) the layouts in which the gradient stays and in which
    optimizer states are; offload: as in UniformStrategy."""

    gradients: tuple[Layout, ...]
    states: tuple[Layout, ...]
    offload: Offload = "none"


def residence_of(
    graph: OpGraph, typing: RegionTyping, strategy: UniformStrategy, mesh: Mesh
) -> Residence:
    """Where a region of this typing keeps things under `strategy`."""
    sharded = list(typing.slots)
    if strategy.zero in (1, 2):
        for i, layout in data_shards(graph, typing, mesh).items():
            sharded[i] = layout
    gradients = tuple(sharded) if strategy.zero == 2 else typing.slots
    return Residence(gradients, tuple(sharded), strategy.offload)


def data_shards(graph: OpGraph, typing: RegionTyping, mesh: Mesh) -> dict[int, Layout]:
    """Parameter slot -> its layout when also sharded on dp, for those that can be: some dim divides
    and the ops read it through a bucket."""
    if "dp" not in mesh.names:
        return {}
    axis = mesh.index("dp")
    found = {}
    for i, (stored, demands) in enumerate(layouts_of_values(graph, typing)[: len(graph.slots)]):
        if graph.slots[i].kind is not SlotKind.PARAMETER:
            continue
        if any(layout[axis] != REPLICATE for layout in demands):
            continue
        layout = zero3_layout(graph.values[i], stored, mesh.sizes, axis)
        if layout[axis].is_shard:
            found[i] = layout
    return found


def updated_bytes(graph: OpGraph, residence: Residence, slots: SlotFacts, mesh: Mesh) -> int:
    """Local bytes of the parameters whose optimizer states are counted with this region."""
    return sum(
        local_bytes(graph.values[i], residence.states[i], mesh.sizes)
        for i in slots.first
        if graph.values[i].requires_grad
    )


def host_traffic(
    residence: Residence, memory: RegionMemory, num_updated_bytes: int, costs: CostModel
) -> HostTraffic:
    """What one instance sends over the link to the host."""
    if residence.offload == "activations":
        return HostTraffic(kept_s=costs.host_s(memory.saved_bytes))
    if residence.offload == "optimizer":
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


def first_uses(folded: FoldedGraph) -> dict[str, tuple[int, int]]:
    """Canonical parameter name -> (region, slot) of its first use."""
    found: dict[str, tuple[int, int]] = {}
    for instance in folded.instances:
        for i, source in enumerate(instance.sources):
            if source.kind is SourceKind.PARAMETER:
                found.setdefault(source.name, (instance.region, i))
    return found


def gradient_bytes(
    folded: FoldedGraph, residences: Sequence[Residence], mesh: Mesh
) -> dict[str, int]:
    """Canonical parameter name -> local bytes of its gradient that stay on the device."""
    return {
        name: 0
        if residences[r].offload == "optimizer"
        else local_bytes(folded.regions[r].graph.values[i], residences[r].gradients[i], mesh.sizes)
        for name, (r, i) in first_uses(folded).items()
    }


def offloaded(
    folded: FoldedGraph, instances: Sequence[InstanceMemory], residences: Sequence[Residence]
) -> list[InstanceMemory]:
    """The instances, those marked that keep their activations on the host."""
    return [
        replace(memory, is_offloaded=residences[instance.region].offload == "activations")
        for memory, instance in zip(instances, folded.instances, strict=True)
    ]


def program_states(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    mesh: Mesh,
    residences: Sequence[Residence] | None = None,
) -> States:
    """What is there all the time. A source that several instances read counts once; parameters
    that no op reads are whole, and so are their states. residences: as for step_memory."""
    per_slot = [
        [
            local_bytes(value, layout, mesh.sizes)
            for value, layout in zip(region.graph.values, typing.slots, strict=False)
        ]
        for region, typing in zip(folded.regions, typings, strict=True)
    ]
    sizes: dict[Source, int] = {}
    for instance in folded.instances:
        for source, num_bytes in zip(instance.sources, per_slot[instance.region], strict=True):
            if source.kind is not SourceKind.VALUE:
                sizes.setdefault(source, num_bytes)
    by_kind = dict.fromkeys(SourceKind, 0)
    for source, num_bytes in sizes.items():
        by_kind[source.kind] += num_bytes
    read = {s.name: size for s, size in sizes.items() if s.kind is SourceKind.PARAMETER}
    parameters = {
        p.name: read.get(p.name, math.prod(p.shape) * ITEM_BYTES[p.dtype])
        for p in folded.parameters
    }
    updated = parameters
    if residences is not None:
        updated = {**parameters, **_state_bytes(folded, residences, mesh)}
    return States(
        parameters=sum(parameters.values()),
        trained=sum(updated[p.name] for p in folded.parameters if p.requires_grad),
        buffers=by_kind[SourceKind.BUFFER] + by_kind[SourceKind.CONSTANT],
        inputs=by_kind[SourceKind.INPUT],
    )


def _state_bytes(
    folded: FoldedGraph, residences: Sequence[Residence], mesh: Mesh
) -> dict[str, int]:
    """Canonical parameter name -> local bytes of it that the device's optimizer updates."""
    return {
        name: 0
        if residences[r].offload == "optimizer"
        else local_bytes(folded.regions[r].graph.values[i], residences[r].states[i], mesh.sizes)
        for name, (r, i) in first_uses(folded).items()
    }
