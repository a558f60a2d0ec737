"""Peak memory of a typed program: the local program of every region, probed and simulated.

    region + typing + layouts that arrive
        -> local program (ops on local shapes, conversions, as the emitter writes them)   here
        -> live ranges of one instance            cost_models/memory.py
        -> peak over all instances, by component  cost_models/step_memory.py

The types, the conversion trees and the local constants come from the tables that the emitter uses.
Instances whose values arrive in the same layouts share one simulation. Under ZeRO-3 gathered
parameters are not kept for the backward: they are outside tensors, gathered again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.memory import LocalProgram, RegionMemory, simulate_region
from meshfold.cost_models.op_probe import (
    OpProbe,
    ProbeKey,
    TensorSpec,
    dense_spec,
)
from meshfold.cost_models.rebuild import LocalStep
from meshfold.cost_models.step_memory import (
    How,
    InstanceMemory,
    ParameterUse,
    compose_step,
)
from meshfold.mesh import Mesh
from meshfold.opgraph import (
    Arg,
    FoldedGraph,
    Hole,
    Instance,
    OpGraph,
    Ref,
    SlotKind,
    SourceKind,
)
from meshfold.passes.again import op_stays, step_stays
from meshfold.passes.conversion_probe import conversion_probe
from meshfold.passes.conversions import (
    ConversionCosts,
    Step,
    conversion_steps,
    plan_conversions,
)
from meshfold.passes.localize import localize
from meshfold.passes.parameter_prices import is_bucketed, local_bytes
from meshfold.passes.program_reads import ProgramReads, program_reads
from meshfold.passes.residence import Residence, gradient_bytes, program_states
from meshfold.plan import MemoryEstimate
from meshfold.spmd import REPLICATE, Layout, local_shape
from meshfold.strategy import OpTyping, RegionTyping

Probe = Callable[[ProbeKey], OpProbe]


@dataclass(frozen=True, eq=False)
class SimulatedRegion:
    """A simulation that instances share. uses: (slot, a use of its parameter), gradients staying as
    parameters are stored. The graph is held since its id is a key."""

    graph: OpGraph
    memory: RegionMemory
    uses: tuple[tuple[int, ParameterUse], ...]


Simulations = dict[tuple[int, RegionTyping, tuple[Layout, ...]], SimulatedRegion]
"""By (id of the graph, typing, layouts that arrive)."""


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
    residences: Sequence[Residence] | None = None,
    reads: ProgramReads | None = None,
) -> tuple[MemoryEstimate, tuple[int, ...]]:
    """(bytes per device at the peak of a training step, bytes that one instance of each region
    keeps for its backward).

    typings: per region, for `mesh`. probe answers what ops do to memory (meshfold.probe.OpProber).
    costs orders the conversions as the emitter does. optimizer: "adamw" or "sgd". known: as for
    program_memory. residences: per region; None: states as parameters are stored, nothing on hosts.
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
        residences=residences,
        reads=reads,
    )
    estimate, kept = compose_step(
        instances,
        [
            (o.source.instance, o.source.output)
            for o in folded.outputs
            if o.source.kind is SourceKind.VALUE
        ],
        program_states(folded, typings, mesh, residences, reads),
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
    residences: Sequence[Residence] | None = None,
    reads: ProgramReads | None = None,
) -> list[InstanceMemory]:
    """Memory of every instance, in execution order. known: simulations to use and to add to.
    residences, reads: as for step_memory."""
    known = {} if known is None else known
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
            here[r, makers] = _Layer(region, mesh, residences[r] if residences else None)
        layer = here[r, makers]
        parameters = layer.parameters
        if of.tied or layer.repeated:
            parameters = layer.named(instance, of.tied, tied_gradients)
        found.append(InstanceMemory(layer.region.memory, of.values, parameters, layer.is_offloaded))
    return found


