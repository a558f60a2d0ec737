"""Peak memory of a typed program: the local program of every region, probed and simulated.

    region + typing + layouts that arrive
        -> local program                          passes/memory/local_program.py
        -> live ranges of one instance            cost_models/memory/live_ranges.py
        -> peak over all instances, by component  cost_models/memory/step_memory.py

Instances whose values arrive in the same layouts share one simulation. Gathered parameters are
outside tensors: under ZeRO 3 not kept for the backward, but gathered a second time.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshfold.cost_models.memory.live_ranges import (
    LocalProgram,
    RegionMemory,
    RegionTrace,
    simulate_region,
    trace_region,
)
from meshfold.cost_models.memory.parameter_uses import ParameterUse
from meshfold.cost_models.memory.step_memory import (
    NO_LOSS,
    InstanceMemory,
    compose_step,
)
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.op_graph import FoldedGraph, Instance, OpGraph, SlotKind, SourceKind
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import (
    SELECTIVE,
    UPDATED_BY_HOST,
    KeptResults,
    Offload,
    OpTyping,
    Recompute,
    RegionTyping,
)
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.memory.kept_results import Selective, recompute_price, selective
from meshfold.passes.memory.local_program import (
    LocalProgramBuilder,
    Origin,
    Probe,
    kept_steps,
)
from meshfold.passes.memory.zero import copied_bytes, program_states
from meshfold.passes.price.region import RecomputePrice, RegionPricer
from meshfold.passes.price.weight_gradients import weight_factors

Uses = tuple[tuple[int, ParameterUse], ...]
"""(slot, a use of its parameter), gradients being resident as parameters are stored."""

_Key = tuple[int, tuple[OpTyping, ...], tuple[Layout, ...], tuple[Layout, ...]]
"""(id of the graph, what its ops do, layouts that leave and that arrive)."""


_MemoryKey = tuple[_Key, Recompute, KeptResults]

GradientsOf = Literal["one pass", "microbatch", "put off"]
"""Of parameters: they are all new; they are added to those of earlier microbatches; the backward
leaves those of products to W."""


@dataclass(frozen=True, eq=False)
class SimulatedRegion:
    """The simulated memory of a region, which its instances share."""

    graph: OpGraph
    """Referred to since its id is a key."""
    memory: RegionMemory
    uses: Uses


@dataclass(frozen=True, eq=False)
class TracedRegion:
    """The local program of a region and its memory over time."""

    program: LocalProgram
    trace: RegionTrace
    origins: tuple[Origin, ...]
    """What each step of the program is."""
    materialized: Mapping[tuple[int, Layout], int]
    """Tensors that the runtime makes of parameters: (slot, used layout) -> tensor."""


class MemoryModel:
    """Memory of programs on the mesh of `costs`. Everything is simulated once.

    costs orders the conversions as the emitter does; probe answers what ops do to memory
    (meshfold.memory_probe.prober.OpProber).
    """

    def __init__(self, costs: CostModel, probe: Probe) -> None:
        self.costs = costs
        self.probe = probe
        self._regions: dict[_MemoryKey, SimulatedRegion] = {}
        self._traced: dict[tuple[_MemoryKey, GradientsOf], TracedRegion] = {}
        self._latest: _Written | None = None

    def step(
        self,
        folded: FoldedGraph,
        typings: Sequence[RegionTyping],
        *,
        optimizer: str,
        reserve_bytes: int,
        capacity_bytes: int,
        offloads: Sequence[Offload] | None = None,
        reads: ProgramReads | None = None,
    ) -> tuple[MemoryEstimate, tuple[int, ...]]:
        """(bytes per device at the peak of a training step, bytes that one instance of each region
        saves for its backward).

        typings: per region. optimizer: of OPTIMIZERS. offloads: per region; None: nothing on
        hosts. reads: of `folded` or of the graph that it was split from, if at hand.
        """
        reads = reads or program_reads(folded)
        estimate, saved = compose_step(
            self.instances(folded, typings, offloads, reads),
            [
                (o.source.instance, o.source.output)
                for o in folded.outputs
                if o.source.kind is SourceKind.VALUE
            ],
            program_states(folded, typings, self.costs.mesh, offloads, reads, optimizer=optimizer),
            reserve_bytes=reserve_bytes,
            capacity_bytes=capacity_bytes,
            loss=loss_instance(folded),
        )
        by_region = [0] * len(folded.regions)
        for instance, num_bytes in zip(folded.instances, saved, strict=True):
            by_region[instance.region] = max(by_region[instance.region], num_bytes)
        return estimate, tuple(by_region)

    def instances(
        self,
        folded: FoldedGraph,
        typings: Sequence[RegionTyping],
        offloads: Sequence[Offload] | None = None,
        reads: ProgramReads | None = None,
    ) -> list[InstanceMemory]:
        """Memory of every instance, in execution order. Arguments as of `step`."""
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
                region = self._simulated(graph, typings[r], tuple(arriving), instance.floats)
                layer = _Layer(region, offloads[r] if offloads else "none")
                layer.by_layer_bytes = self._by_layer_bytes(layer, typings[r].slots, of.tied)
                layer.sliced_bytes = sum(
                    use.resident_bytes for slot, use in region.uses if instance.sources[slot].slice
                )
                here[r, makers] = layer
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
                    typings[r].reshard_after_forward,
                    layer.by_layer_bytes,
                    layer.sliced_bytes,
                )
            )
        return found

    def _by_layer_bytes(
        self, layer: "_Layer", layouts: Sequence[Layout], tied: Collection[int]
    ) -> int:
        """Of the parameters that an instance has on the device only while it runs. tied: slots
        whose parameters others read, too."""
        graph = layer.region.graph
        slots = [
            i
            for i, slot in enumerate(graph.slots)
            if slot.kind is SlotKind.PARAMETER and graph.values[i].requires_grad and i not in tied
        ]
        of = slots if layer.comes_by_layer else []
        return copied_bytes(graph, layouts, of, (), self.costs.mesh)

    def region(self, graph: OpGraph, typing: RegionTyping, floats: Sequence[float]) -> RegionMemory:
        """Memory of one instance whose values arrive as `typing` declares. floats: its bindings."""
        return self._simulated(graph, typing, typing.slots, floats).memory

    def selective(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        floats: Sequence[float],
        pricer: RegionPricer,
        *,
        keeps_all: bool = False,
    ) -> Mapping[Recompute, Selective]:
        """What one instance whose values arrive as `typing` declares keeps under each point of
        selective recomputation (kept_results.py). pricer: of its ops under the same rules."""
        written = self._written(graph, typing, typing.slots, floats)
        return selective(written.program, written.origins, pricer, keeps_all=keeps_all)

    def recompute_price(
        self, graph: OpGraph, typing: RegionTyping, floats: Sequence[float], pricer: RegionPricer
    ) -> RecomputePrice | None:
        """What the selective recomputation of `typing` adds to the backward; None for another."""
        if typing.recompute not in SELECTIVE:
            return None
        written = self._written(graph, typing, typing.slots, floats)
        return recompute_price(written.under(typing), written.origins, pricer)

    def _simulated(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        arriving: tuple[Layout, ...],
        floats: Sequence[float],
    ) -> SimulatedRegion:
        key = _key(graph, typing, arriving), typing.recompute, typing.kept
        found = self._regions.get(key)
        if found is None:
            written = self._written(graph, typing, arriving, floats)
            memory = simulate_region(written.under(typing))
            found = self._regions[key] = SimulatedRegion(graph, memory, written.uses)
        return found

    def traced(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        arriving: tuple[Layout, ...],
        floats: Sequence[float],
        gradients: GradientsOf = "one pass",
    ) -> TracedRegion:
        """One instance over time, its values arriving as said. For the few programs that are
        simulated: a trace is many times what is known of a region otherwise. gradients: what
        becomes of those of its parameters."""
        key = _key(graph, typing, arriving), typing.recompute, typing.kept
        found = self._traced.get((key, gradients))
        if found is None:
            written = self._written(graph, typing, arriving, floats)
            program = written.under(typing)
            if gradients != "one pass":
                program = written.of_microbatch(program, puts_off=gradients == "put off")
            trace = trace_region(program)
            found = TracedRegion(program, trace, written.origins, written.materialized)
            self._traced[key, gradients] = found
            if gradients == "one pass":
                self._regions[key] = SimulatedRegion(graph, trace.memory, written.uses)
        return found

    def _written(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        arriving: tuple[Layout, ...],
        floats: Sequence[float],
    ) -> "_Written":
        """The local program. The same is asked for next: recomputation runs it in another order."""
        key = _key(graph, typing, arriving)
        if self._latest is None or self._latest.key != key:
            new = LocalProgramBuilder(graph, typing, arriving, self.costs, self.probe, floats)
            program = new.build()
            uses = new.parameter_uses()
            self._latest = _Written(key, graph, program, uses, tuple(new.origins), new.uses)
        return self._latest


def _key(graph: OpGraph, typing: RegionTyping, arriving: tuple[Layout, ...]) -> _Key:
    return id(graph), typing.ops, typing.outputs, arriving


def loss_instance(folded: FoldedGraph) -> int:
    """The instance that computes the loss; NO_LOSS where there is none, or no other instance."""
    if not folded.outputs or not folded.returns.has_loss or len(folded.instances) < 2:
        return NO_LOSS
    source = folded.outputs[0].source
    return source.instance if source.kind is SourceKind.VALUE else NO_LOSS


@dataclass(frozen=True, eq=False)
class _Written:
    """graph: referred to since its id is in the key."""

    key: _Key
    graph: OpGraph
    program: LocalProgram
    uses: Uses
    origins: tuple[Origin, ...]
    materialized: Mapping[tuple[int, Layout], int]

    def under(self, typing: RegionTyping) -> LocalProgram:
        """The program with the recomputation of `typing`."""
        kept = kept_steps(self.origins, typing)
        return replace(self.program, recomputes=typing.recompute != "none", kept=kept)

    def of_microbatch(self, program: LocalProgram, *, puts_off: bool) -> LocalProgram:
        """With gradients that are added to those of earlier microbatches; or with those of the
        factors of products put off, which those of all other parameters wait for
        (meshfold.distributed.deferred_weight_grads)."""
        if puts_off:
            products = weight_factors(self.graph)
            steps = {k: products[o] for k, o in enumerate(self.origins) if o in products}
            return replace(
                program, put_off=steps, waiting=frozenset(use.slot for _, use in self.uses)
            )
        direct = (use.slot for _, use in self.uses if use.how == "direct")
        return replace(program, added_at_once=frozenset(direct))


class _Layer:
    """What instances of one region that take values in the same layouts have in common. parameters:
    their uses, without names, and without gradients that leave for the host; repeated: slots with
    several."""

    def __init__(self, region: SimulatedRegion, offload: Offload) -> None:
        self.region = region
        self.is_offloaded = offload == "activations"
        self.parameters = tuple(use for _, use in region.uses)
        self.comes_by_layer = offload == "parameters"
        self.by_layer_bytes = self.sliced_bytes = 0
        if offload in UPDATED_BY_HOST:
            self.parameters = tuple(replace(use, gradient_bytes=0) for use in self.parameters)
        counts = Counter(slot for slot, _ in region.uses)
        self.repeated = [slot for slot, count in counts.items() if count > 1]

    def named(
        self, instance: Instance, tied: Mapping[int, str], tied_gradients: dict[str, int]
    ) -> tuple[ParameterUse, ...]:
        """The uses, with names where a parameter has several. tied_gradients: by name what the
        first use of a parameter keeps of its gradient, to use and to add to."""
        names = {**tied, **{slot: instance.sources[slot].label for slot in self.repeated}}
        found = []
        for (slot, whole), use in zip(self.region.uses, self.parameters, strict=True):
            if slot in names:
                use = whole  # leaves for the host behind the backward, when all uses are added up
                kept = tied_gradients.setdefault(names[slot], use.gradient_bytes)
                use = replace(use, name=names[slot], gradient_bytes=kept)
            found.append(use)
        return tuple(found)
