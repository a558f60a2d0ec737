"""One training step of a pipeline: a device runs its actions in order.

    2F0   receive the inputs of stage 2 from stage 1, run the forward of microbatch 0, send
    2B0   receive gradients from stage 3, run autograd's backward; those of its inputs are sent as
          soon as they are there, reductions are waited for afterwards
    2W0   make the gradients of weights that B left (meshfold.codegen.schedule.split_backward)

Gradients add up in `.grad` over the microbatches. Once per step come: gathers of parameters that
stay (ZeRO 1 and 2), which begin while their stage waits for its first microbatch, those of stage 0
with its first forward; the reduction of gradients that are
whole, with its last backward (meshfold.zero.microbatch_state); the sum of the
gradients of a parameter that several devices hold (tied embeddings); the loss, from the last stage
to all. Microbatches on one device (gradient accumulation) go the same way, without messages.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.distributed.deferred_weight_grads import DeferredWeightGrads
from meshfold.distributed.rank_mesh import ProcessMesh, RankMesh, all_reduced
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import DATA_AXIS, PIPELINE_AXIS
from meshfold.ir.spmd import local_shape
from meshfold.passes.split.stage_graphs import StageBoundaryValue
from meshfold.runtime.batches import LocalBatch
from meshfold.runtime.loss_targets import count_targets
from meshfold.runtime.microbatch_outputs import MicrobatchOutputs
from meshfold.runtime.runner import ProgramRunner, Tensors
from meshfold.runtime.stage_p2p import Receipt, Shapes, StageLinks
from meshfold.runtime.tied_gradients import TiedGradients, tied_groups
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.zero.host_side import HostSide
from meshfold.zero.microbatch_state import SharedStep


class PipelineRunner:
    """Runs the stages of one rank of `pipeline`. constants: values of CONSTANT sources by name.

    peak_in_flight: most (stage, microbatch) pairs of the last step whose activations were saved.
    spans: what it ran when, waiting for messages left out (action, start, end; seconds of
    time.monotonic, on a device that works by itself those of the host).
    Built on all ranks together: it creates process groups.
    """

    def __init__(
        self,
        pipeline: EmittedPipeline,
        mesh: RankMesh,
        constants: Tensors,
        host_side: HostSide | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.mesh = mesh
        self.constants = constants
        self.device = pipeline.device_of(mesh.coords)
        self.runners = {
            s: ProgramRunner(pipeline.stages[s], mesh, constants, host_side=host_side)
            for s in pipeline.schedule.stages_of(self.device)
        }
        self.links: StageLinks | None = None
        self.tied: tuple[TiedGradients, ...] = ()
        if isinstance(mesh, ProcessMesh) and pipeline.schedule.num_devices > 1:
            wraps = pipeline.schedule.num_virtual_stages > 1
            self.links = StageLinks(mesh, PIPELINE_AXIS, wraps=wraps)
            self.tied = tied_groups(pipeline, mesh)
        self.peak_in_flight = 0
        self.spans: list[tuple[StageAction, float, float]] = []

    def run(
        self,
        parameters: Tensors,
        buffers: Tensors,
        batch: LocalBatch,
        *,
        rng: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """The loss alone; else as run_all."""
        return self.run_all(parameters, buffers, batch, rng=rng)[0]

    def run_all(
        self,
        parameters: Tensors,
        buffers: Tensors,
        batch: LocalBatch,
        *,
        rng: tuple[int, int] = (0, 0),
    ) -> list[Tensor]:
        """Forward and backward of a batch; its outputs, detached, the same on all ranks.

        parameters: by canonical name; their gradients are added to `.grad`. buffers: by canonical
        name. rng: see StepContext. Raises RankLostError when another rank does not answer within
        the timeout of the mesh. Whatever is raised, `.grad` is as before.
        """
        pipeline, count = self.pipeline, self.pipeline.schedule.num_microbatches
        batch = batch.gathered_where_needed(pipeline.input_layouts)
        context = StepContext(
            self.mesh,
            rng,
            slices_own_batch=batch.slices_own_batch(pipeline.input_layouts),
            targets=self._targets(buffers, batch),
        )
        microbatches = [batch.microbatch(pipeline.input_layouts, count, j) for j in range(count)]
        # Gradients of tied parameters must not be added up twice; a step that fails leaves none.
        earlier = {name: p.grad for name, p in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        running = _Running(self, context, (parameters, buffers), microbatches)
        try:
            outputs = running.run(pipeline.actions[self.device])
            self.peak_in_flight, self.spans = running.peak_in_flight, running.spans
            for tied in self.tied:
                tied.add_up(parameters, self.mesh.place)
            outputs = self._on_all(self._with_whole_loss(outputs))
        except BaseException:
            for name, gradient in earlier.items():
                parameters[name].grad = gradient
            raise
        for name, gradient in earlier.items():
            now = parameters[name].grad
            if gradient is not None:
                parameters[name].grad = gradient if now is None else gradient.add_(now)
        loss, *others = outputs
        return [loss.to(_loss_dtype(pipeline)), *others]

    def _with_whole_loss(self, outputs: list[Tensor]) -> list[Tensor]:
        """The loss summed over the ranks that share it, on the device that makes it. Ranks add up
        their microbatches first: that the whole sum is late nobody waits for."""
        axes = self.pipeline.loss_axes
        if not axes or len(self.pipeline.stages) - 1 not in self.runners:
            return outputs
        return [all_reduced(self.mesh, outputs[0], axes), *outputs[1:]]

    def _on_all(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs of the last stage on all devices. outputs: on others the loss, of any value,
        alone."""
        if self.links is None:
            return outputs
        last = self.pipeline.schedule.device_of(len(self.pipeline.stages) - 1)
        if self.device != last:
            outputs += [
                torch.empty(o.shape, dtype=torch_dtype(o.dtype), device=self.mesh.device)
                for o in self.pipeline.folded.apart
            ]
        return [self.links.broadcast(x.contiguous(), last) for x in outputs]

    def _targets(self, buffers: Tensors, batch: LocalBatch) -> dict[tuple[int, int], float]:
        # A copy: what is gathered here stays local in the microbatches.
        batch = batch.microbatch({}, 1, 0)
        own = {k for s in self.runners for k in self.pipeline.graphs[s].numbers}
        return count_targets(
            self.pipeline.folded,
            [count for count in self.pipeline.counts if count.target[0] in own],
            self.constants,
            buffers,
            lambda name: batch(name, self.pipeline.unsharded),
            self.mesh.device,
        )


