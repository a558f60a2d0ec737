"""Peak memory of a typed program: the local program of every region, probed and simulated.

    region + typing + layouts that arrive
        -> local program                          passes/local_program.py
        -> live ranges of one instance            cost_models/memory.py
        -> peak over all instances, by component  cost_models/step_memory.py

Instances whose values arrive in the same layouts share one simulation. Gathered parameters are
outside tensors: under ZeRO 3 not kept for the backward, but gathered again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.memory.live_ranges import LocalProgram, RegionMemory, simulate_region
from meshfold.cost_models.memory.step_memory import InstanceMemory, ParameterUse, compose_step
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph, Instance, OpGraph, SourceKind
from meshfold.ir.plan import MemoryEstimate
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import Offload, OpTyping, Recompute, RegionTyping
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.memory.local_program import LocalProgramBuilder, Probe
from meshfold.passes.memory.zero import program_states
from meshfold.passes.price.conversions import ConversionCosts

__all__ = ["Probe", "Simulations", "memory_of_region", "program_memory", "step_memory"]


Uses = tuple[tuple[int, ParameterUse], ...]
"""(slot, a use of its parameter), gradients staying as parameters are stored."""


@dataclass(frozen=True, eq=False)
class SimulatedRegion:
    """A simulation that instances share. The graph is held since its id is a key."""

    graph: OpGraph
    memory: RegionMemory
    uses: Uses


_Key = tuple[int, tuple[OpTyping, ...], tuple[Layout, ...], tuple[Layout, ...]]
"""(id of the graph, what its ops do, layouts that leave and that arrive)."""


class Simulations:
    """Everything simulated on one mesh, to use and to add to."""

    def __init__(self) -> None:
        self.regions: dict[tuple[_Key, Recompute], SimulatedRegion] = {}
        self._key: tuple[_Key, bool] | None = None
        self._latest: tuple[LocalProgram, Uses] | None = None

    def program(
        self, key: _Key, is_selective: bool, builder: Callable[[], LocalProgramBuilder]
    ) -> tuple[LocalProgram, Uses]:
        """A local program and its parameters. Full recomputation runs the same program in another
        order, and is asked for next: the latest one is at hand."""
        if self._latest is None or self._key != (key, is_selective):
            new = builder()
            self._key, self._latest = (key, is_selective), (new.build(), new.parameter_uses())
        return self._latest


def step_memory(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    mesh: Mesh,
    probe: Probe,
    *,
    costs: ConversionCosts,
    optimizer: str,
    reserve_bytes: int,
    capacity_bytes: int,
    known: Simulations | None = None,
    offloads: Sequence[Offload] | None = None,
    reads: ProgramReads | None = None,
) -> tuple[MemoryEstimate, tuple[int, ...]]:
    """(bytes per device at the peak of a training step, bytes that one instance of each region
    keeps for its backward).

    typings: per region, for `mesh`. probe answers what ops do to memory (meshfold.memory_probe.prober.OpProber).
    costs orders the conversions as the emitter does. optimizer: "adamw" or "sgd". known: as for
    program_memory. offloads: per region; None: nothing on hosts.
    reads: of `folded` or of the graph that it was split from, if at hand.
    """
    reads = reads or program_reads(folded)
    instances = program_memory(
        folded,
        typings,
        mesh,
        probe,
        costs=costs,
        known=known,
        offloads=offloads,
        reads=reads,
    )
    estimate, kept = compose_step(
        instances,
        [
            (o.source.instance, o.source.output)
            for o in folded.outputs
            if o.source.kind is SourceKind.VALUE
        ],
        program_states(folded, typings, mesh, offloads, reads),
        optimizer=optimizer,
        reserve_bytes=reserve_bytes,
        capacity_bytes=capacity_bytes,
    )
    by_region = [0] * len(folded.regions)
    for instance, num_bytes in zip(folded.instances, kept, strict=True):
        by_region[instance.region] = max(by_region[instance.region], num_bytes)
    return estimate, tuple(by_region)


def program_memory(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    mesh: Mesh,
    probe: Probe,
    *,
    costs: ConversionCosts,
    known: Simulations | None = None,
    offloads: Sequence[Offload] | None = None,
    reads: ProgramReads | None = None,
) -> list[InstanceMemory]:
    """Memory of every instance, in execution order. known: simulations to use and to add to.
    offloads, reads: as for step_memory."""
    known = known or Simulations()
    reads = reads or program_reads(folded)
    here: dict[tuple[int, tuple[tuple[int, int, int], ...]], _Layer] = {}
    tied_gradients: dict[str, int] = {}
    regions = [instance.region for instance in folded.instances]
    found = []
    for instance, of in zip(folded.instances, reads.instances, strict=True):
        r = instance.region
        makers = tuple((slot, regions[i], output) for slot, (i, output) in of.values.items())
        if (r, makers) not in here:
            arriving = list(typings[r].slots)
            for slot, maker, output in makers:
                arriving[slot] = typings[maker].outputs[output]
            graph = folded.regions[r].graph
            region = _simulated(
                known, graph, typings[r], tuple(arriving), mesh, costs, probe, instance.floats
            )
            here[r, makers] = _Layer(region, offloads[r] if offloads else "none")
        layer = here[r, makers]
        parameters = layer.parameters
        if of.tied or layer.repeated:
            parameters = layer.named(instance, of.tied, tied_gradients)
        found.append(
            InstanceMemory(
                layer.region.memory,
                of.values,
                parameters,
                layer.is_offloaded,
                typings[r].keeps_gathered,
            )
        )
    return found


class _Layer:
    """What instances of one region that take values in the same layouts have in common. parameters:
    their uses, without names; repeated: slots with several."""

    def __init__(self, region: SimulatedRegion, offload: Offload) -> None:
        self.region = region
        self.is_offloaded = offload == "activations"
        self.parameters = tuple(use for _, use in region.uses)
        if offload == "optimizer":
            self.parameters = tuple(replace(use, gradient_bytes=0) for use in self.parameters)
        counts = Counter(slot for slot, _ in region.uses)
        self.repeated = [slot for slot, count in counts.items() if count > 1]

    def named(
        self, instance: Instance, tied: Mapping[int, str], tied_gradients: dict[str, int]
    ) -> tuple[ParameterUse, ...]:
        """The uses, with names where a parameter has several. tied_gradients: by name what the
        first use of a parameter keeps of its gradient, to use and to add to."""
        names = {**tied, **{slot: instance.sources[slot].name for slot in self.repeated}}
        found = []
        for (slot, _), use in zip(self.region.uses, self.parameters, strict=True):
            if slot in names:
                kept = tied_gradients.setdefault(names[slot], use.gradient_bytes)
                use = replace(use, name=names[slot], gradient_bytes=kept)
            found.append(use)
        return tuple(found)


def _simulated(
    known: Simulations,
    graph: OpGraph,
    typing: RegionTyping,
    arriving: tuple[Layout, ...],
    mesh: Mesh,
    costs: ConversionCosts,
    probe: Probe,
    floats: Sequence[float],
) -> SimulatedRegion:
    key = id(graph), typing.ops, typing.outputs, arriving
    found = known.regions.get((key, typing.recompute))
    if found is None:
        program, uses = known.program(
            key,
            typing.recompute == "selective",
            lambda: LocalProgramBuilder(graph, typing, arriving, mesh, costs, probe, floats),
        )
        program = replace(program, recomputes=typing.recompute != "none")
        found = SimulatedRegion(graph, simulate_region(program), uses)
        known.regions[key, typing.recompute] = found
    return found


def memory_of_region(
    graph: OpGraph,
    typing: RegionTyping,
    mesh: Mesh,
    probe: Probe,
    *,
    costs: ConversionCosts,
    floats: Sequence[float],
    known: Simulations | None = None,
) -> RegionMemory:
    """Memory of one instance whose values arrive as `typing` declares. floats: its bindings;
    known: as for program_memory."""
    known = known or Simulations()
    return _simulated(known, graph, typing, typing.slots, mesh, costs, probe, floats).memory
