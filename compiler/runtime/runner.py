"""Running an emitted program: its steps over the local tensors of one rank."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from meshfold.codegen.program.emitted import EmittedProgram, ProgramStep, RegionInstance
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.op_graph import Source, SourceKind
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import SELECTIVE
from meshfold.offload.host_link import HostLink
from meshfold.offload.saved_activations import SavedActivations
from meshfold.runtime.chained_execution import ChainedExecution
from meshfold.runtime.recomputation import start_nothing
from meshfold.runtime.region_modes import (
    ChainedRegion,
    EagerRegion,
    RegionCall,
    RegionMode,
    ScheduledRegion,
)
from meshfold.runtime.selective_recomputation import SelectiveRegion
from meshfold.sharding.layout import shard_of
from meshfold.torch_compat.tensor_subclasses import plain_tensor
from meshfold.zero.host_side import HostSide, NoHostSide
from meshfold.zero.layer_copies import InstanceCopies
from meshfold.zero.microbatch_state import SharedStep
from meshfold.zero.parameter_group import GroupBuffers
from meshfold.zero.step import GroupUse, TrainingStep
from meshfold.zero.step_ends import enter, leave

Tensors = Mapping[str, Tensor]

LocalInputs = Callable[[str, Layout], Tensor]
"""(input name, layout) -> the local tensor."""


class ProgramRunner:
    """Runs `program` as one rank of `mesh`. constants: values of CONSTANT sources by name.
    waits_at_once: without overlap, host_side: of parameters that are stored there, see
    TrainingStep."""

    def __init__(
        self,
        program: EmittedProgram,
        mesh: RankMesh,
        constants: Tensors,
        *,
        waits_at_once: bool = False,
        host_side: HostSide | None = None,
    ) -> None:
        self.program = program
        self.host_side: HostSide = host_side or NoHostSide()
        self.mesh = mesh
        self.constants = {name: value.to(mesh.device) for name, value in constants.items()}
        sizes = program.mesh.storage.sizes
        self._buffers = [
            [GroupBuffers(b, sizes, r.name) for b in r.groups] for r in program.regions
        ]
        self.last_uses = _last_uses(program)
        self.mutated = _mutated_buffers(program)
        self._slices = _slices(program)
        self._materializes = any(r.materializes_parameters for r in program.regions)
        self._waits_at_once = waits_at_once
        self._selective = {
            k: SelectiveRegion(region)
            for k, region in enumerate(program.regions)
            if region.recompute in SELECTIVE
        }
        instances = [program.instance(k) for k in range(len(program.programs))]
        self.training_modes = tuple(map(self.training_mode, instances))
        self.inference_modes = tuple(EagerRegion(i, i.region.graph) for i in instances)
        self._leaving = program.instances_saved_on_host
        self.host_link = HostLink(mesh.device)
        """Of saved activations."""

    def run(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: LocalInputs,
        *,
        rng: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """One forward pass: the loss, ready for backward; else as run_all."""
        return self.run_all(parameters, buffers, inputs, rng=rng)[0]

    def run_all(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: LocalInputs,
        *,
        rng: tuple[int, int] = (0, 0),
    ) -> list[Tensor]:
        """One forward pass: all outputs, ready for backward. rng: see StepContext; the rest as in
        run_microbatch."""
        context = StepContext(self.mesh, rng)
        return self.run_microbatch(context, parameters, buffers, inputs, {}, SharedStep())

    def run_microbatch(
        self,
        context: StepContext,
        parameters: Tensors,
        buffers: Tensors,
        inputs: LocalInputs,
        arrived: Tensors,
        shared: SharedStep,
        *,
        updates: bool = True,
    ) -> list[Tensor]:
        """One forward pass of one microbatch: the outputs of the folded graph, ready for backward.

        parameters: local shards by canonical name; buffers: unsharded. arrived: what came over
        the boundary of a pipeline stage, by name. shared: by the microbatches of a step. Updates of
        buffers are applied after the last region, if `updates`.
        """
        parameters = self._with_slices(parameters)
        step = self._training_step(context, parameters, shared)
        enter(step)
        forward = _Forward(self, step, parameters, buffers, inputs, arrived)
        if self._leaving and step.is_recording:
            forward.saved = SavedActivations(self.host_link, self._leaving, step.saved)
        by_layer = self.host_side.comes_by_layer
        saves_notes = (self._materializes or by_layer) and step.is_recording
        with step.saved_tensors() if saves_notes else contextlib.nullcontext():
            for action in self.program.steps:
                forward.act(action)
        self.mesh.place.region = ""
        step.copies.leave_forward(step.is_recording)
        outputs = leave(step, forward.outputs())
        if not any(x.requires_grad for x in outputs):
            step.finish_backward()
        if updates:
            forward.update_buffers()
        return outputs

    def gather_ahead(
        self, context: StepContext, parameters: Tensors, shared: SharedStep, *, opens: bool
    ) -> None:
        """Start gathers before the first microbatch of a step is there, which finds them in
        `shared`: of parameters that are gathered once per step; with `opens` also the first ones
        of its forward, which take memory until then."""
        firsts = [s.instance for s in self.program.steps if opens and s.action == "G"]
        step = self._training_step(context, self._with_slices(parameters), shared)
        step.gather_ahead(firsts)

    def _with_slices(self, parameters: Tensors) -> Tensors:
        """`parameters` as plain tensors, and those that are read in slices slice by slice, by
        label."""
        found = {name: plain_tensor(parameter) for name, parameter in parameters.items()}
        for name, labels, dim in self._slices:
            whole = found[name]
            slices = torch.split(whole, whole.shape[dim] // len(labels), dim)
            found.update(zip(labels, slices, strict=True))
        return found

    def _training_step(
        self, context: StepContext, parameters: Tensors, shared: SharedStep
    ) -> TrainingStep:
        """The state of one microbatch, with its parameter groups."""
        step = TrainingStep(
            context,
            shared,
            waits_at_once=self._waits_at_once,
            hierarchical=self.program.hierarchical,
            host_side=self.host_side,
        )
        step.uses = [
            self._group_uses(step, k, parameters) for k in range(len(self.program.programs))
        ]
        if self.host_side.comes_by_layer:
            read = self._direct_parameters(parameters)
            of = [[*chain.from_iterable(u.shards for u in uses)] for uses in step.uses]
            both = [[*a, *b] for a, b in zip(of, read, strict=True)]
            step.copies = InstanceCopies(self.host_side, both)
        for refs in self.program.gathered_together:
            GroupUse.gather_together([step.uses[k][number] for k, number in refs])
        for refs in self.program.reduced_together if step.is_recording else ():
            GroupUse.reduce_together([step.uses[k][number] for k, number in refs])
        return step

    def training_mode(self, instance: RegionInstance) -> RegionMode:
        """How an instance runs in training."""
        if instance.region.schedule is None or self._waits_at_once:
            return EagerRegion(instance, instance.region.graph, self.selective_of(instance))
        boundary = self.program.boundary_of(instance.index)
        if boundary.is_crossed:
            return ChainedRegion(instance, boundary)
        return ScheduledRegion(instance, self.selective_of(instance))

    def selective_of(self, instance: RegionInstance) -> SelectiveRegion | None:
        """What its region needs for selective recomputation, if it has that."""
        return self._selective.get(self.program.programs[instance.index])

    def _direct_parameters(self, parameters: Tensors) -> list[list[Tensor]]:
        """Per instance, those that are passed to it directly."""
        instances = self.program.folded.instances
        sources = [
            [instance.sources[v] for v in self.program.region_of(k).direct]
            for k, instance in enumerate(instances)
        ]
        parameter = SourceKind.PARAMETER
        return [[parameters[s.label] for s in of if s.kind is parameter] for of in sources]

    def _group_uses(self, step: TrainingStep, k: int, parameters: Tensors) -> list[GroupUse]:
        """The groups of instance `k` in this step."""
        region = self.program.region_of(k)
        return [
            GroupUse(
                step,
                k,
                buffers,
                [parameters[name] for name in self.program.parameters_of(k, buffers.group)],
                number,
                reshard_after_forward=region.reshard_after_forward or not step.is_recording,
                reduce_on_last_microbatch=region.accumulate_unsharded,
            )
            for number, buffers in enumerate(self._buffers[self.program.programs[k]])
        ]


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
        self.modes = runner.training_modes if step.is_recording else runner.inference_modes
        self.unfinished: dict[int, ChainedExecution] = {}
        """Executions whose epilogue the next instance runs, by instance."""
        self.saved: SavedActivations | None = None
        """Activations that leave for the host."""

    def act(self, action: ProgramStep) -> None:
        match action.action:
            case "G":
                self.step.start_gathers(action.instance)
            case "X" if action.instance in self.unfinished:
                self.unfinished[action.instance].release()
            case "X":
                self.step.release(action.instance)
            case "F":
                self._run_instance(action)

    def outputs(self) -> list[Tensor]:
        """What the model returns, the same on all ranks but for outputs that stay shards; of a
        stage also what it sends."""
        folded = self.program.folded
        return [self._fetch(output.source, self.program.unsharded) for output in folded.outputs]

    def update_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self.updates:
                buffer.copy_(value)

    def _run_instance(self, action: ProgramStep) -> None:
        k = action.instance
        self.step.enter(k)
        region = self.program.region_of(k)
        instance = self.program.folded.instances[k]
        arriving = {v: instance.sources[v] for v in region.direct}
        direct = {v: self._fetch(source, region.slots[v]) for v, source in arriving.items()}
        if region.recompute != "none" and self.step.is_recording:
            # The second run needs buffers as they were; they are updated after the forward.
            for v, source in arriving.items():
                if source.kind is SourceKind.BUFFER and source.name in self.runner.mutated:
                    direct[v] = direct[v].clone()
        gathers = action.ahead >= 0
        ahead = partial(self.step.start_gathers, action.ahead) if gathers else start_nothing
        call = RegionCall(self.step, [*direct.values()], ahead, self.unfinished)
        place, name = self.step.mesh.place, region.name
        place.region = name
        results = self._run_saving(k, call)
        if not self.step.copies.is_empty:
            self._note_copies(k, results)
        for x in results:
            if x.requires_grad:
                # The backward of an instance begins with the gradient of what it returned.
                x.register_hook(partial(place.enter, name))  # type: ignore[no-untyped-call]
        num_outputs = len(region.outputs)
        self.values.update({(k, n): x for n, x in enumerate(results[:num_outputs])})
        mutations = self.program.folded.regions[region.region].graph.mutations
        for (slot, _), value in zip(mutations, results[num_outputs:], strict=True):
            self.updates.append((self.buffers[instance.sources[slot].name], value))
        for key in self.runner.last_uses[k]:
            del self.values[key]

    def _note_copies(self, k: int, results: Sequence[Tensor]) -> None:
        """An instance has run on parameters that come layer by layer."""
        self.step.host_side.keep(results)
        for x in results:
            if x.requires_grad:
                x.register_hook(partial(self.step.come_to, k))  # type: ignore[no-untyped-call]

    def _run_saving(self, k: int, call: RegionCall) -> Sequence[Tensor]:
        """Run an instance; what it saves leaves for the host where the plan says so."""
        saved = self.saved
        if saved is None:
            return self.modes[k].run(call)
        parameters = chain.from_iterable(use.shards for use in self.step.uses[k])
        with saved.saving(k, (*call.direct, *parameters)):
            results = self.modes[k].run(call)
        saved.leave(k, results)
        for x in results:
            if x.requires_grad:
                x.register_hook(partial(saved.enter, k))  # type: ignore[no-untyped-call]
        return results

    def _fetch(self, source: Source, layout: Layout) -> Tensor:
        """The local tensor of a source in `layout`."""
        match source.kind:
            case SourceKind.VALUE:
                return self.values[source.instance, source.output]
            case SourceKind.PARAMETER:
                deferred = self.step.context.deferred
                parameter = self.parameters[source.label]
                self.step.host_side.arrive(parameter)
                return parameter if deferred is None else deferred.tap(parameter)
            case SourceKind.BOUNDARY:
                return self.arrived[source.name]
            case SourceKind.INPUT:
                return self.inputs(source.name, layout)
            case SourceKind.BUFFER:
                whole = self.buffers[source.name]
            case SourceKind.CONSTANT:
                whole = self.runner.constants[source.name]
        return shard_of(whole, layout, self.program.mesh.sizes, self.runner.mesh.coords)


def _slices(program: EmittedProgram) -> list[tuple[str, tuple[str, ...], int]]:
    """(name, labels of its slices in order, dim) of the parameters that are read in slices."""
    read = {s.name: s for i in program.folded.instances for s in i.sources if s.slice}
    found = []
    for name, source in read.items():
        of = source.slice
        assert of is not None
        parts = (replace(source, slice=replace(of, number=n)) for n in range(of.count))
        found.append((name, tuple(part.label for part in parts), of.dim))
    return found


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