@dataclass(frozen=True)
class _Saved:
    """What a microbatch needs between its actions on one stage."""

    arrived: Mapping[str, Tensor]
    """What came over the stage boundary."""
    trained: Sequence[Tensor]
    """The outputs that get gradients."""
    deferred: DeferredWeightGrads | None


@contextmanager
def _sending_back(
    arrived: Sequence[Tensor], send: Callable[[Sequence[Tensor]], None]
) -> Iterator[None]:
    """Sends the gradients of what arrived to the stage before as soon as the backward inside has
    all of them: that stage goes on while this one still waits for its reductions. What has no
    gradient is sent as zeros, after the backward."""
    missing = set(map(id, arrived))

    def note(x: Tensor) -> None:
        missing.discard(id(x))
        if not missing:
            send([x.grad for x in arrived if x.grad is not None])

    hooks = [
        x.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for x in arrived
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if missing or not arrived:
        send([torch.zeros_like(x) if x.grad is None else x.grad for x in arrived])


class _Running:
    """One step."""

    def __init__(
        self,
        owner: PipelineRunner,
        context: StepContext,
        tensors: tuple[Tensors, Tensors],
        microbatches: Sequence[LocalBatch],
    ) -> None:
        self.owner = owner
        self.pipeline = owner.pipeline
        self.mesh = owner.mesh
        self.context = context
        self.tensors = tensors
        self.microbatches = microbatches
        self.splits = self.pipeline.schedule.splits_backward
        self.shared = {s: SharedStep() for s in owner.runners}
        self.saved: dict[tuple[int, int], _Saved] = {}
        """From F to B, or to W where the schedule has it."""
        self.peak_in_flight = 0
        self.spans: list[tuple[StageAction, float, float]] = []
        self.begun_s = 0.0
        """When the action that runs had what it takes over."""
        self.receipts: dict[StageAction, Receipt] = {}
        self.local_messages: dict[StageAction, list[Tensor]] = {}
        """Messages between two stages of this device, by what sends them."""
        # A sum of many small summands: not in 16 bits.
        wide = torch.promote_types(_loss_dtype(self.pipeline), torch.float32)
        self.loss = torch.zeros((), device=self.mesh.device, dtype=wide)
        names, sizes = self.mesh.mesh.names, self.mesh.mesh.sizes
        is_sliced = context.slices_own_batch and DATA_AXIS in names
        self.outputs = MicrobatchOutputs(
            [t for (t,) in self.pipeline.output_layouts],
            sizes[names.index(DATA_AXIS)] if is_sliced else 1,
        )

    def run(self, actions: Sequence[StageAction]) -> list[Tensor]:
        """The outputs, on the device of the last stage; on others a loss without meaning."""
        ends = Pass.WEIGHT_GRADIENT if self.splits else Pass.BACKWARD
        last = {a.stage: a for a in actions if a.kind is ends}
        waits = self._source(actions[0]) is not None
        if waits:
            self._gather_ahead(actions, 0)
        for k, action in enumerate(actions):
            for near in actions[k : k + 2]:
                self._expect(near)
            self.shared[action.stage].is_last = action == last[action.stage]
            self.begun_s = time.monotonic()
            self._RUN[action.kind](self, action)
            self.spans.append((action, self.begun_s, time.monotonic()))
            self.peak_in_flight = max(self.peak_in_flight, len(self.saved))
            if k == 0 and not waits:
                self._gather_ahead(actions, 1)
        assert all(shared.is_empty for shared in self.shared.values())
        if self.owner.links is not None:
            self.owner.links.finish(actions[-1])
        is_last = len(self.pipeline.stages) - 1 in self.owner.runners
        return [self.loss, *(self.outputs.whole() if is_last else ())]

    def _gather_ahead(self, actions: Sequence[StageAction], skipped: int) -> None:
        """Start gathers of the stages of this device, but for as many as are skipped, in the order
        of their first forwards. Beside what is resident all the step only the first stage has
        memory for that: nothing is in flight yet."""
        stages = [a.stage for a in actions if a.kind is Pass.FORWARD and a.microbatch == 0]
        for n, stage in enumerate(stages[skipped:], start=skipped):
            self.owner.runners[stage].gather_ahead(
                self.context, self.tensors[0], self.shared[stage], opens=n == 0
            )

    def _forward(self, action: StageAction) -> None:
        stage, graph = action.stage, self.pipeline.graphs[action.stage]
        deferred = DeferredWeightGrads() if self.splits else None
        context = replace(self.context, microbatch=action.microbatch, deferred=deferred)
        arrived = {}
        for border, value in zip(graph.arrives, self._take(action), strict=True):
            arrived[border.name] = value.requires_grad_(border.value.requires_grad)
        batch = self.microbatches[action.microbatch]
        is_last = action.microbatch + 1 == len(self.microbatches)
        outputs = self.owner.runners[stage].run_microbatch(
            context,
            *self.tensors,
            batch,
            arrived,
            self.shared[stage],
            updates=is_last or not self.pipeline.updates_once,
        )
        self._send(action, outputs[: len(graph.leaves)])
        if stage + 1 == len(self.pipeline.stages):
            loss, *others = outputs
            self.loss += loss.detach()
            self.outputs.add(action.microbatch, others)
            outputs = [loss]
        trained = [x for x in outputs if x.requires_grad]
        self.saved[stage, action.microbatch] = _Saved(arrived, trained, deferred)

    def _backward(self, action: StageAction) -> None:
        key = action.stage, action.microbatch
        saved = self.saved.pop(key)
        arrived, trained = saved.arrived, saved.trained
        if saved.deferred is not None:
            self.saved[key] = _Saved({}, [], saved.deferred)
        gradients = self._take(action)
        if action.stage + 1 == len(self.pipeline.stages):
            gradients = [torch.ones_like(x) for x in trained]
        waiting = [x for x in arrived.values() if x.requires_grad]
        with _sending_back(waiting, lambda back: self._send(action, back)):
            if trained:
                torch.autograd.backward(trained, gradients)
            if saved.deferred is not None:
                saved.deferred.end_backward()

    def _weight_gradients(self, action: StageAction) -> None:
        deferred = self.saved.pop((action.stage, action.microbatch)).deferred
        assert deferred is not None
        deferred.run()

    _RUN: ClassVar[Mapping[Pass, Callable[["_Running", StageAction], None]]] = {
        Pass.FORWARD: _forward,
        Pass.BACKWARD: _backward,
        Pass.WEIGHT_GRADIENT: _weight_gradients,
    }

    # Messages.

    def _source(self, action: StageAction) -> StageAction | None:
        """The action that sends what `action` takes over."""
        stage = action.stage + (-1 if action.kind is Pass.FORWARD else 1)
        if action.kind is Pass.WEIGHT_GRADIENT:
            return None
        if not 0 <= stage < len(self.pipeline.stages):
            return None
        return StageAction(stage, action.kind, action.microbatch)

    def _expect(self, action: StageAction) -> None:
        """Post the receive of what an action takes over."""
        source = self._source(action)
        if source is None or action in self.receipts or self._device(source) == self.owner.device:
            return
        assert self.owner.links is not None
        shapes = self._shapes(action)
        self.receipts[action] = self.owner.links.receive(
            self._device(source), source, self._number(source), shapes
        )

    def _take(self, action: StageAction) -> list[Tensor]:
        source = self._source(action)
        if source is None:
            return []
        if self._device(source) == self.owner.device:
            return self.local_messages.pop(source)
        values = self.receipts.pop(action).wait(action, source)
        self.begun_s = time.monotonic()
        return values

    def _send(self, action: StageAction, values: Sequence[Tensor]) -> None:
        """To the stage behind, or of a backward to the one before."""
        stage = action.stage + (1 if action.kind is Pass.FORWARD else -1)
        if not 0 <= stage < len(self.pipeline.stages):
            return
        device = self.pipeline.schedule.device_of(stage)
        if device == self.owner.device:
            self.local_messages[action] = [x.detach() for x in values]
        else:
            assert self.owner.links is not None
            self.owner.links.send(device, action, self._number(action), values)

    def _device(self, action: StageAction) -> int:
        return self.pipeline.schedule.device_of(action.stage)

    def _number(self, action: StageAction) -> int:
        """Tells the messages of a step apart."""
        is_back = int(action.kind is Pass.BACKWARD)
        return (action.stage * len(self.microbatches) + action.microbatch) * 2 + is_back

    def _shapes(self, action: StageAction) -> Shapes:
        graph = self.pipeline.graphs[action.stage]
        is_forward = action.kind is Pass.FORWARD
        values: Sequence[StageBoundaryValue] = graph.arrives if is_forward else graph.leaves
        return [
            (local_shape(b.value.shape, b.layout, self.mesh.mesh.sizes), b.value.dtype)
            for b in values
            if is_forward or b.value.requires_grad
        ]


def _loss_dtype(pipeline: EmittedPipeline) -> torch.dtype:
    return torch_dtype(pipeline.folded.outputs[0].dtype)
