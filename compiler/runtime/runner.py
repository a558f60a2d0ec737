"""Running an emitted program: its steps over the local tensors of one rank."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.codegen.chained_chunks.region import LineRegion
from meshfold.codegen.program.emitted import EmittedProgram, RegionProgram, Step
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.handed_parts import borders_of
from meshfold.ir.op_graph import Source, SourceKind
from meshfold.ir.spmd import Layout
from meshfold.runtime.recomputation import Recomputation, start_nothing
from meshfold.sharding.layout import shard_of
from meshfold.zero.microbatch_state import SharedStep
from meshfold.zero.parameter_group import BucketBuffers
from meshfold.zero.step import BucketUse, TrainingStep

Tensors = Mapping[str, Tensor]

LocalInputs = Callable[[str, Layout], Tensor]
"""(input name, layout) -> the local tensor."""


class ProgramRunner:
    """Runs `program` as one rank of `mesh`. constants: values of CONSTANT sources by name.
    waits_at_once: without overlap, see TrainingStep."""

    def __init__(
        self,
        program: EmittedProgram,
        mesh: RankMesh,
        constants: Tensors,
        *,
        waits_at_once: bool = False,
    ) -> None:
        self.program = program
        self.mesh = mesh
        self.constants = {name: value.to(mesh.device) for name, value in constants.items()}
        sizes = program.mesh.sizes
        self._buffers = [[BucketBuffers(b, sizes) for b in r.buckets] for r in program.regions]
        self.last_uses = _last_uses(program)
        self.borders = borders_of(program)
        self.mutated = _mutated_buffers(program)
        self._makes = any(r.makes_parameters for r in program.regions)
        self._waits_at_once = waits_at_once

    def run(self, parameters: Tensors, buffers: Tensors, inputs: LocalInputs) -> Tensor:
        """One forward pass: the model's output, ready for backward. See run_part."""
        return self.run_part(parameters, buffers, inputs, {}, SharedStep())[0]

    def run_part(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: LocalInputs,
        arrived: Tensors,
        shared: SharedStep,
    ) -> list[Tensor]:
        """One forward pass of one microbatch: the outputs of the folded graph, ready for backward.

        parameters: local shards by canonical name; buffers: whole. arrived: what came over the
        border of a pipeline stage, by name. shared: by the microbatches of a step. Updates of
        buffers are applied after the last region.
        """
        step = TrainingStep(
            self.mesh,
            shared,
            waits_at_once=self._waits_at_once,
            hierarchy=self.program.hierarchy,
        )
        step.uses = [
            self._bucket_uses(step, k, parameters) for k in range(len(self.program.programs))
        ]
        for places in self.program.gathered_together:
            BucketUse.gather_together([step.uses[k][number] for k, number in places])
        for places in self.program.reduced_together if step.is_recording else ():
            BucketUse.reduce_together([step.uses[k][number] for k, number in places])
        step.enter()
        forward = _Forward(self, step, parameters, buffers, inputs, arrived)
        keeps_notes = self._makes and step.is_recording
        with step.saved_tensors() if keeps_notes else contextlib.nullcontext():
            for action in self.program.steps:
                forward.act(action)
        outputs = step.leave(forward.outputs())
        if not any(x.requires_grad for x in outputs):
            step.finish_backward()
        forward.update_buffers()
        return outputs

    def call(self, instance: int, region: RegionProgram, arguments: Sequence[Any]) -> Any:
        """Runs the graph of an instance; its results are those of the graph."""
        return region.graph(*arguments)

    def is_scheduled(self, region: RegionProgram) -> bool:
        """Whether a region's pieces run in the order of its schedule."""
        return region.schedule is not None and not self._waits_at_once

    def _bucket_uses(self, step: TrainingStep, k: int, parameters: Tensors) -> list[BucketUse]:
        """The buckets of instance `k` in this step."""
        uses = []
        region = self.program.region_of(k)
        keeps = region.keeps_gathered and step.is_recording
        for number, buffers in enumerate(self._buffers[self.program.programs[k]]):
            names = self.program.parameters_of(k, buffers.bucket)
            shards = [parameters[name] for name in names]
            is_late = region.whole_gradients
            use = BucketUse(step, k, buffers, shards, number, stays=keeps, is_late=is_late)
            uses.append(use)
        return uses


