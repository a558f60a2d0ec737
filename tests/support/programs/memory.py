"""Run a captured graph for real and measure its memory: ground truth for the memory model."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.memory.op_memory import OpProbe, ProbeKey
from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.ir.mesh import Mesh
from meshfold.ir.node_groups import NodeLevels
from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.memory_probe.prober import OpProber, StorageCounter, storage_id
from meshfold.ops.reference_interpreter import run_op
from meshfold.runtime.batches import BatchReader
from meshfold.runtime.runner import ProgramRunner
from support.programs.local_programs import local_part


def plain_typings(folded: FoldedGraph) -> list[RegionTyping]:
    """Typings for a mesh of no axes: one rank does everything."""
    return [
        RegionTyping(
            slots=((),) * len(region.graph.slots),
            ops=tuple(
                OpTyping((), ((),) * len(op.operands), ((),) * len(op.outputs))
                for op in region.graph.ops
            ),
            outputs=((),) * len(region.graph.outputs),
        )
        for region in folded.regions
    ]


class RealStep:
    """A captured model with real weights, run op by op; every value goes after its last use.
    change: what becomes of its graph first."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        change: Callable[[FoldedGraph], FoldedGraph] = lambda graph: graph,
    ) -> None:
        found = capture(model, dict(batch))
        self.captured: Captured = replace(found, graph=change(found.graph))
        self.folded = self.captured.graph
        device = torch.device("cpu")
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        self.parameters = [parameters[p.name] for p in self.folded.parameters]
        self.leaves: dict[tuple[SourceKind, str], torch.Tensor] = {
            **{(SourceKind.PARAMETER, p.name): parameters[p.name] for p in self.folded.parameters},
            **{(SourceKind.BUFFER, b.name): buffers[b.name] for b in self.folded.buffers},
            **{(SourceKind.CONSTANT, k): t for k, t in self.captured.constants.items()},
            **{(SourceKind.INPUT, i.name): batch[i.name] for i in self.folded.inputs},
        }
        self.device = device
        self.last_reader: dict[tuple[int, int], int] = {}
        for k, instance in enumerate(self.folded.instances):
            for source in instance.sources:
                if source.kind is SourceKind.VALUE:
                    self.last_reader[source.instance, source.output] = k

    def forward(self) -> torch.Tensor:
        """The loss."""
        loss = self.folded.outputs[0].source
        made: dict[tuple[int, int], torch.Tensor] = {}
        for k, instance in enumerate(self.folded.instances):
            graph = self.folded.regions[instance.region].graph
            values: dict[int, torch.Tensor] = {}
            for slot, source in enumerate(instance.sources):
                if source.kind is SourceKind.VALUE:
                    values[slot] = made[source.instance, source.output]
                else:
                    whole, part = self.leaves[source.kind, source.name], source.slice
                    values[slot] = whole.chunk(part.count, part.dim)[part.number] if part else whole
            for key in [v for v, reader in self.last_reader.items() if reader == k]:
                made.pop(key, None)
            last = {v: n for n, op in enumerate(graph.ops) for v in (*op.operands, *op.outputs)}
            for n, op in enumerate(graph.ops):
                results = run_op(op, values, instance.floats, self.device)
                values.update(zip(op.outputs, results, strict=True))
                del results
                for v in {*op.operands, *op.outputs}:
                    if last[v] == n and v not in graph.outputs:
                        del values[v]
            made.update({(k, j): values[v] for j, v in enumerate(graph.outputs)})
            values.clear()  # run_op leaves it in a reference cycle
        return made[loss.instance, loss.output]

    def train(self) -> None:
        """Forward and backward with fresh gradients, which stay."""
        for p in self.parameters:
            p.grad = None
        self.forward().backward()