class _Layer:
    """What instances of one region that take values in the same layouts have in common. parameters:
    their uses, without names; repeated: slots with several."""

    def __init__(self, region: SimulatedRegion, mesh: Mesh, residence: Residence | None) -> None:
        self.region = region
        self.is_offloaded = residence is not None and residence.offload == "activations"
        self.parameters = tuple(use for _, use in region.uses)
        if residence is not None:
            self.parameters = tuple(
                replace(use, gradient_bytes=gradient_bytes(region.graph, slot, residence, mesh))
                for slot, use in region.uses
            )
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
    key = id(graph), typing, arriving
    if key not in known:
        builder = _Builder(graph, typing, arriving, mesh, costs, probe, floats)
        memory = simulate_region(builder.build())
        known[key] = SimulatedRegion(graph, memory, builder.parameter_uses())
    return known[key]


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
    known = {} if known is None else known
    return _simulated(known, graph, typing, typing.slots, mesh, costs, probe, floats).memory


class _Builder:
    """Writes the local program of one region whose values arrive in the layouts `arriving`."""

    def __init__(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        arriving: tuple[Layout, ...],
        mesh: Mesh,
        costs: ConversionCosts,
        probe: Probe,
        floats: Sequence[float],
    ) -> None:
        self.graph = graph
        self.typing = typing
        self.arriving = arriving
        self.mesh = mesh
        self.costs = costs
        self.probe = probe
        self.floats = floats
        self.is_selective = typing.recompute == "selective"
        self.specs: list[TensorSpec] = []
        self.steps: list[LocalStep] = []
        self.tensors: dict[tuple[int, Layout], int] = {}
        self.parents: dict[tuple[int, Layout], Layout] = {}
        self.uses: dict[tuple[int, Layout], int] = {}
        """Tensors that the runtime makes of parameters: (slot, used layout) -> tensor."""

    def build(self) -> LocalProgram:
        """The finished program."""
        for v, layout in enumerate(self.arriving):
            self.tensors[v, layout] = self._outside(v, layout)
        for v, demands in enumerate(self._demands()):
            self._plan_value(v, demands)
        num_slots = len(self.specs)
        for k, typing in enumerate(self.typing.ops):
            self._op(k, typing)
        outputs = tuple(
            self._tensor(v, layout)
            for v, layout in zip(self.graph.outputs, self.typing.outputs, strict=True)
        )
        bucketed = frozenset(self.uses.values())
        return LocalProgram(
            num_slots,
            tuple(self.specs),
            tuple(self.steps),
            outputs,
            bucketed,
            recomputes=self.typing.recompute != "none",
        )

    def parameter_uses(self) -> tuple[tuple[int, ParameterUse], ...]:
        """(slot, use) of every parameter slot."""
        found = []
        for v, slot in enumerate(self.graph.slots):
            if slot.kind is not SlotKind.PARAMETER:
                continue
            stored = local_bytes(self.graph.values[v], self.arriving[v], self.mesh.sizes)
            runtime = [(layout, t) for (w, layout), t in self.uses.items() if w == v]
            for layout, t in runtime:
                used = local_bytes(self.graph.values[v], layout, self.mesh.sizes)
                how: How = "gathered" if used > stored else "reduced"
                found.append((v, ParameterUse(t, stored, used, stored, how)))
            if not runtime:
                found.append((v, ParameterUse(v, stored, stored, stored, "direct")))
        return tuple(found)

    # What is wanted.

    def _demands(self) -> list[list[Layout]]:
        demands: list[list[Layout]] = [[] for _ in self.graph.values]
        for op, typing in zip(self.graph.ops, self.typing.ops, strict=True):
            for v, layout in zip(op.operands, typing.inputs, strict=True):
                demands[v].append(layout)
        for v, layout in zip(self.graph.outputs, self.typing.outputs, strict=True):
            demands[v].append(layout)
        return demands

    def _plan_value(self, v: int, demands: list[Layout]) -> None:
        """Fill `parents` (the conversion tree) and, for a parameter, `uses`."""
        native = self._native(v)
        is_slot = v < len(self.graph.slots)
        if not (is_slot and self.graph.slots[v].kind is SlotKind.PARAMETER):
            self._plan_tree(v, native, demands)
            return
        by_use: dict[Layout, list[Layout]] = {}
        for demand in demands:
            by_use.setdefault(self._used_layout(native, demand), []).append(demand)
        for used, wanted in by_use.items():
            if used != native:
                self.uses[v, used] = self.tensors[v, used] = self._outside(v, used)
            self._plan_tree(v, used, wanted)

    def _used_layout(self, stored: Layout, demand: Layout) -> Layout:
        """What the runtime makes of a parameter for an op that reads `demand`."""
        return tuple(
            REPLICATE if is_bucketed(s, d) and n > 1 else s
            for s, d, n in zip(stored, demand, self.mesh.sizes, strict=True)
        )

    def _plan_tree(self, v: int, native: Layout, demands: list[Layout]) -> None:
        edges = plan_conversions(self.graph.values[v], native, demands, self.mesh, self.costs)
        self.parents.update({(v, target): source for source, target in edges})

    def _native(self, v: int) -> Layout:
        if v < len(self.graph.slots):
            return self.arriving[v]
        k = self.graph.producers[v]
        return self.typing.ops[k].outputs[self.graph.ops[k].outputs.index(v)]

    # Tensors and steps, in the order in which they are made.

    def _outside(self, v: int, layout: Layout) -> int:
        value = self.graph.values[v]
        shape = local_shape(value.shape, layout, self.mesh.sizes)
        return self._add(dense_spec(shape, value.dtype, value.requires_grad))

    def _add(self, spec: TensorSpec) -> int:
        self.specs.append(spec)
        return len(self.specs) - 1

    def _op(self, k: int, typing: OpTyping) -> None:
        op = self.graph.ops[k]
        operands = tuple(
            self._tensor(v, layout) for v, layout in zip(op.operands, typing.inputs, strict=True)
        )
        args, kwargs = localize(self.graph, k, typing, self.mesh.sizes)
        count = iter(range(len(operands)))
        key = ProbeKey(
            op.target,
            tuple(self._bound(a, count) for a in args),
            tuple((name, self._bound(a, count)) for name, a in kwargs),
            tuple(self.specs[t] for t in operands),
        )
        answer = self.probe(key)
        outputs = tuple(self._add(o.spec) for o in answer.outputs)
        stays = self.is_selective and op_stays(op)
        self.steps.append(LocalStep(operands, outputs, answer, stays))
        for v, layout, t in zip(op.outputs, typing.outputs, outputs, strict=True):
            self.tensors[v, layout] = t

    def _bound(self, arg: Arg, count: Iterator[int]) -> Arg:
        """References by operand position, holes filled."""
        if isinstance(arg, Ref):
            return Ref(next(count))
        if isinstance(arg, Hole):
            return self.floats[arg.index]
        return tuple(self._bound(a, count) for a in arg) if isinstance(arg, tuple) else arg

    def _tensor(self, v: int, layout: Layout) -> int:
        if (v, layout) not in self.tensors:
            source = self.parents[v, layout]
            t = self._tensor(v, source)
            value = self.graph.values[v]
            for step in conversion_steps(value, source, layout, self.mesh, self.costs):
                t = self._convert(t, step)
            self.tensors[v, layout] = t
        return self.tensors[v, layout]

    def _convert(self, t: int, step: Step) -> int:
        """One step of a conversion on tensor t."""
        sizes = self.mesh.sizes
        before = self.specs[t]
        shape = list(before.shape)
        if step.source.is_shard:
            shape[step.source.dim] *= sizes[step.axis]
        if step.target.is_shard:
            shape[step.target.dim] //= sizes[step.axis]
        after = dense_spec(tuple(shape), before.dtype, before.requires_grad)
        new = self._add(after)
        probe = conversion_probe(step, sizes, before, after)
        stays = self.is_selective and step_stays(step, self.mesh)
        self.steps.append(LocalStep((t,), (new,), probe, stays))
        return new