class _Forward:
    """Values of one forward pass, each dropped after its last use."""

    def __init__(
        self,
        runner: ProgramRunner,
        step: TrainingStep,
        parameters: Tensors,
        buffers: Tensors,
        inputs: LocalInputs,
        arrived: Tensors,
    ) -> None:
        self.runner = runner
        self.program = runner.program
        self.step = step
        self.parameters = parameters
        self.buffers = buffers
        self.inputs = inputs
        self.arrived = arrived
        self.values: dict[tuple[int, int], Tensor] = {}
        self.updates: list[tuple[Tensor, Tensor]] = []
        self.last: LineRegion | None = None
        """The last instance, if it hands parts on."""

    def act(self, action: Step) -> None:
        match action.action:
            case "G":
                self.step.start_gathers(action.instance)
            case "X" if self.last is not None:
                self.last.release()
            case "X":
                self.step.release(action.instance)
            case "F":
                self._run_instance(action)

    def outputs(self) -> list[Tensor]:
        """What the model returns, the same on all ranks; of a stage also what it hands on."""
        folded = self.program.folded
        return [self._fetch(output.source, self.program.whole) for output in folded.outputs]

    def update_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self.updates:
                buffer.copy_(value)

    def _run_instance(self, action: Step) -> None:
        k = action.instance
        region = self.program.region_of(k)
        instance = self.program.folded.instances[k]

        def ahead() -> None:
            if action.ahead >= 0:
                self.step.start_gathers(action.ahead)

        arriving = {v: instance.sources[v] for v in region.direct}
        direct = {v: self._fetch(source, region.slots[v]) for v, source in arriving.items()}
        uses = self.step.uses[k]
        if region.recompute == "full" and self.step.is_recording:
            # The second run needs buffers as they were; they are updated after the forward.
            for v, source in arriving.items():
                if source.kind is SourceKind.BUFFER and source.name in self.runner.mutated:
                    direct[v] = direct[v].clone()
        number = self.program.numbers[k]
        if self.step.is_recording and self.runner.is_scheduled(region):
            borders = self.runner.borders[k]
            scheduled = LineRegion(
                region, self.step, k, number, instance.floats, ahead, borders, self.last
            )
            made = scheduled.run(list(direct.values()))
            self.last = scheduled if borders.handed else None
        elif region.recompute == "full" and self.step.is_recording:
            graph, mesh = region.graph, self.runner.mesh

            def run(arrived: Sequence[Tensor], ahead: Callable[[], None] = start_nothing) -> Any:
                return graph(mesh, ahead, number, *uses, *arrived, *instance.floats)

            with Recomputation(self.step, k, run, uses).keeping_numbers([*direct.values()]):
                made = run([*direct.values()], ahead)
        else:
            mesh = self.runner.mesh
            arguments = (mesh, ahead, number, *uses, *direct.values(), *instance.floats)
            made = self.runner.call(k, region, arguments)
        num_outputs = len(region.outputs)
        self.values.update({(k, n): x for n, x in enumerate(made[:num_outputs])})
        mutations = self.program.folded.regions[region.region].graph.mutations
        for (slot, _), value in zip(mutations, made[num_outputs:], strict=True):
            self.updates.append((self.buffers[instance.sources[slot].name], value))
        for key in self.runner.last_uses[k]:
            del self.values[key]

    def _fetch(self, source: Source, layout: Layout) -> Tensor:
        """The local tensor of a source in `layout`."""
        match source.kind:
            case SourceKind.VALUE:
                return self.values[source.instance, source.output]
            case SourceKind.PARAMETER:
                work = self.runner.mesh.weight_work
                parameter = self.parameters[source.name]
                return parameter if work is None else work.tap(parameter)
            case SourceKind.BORDER:
                return self.arrived[source.name]
            case SourceKind.INPUT:
                return self.inputs(source.name, layout)
            case SourceKind.BUFFER:
                whole = self.buffers[source.name]
            case SourceKind.CONSTANT:
                whole = self.runner.constants[source.name]
        return shard_of(whole, layout, self.program.mesh.sizes, self.runner.mesh.coords)


def _mutated_buffers(program: EmittedProgram) -> set[str]:
    """Names of the buffers that a step updates."""
    folded = program.folded
    return {
        instance.sources[slot].name
        for instance in folded.instances
        for slot, _ in folded.regions[instance.region].graph.mutations
    }


def _last_uses(program: EmittedProgram) -> list[list[tuple[int, int]]]:
    """Per instance the values that nobody reads after it."""
    last: dict[tuple[int, int], int] = {}
    for k, instance in enumerate(program.folded.instances):
        for n in range(len(program.region_of(k).outputs)):
            last[k, n] = k
        for source in instance.sources:
            if source.kind is SourceKind.VALUE:
                last[source.instance, source.output] = k
    for output in program.folded.outputs:
        last.pop((output.source.instance, output.source.output), None)
    dead: list[list[tuple[int, int]]] = [[] for _ in program.programs]
    for key, k in last.items():
        dead[k].append(key)
    return dead