def saved_bytes(step: RealStep) -> int:
    """Bytes that autograd keeps after the forward, without what was there before."""
    known = {storage_id(t) for t in step.leaves.values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_id(tensor) not in known:
            kept[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = step.forward()
    del loss
    return sum(kept.values())


def counted_peak_bytes(step: RealStep) -> int:
    """Worst moment of a step by counting the storages that ops make."""
    with StorageCounter(list(step.leaves.values())) as counter:
        step.train()
    return counter.peak_bytes


def allocator_peak_bytes(run: Callable[[], None]) -> int:
    """Worst moment above the start of `run`, from the CPU allocator's own events; sees what ops
    allocate inside, too. `run` is warmed up once."""
    run()
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run()
    recorded = profiler.profiler
    assert recorded is not None
    # Private, but the profiler's own exporters are rounded to operators.
    waiting = list(recorded.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    changes = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.alloc_size, fields.ptr))
    live: dict[int, int] = {}
    peak = 0
    for _, num_bytes, address in sorted(changes):
        if num_bytes > 0:
            live[address] = num_bytes
            peak = max(peak, sum(live.values()))
        else:
            # What was there before is not of this run; the profiler takes its size from whatever
            # an earlier profile saw at its address.
            live.pop(address, None)
    return peak


class EchoMesh(RankMesh):
    """A rank without peers: collectives give tensors of the right shape at once, with its own data
    in place of everybody's. A reduce-scatter that is not waited for reads its input until the next
    one starts. For measuring memory only."""

    reading: tuple[torch.Tensor, torch.Tensor] | None = None
    """Input and result of the last reduce-scatter, while it runs."""

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, levels: NodeLevels | None = None
    ) -> None:
        super().__init__(mesh, rank, device, levels or NodeLevels(mesh, 0))

    def start_all_reduce(self, x: torch.Tensor, axes: Axes, reduction: str = "sum") -> torch.Tensor:
        return x.clone()

    def start_all_reduce_in_place(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        return x

    def start_all_gather(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        return x.repeat(self.size(axes), *([1] * (x.dim() - 1)))

    def start_reduce_scatter(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        result = x[: x.shape[0] // self.size(axes)].clone()
        self.reading = x, result
        return result

    def start_all_to_all(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        return x.clone()

    def start_exchange(
        self, x: torch.Tensor, axes: Axes, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        return x.clone()

    def wait(self, in_flight: torch.Tensor) -> torch.Tensor:
        if self.reading is not None and self.reading[1].data_ptr() == in_flight.data_ptr():
            self.reading = None
        return in_flight


class EmittedStep:
    """Rank 0 of an emitted program, without peers."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        program: EmittedProgram,
        batch: Mapping[str, torch.Tensor],
    ) -> None:
        mesh = EchoMesh(program.mesh, 0, torch.device("cpu"), program.levels)
        self.parameters = {
            p.name: nn.Parameter(local_part(program, p.name, model.get_parameter(p.name), mesh))
            for p in captured.graph.parameters
        }
        self.buffers = {b.name: model.get_buffer(b.name).clone() for b in captured.graph.buffers}
        self.runner = ProgramRunner(program, mesh, captured.constants)
        self.inputs = BatchReader([program], mesh, {}).read(batch)
        self.known = [*self.parameters.values(), *self.buffers.values()]
        self.known += [*captured.constants.values(), *batch.values()]

    def forward(self) -> torch.Tensor:
        return self.runner.run(self.parameters, self.buffers, self.inputs)

    def train(self) -> None:
        """Forward and backward; gradients go afterwards."""
        self.forward().backward()
        for p in self.parameters.values():
            p.grad = None

    def counted_peak_bytes(self) -> int:
        """Worst moment of a step by counting storages, without parameters, buffers and batch."""
        gc.collect()
        with StorageCounter(self.known) as counter:
            self.train()
        return counter.peak_bytes

    def counted_kept_bytes(self) -> int:
        """What is there after the forward, the loss not included."""
        gc.collect()
        with StorageCounter(self.known) as counter:
            loss = self.forward()
            kept = counter.current_bytes
        return kept - loss.nbytes


def emitted_peak_bytes(
    model: nn.Module, captured: Captured, program: EmittedProgram, batch: Mapping[str, torch.Tensor]
) -> int:
    """Worst moment of a step of rank 0 of an emitted program, see EmittedStep."""
    return EmittedStep(model, captured, program, batch).counted_peak_bytes()


class CountingProber(OpProber):
    """A prober that counts the distinct ops it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.num_probes = 0

    def _probe(self, key: ProbeKey) -> OpProbe:
        self.num_probes += 1
        return super()._probe(key)
