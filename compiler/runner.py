"""Running an emitted program: its steps over the local tensors of one rank."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshfold.buckets import BucketBuffers
from meshfold.collectives import RankMesh
from meshfold.opgraph import Source, SourceKind
from meshfold.program import EmittedProgram, RegionProgram, Step
from meshfold.shards import shard_of
from meshfold.spmd import Layout
from meshfold.training_step import BucketUse, TrainingStep

Tensors = Mapping[str, Tensor]


class ProgramRunner:
    """Runs `program` as one rank of `mesh`. constants: values of CONSTANT sources by name."""

    def __init__(self, program: EmittedProgram, mesh: RankMesh, constants: Tensors) -> None:
        self.program = program
        self.mesh = mesh
        sizes = program.mesh.sizes
        self._buffers = [[BucketBuffers(b, sizes) for b in r.buckets] for r in program.regions]
        self._constants = {name: value.to(mesh.device) for name, value in constants.items()}
        self._dead = _last_uses(program)
        self._has_gather = any(r.has_gather for r in program.regions)

    def run(self, parameters: Tensors, buffers: Tensors, inputs: "LocalInputs") -> Tensor:
        """One forward pass: the model's output, ready for backward.

        parameters: local shards by canonical name, buffers whole. Updates of buffers are applied
        after the last region.
        """
        step = TrainingStep(self.mesh)
        step.uses = [self._bucket_uses(step, k, parameters) for k in range(len(self._programs))]
        step.enter()
        values: dict[tuple[int, int], Tensor] = {}
        updates: list[tuple[Tensor, Tensor]] = []

        def fetch(source: Source, layout: Layout) -> Tensor:
            match source.kind:
                case SourceKind.VALUE:
                    return values[source.instance, source.output]
                case SourceKind.PARAMETER:
                    return parameters[source.name]
                case SourceKind.INPUT:
                    return inputs(source.name, layout)
                case SourceKind.BUFFER:
                    return self._local(buffers[source.name], layout)
            return self._local(self._constants[source.name], layout)

        def run_steps() -> None:
            for action in self.program.steps:
                match action.action:
                    case "G":
                        step.start_gathers(action.instance)
                    case "X":
                        step.release(action.instance)
                    case "F":
                        self._run_instance(step, action, fetch, values, updates)

        if self._has_gather and step.is_recording:
            with step.saved_tensors():
                run_steps()
        else:
            run_steps()
        source = self.program.folded.outputs[0].source
        output = step.leave(fetch(source, ()))
        if not output.requires_grad:
            step.finish_backward()
        with torch.no_grad():
            for buffer, value in updates:
                buffer.copy_(value)
        return output

    @property
    def _programs(self) -> tuple[int, ...]:
        return self.program.programs

    def _run_instance(
        self,
        step: TrainingStep,
        action: Step,
        fetch: Callable[[Source, Layout], Tensor],
        values: dict[tuple[int, int], Tensor],
        updates: list[tuple[Tensor, Tensor]],
    ) -> None:
        k = action.instance
        region: RegionProgram = self.program.region_of(k)
        instance = self.program.folded.instances[k]

        def ahead() -> None:
            if action.ahead >= 0:
                step.start_gathers(action.ahead)

        direct = [fetch(instance.sources[v], region.slots[v]) for v in region.direct]
        made = region.graph(self.mesh, ahead, k, *step.uses[k], *direct, *instance.floats)
        num_outputs = len(region.outputs)
        values.update({(k, n): x for n, x in enumerate(made[:num_outputs])})
        mutations = self.program.folded.regions[region.region].graph.mutations
        for (slot, _), value in zip(mutations, made[num_outputs:], strict=True):
            updates.append((fetch(instance.sources[slot], region.slots[slot]), value))
        for key in self._dead[k]:
            del values[key]

    def _bucket_uses(self, step: TrainingStep, k: int, parameters: Tensors) -> list[BucketUse]:
        region = self.program.region_of(k)
        return [
            BucketUse(
                step, k, buffers, [parameters[n] for n in self.program.parameters_of(k, bucket)]
            )
            for bucket, buffers in zip(
                region.buckets, self._buffers[self._programs[k]], strict=True
            )
        ]

    def _local(self, x: Tensor, layout: Layout) -> Tensor:
        return shard_of(x, layout, self.program.mesh.sizes, self.mesh.coords)


LocalInputs = Callable[[str, Layout], Tensor]
"""(input name, layout) -> the local tensor."""


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
