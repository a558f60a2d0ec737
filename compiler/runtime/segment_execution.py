"""Running a region by its schedule: one node of autograd's graph, a list of actions each way.

    forward    every segment runs under autograd of its own; what it reads are new leaf tensors
    backward   per segment, torch.autograd.grad from what it returned to what it read

Values and gradients between segments are saved here, each until its last use. A segment's share of
autograd's graph is referred to by edges, not tensors, so it saves what its ops saved and nothing
else. Gradients of parameters go to the groups (meshfold.zero.step), which start their reduction
when the schedule says; other gradients leave through the region's node.

With full recomputation (meshfold.runtime.recomputation) autograd saves numbers instead of tensors;
when the first comes back the segments run a second time, up to the last that is needed. With
selective recomputation (meshfold.runtime.selective_recomputation) segments run node by node, and
what is missing runs again by the region's graph.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from meshfold.codegen.program.emitted import CONTEXT, INSTANCE, RegionInstance
from meshfold.codegen.program.region_schedule import ActionKind, OpsSegment, RegionSchedule
from meshfold.distributed.deferred_weight_grads import DeferredWeightGrads
from meshfold.distributed.step_context import StepContext
from meshfold.errors import MeshfoldError
from meshfold.runtime.recomputation import Recomputation, Run, start_nothing
from meshfold.runtime.selective_recomputation import SelectiveRecomputation, SelectiveRegion
from meshfold.sharding.async_autograd import Actions
from meshfold.torch_compat.autograd_engine import edge_of
from meshfold.zero.step import SECOND_BACKWARD, GroupUse, TrainingStep
from meshfold.zero.step_ends import new_token


class RegionExecution(Protocol):
    """An instance of a region during one step, as one node of autograd's graph."""

    uses: list[GroupUse]

    def forward(self, direct: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """What the region returns, and whether it has gradients."""

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of what was passed directly; those of groups are on their way."""


def run_as_node(execution: RegionExecution, direct: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The region's results, ready for backward."""
    tokens = [use.token for use in execution.uses if use.token is not None]
    results: tuple[Tensor, ...] = _Node.apply(execution, len(tokens), *tokens, *direct)  # type: ignore[no-untyped-call]
    return results


class SegmentExecution:
    """The segments of an instance during one step, and what is between them.

    ahead: starts the gathers that come next. skipped: segments that do not run. selective: of a
    region with selective recomputation.
    """

    def __init__(
        self,
        step: TrainingStep,
        instance: RegionInstance,
        ahead: Callable[[], None] = start_nothing,
        skipped: Collection[int] = (),
        selective: SelectiveRegion | None = None,
    ) -> None:
        region = instance.region
        assert region.schedule is not None
        self.schedule: RegionSchedule = region.schedule
        self.graph = region.schedule.graph
        self.step = step
        self.instance = instance
        self.uses: list[GroupUse] = step.uses[instance.index]
        self.skipped = skipped
        self._selective = selective
        self._recomputation: SelectiveRecomputation | None = None
        """In the forward of a region with selective recomputation."""
        self._ahead = ahead
        names = self.graph.placeholders
        first = len(names) - len(instance.floats)
        self.direct_names = names[first - len(region.direct) : first]
        self._constants: dict[str, Any] = dict(zip(names[first:], instance.floats, strict=True))
        self._constants[INSTANCE] = instance.number
        self.values: dict[str, Any] = {}
        """Tensors, none of which autograd follows."""
        self._in_flight: list[int] = []
        """Numbers of the starts that have not been waited for."""
        self._actions: dict[int, Actions] = {}
        """What a start and its wait do, by number of the start."""
        self.trained: set[str] = set()
        """Names of values with a gradient."""
        self.gradients: dict[str, Tensor] = {}
        self._weight_grads: set[str] = set()
        """Names of gradients that an action WEIGHTS computed: nobody else refers to these."""
        self._saved: dict[int, _SavedSegment] = {}

    # Forward.

    def forward(self, direct: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """See RegionExecution."""
        with torch.enable_grad():
            if self.instance.region.recompute == "full":
                recompute = _recompute(self.step, self.instance)
                recomputation = Recomputation(self.step, self.instance.index, recompute, self.uses)
                with recomputation.saving_numbers(direct) as context:
                    results = self._run_forward(context, direct)
            elif self._selective is not None:
                selective = SelectiveRecomputation(self.step, self.instance, self._selective)
                self._recomputation = selective
                with selective.recording(direct) as context:
                    results = self._run_forward(context, direct)
                self._recomputation = None
            else:
                results = self._run_forward(self.step.context, direct)
        return results, [name in self.trained for name in self.graph.results]

    def _finish_collectives(self) -> None:
        """Wait for what is in flight when a second run is stopped."""
        for number in self._in_flight:
            in_flight = self.values[self.graph.segments[number].outputs[0]]
            self._actions[number][0].finish(self.step.mesh, in_flight)

    def _run_forward(self, context: StepContext, direct: Sequence[Tensor]) -> list[Tensor]:
        self.enter(context, dict(zip(self.direct_names, direct, strict=True)))
        for action in range(len(self.schedule.forward)):
            self.run_forward_action(action)
        results = [self.values[name] for name in self.graph.results]
        self.values = {}
        return results

    def enter(self, context: StepContext, named: Mapping[str, Tensor]) -> None:
        """Begin the forward with these values."""
        self.trained = {name for name, x in named.items() if x.requires_grad}
        self.values = {CONTEXT: context, **self._constants}
        self.values.update({name: x.detach() for name, x in named.items()})

    def run_forward_action(self, k: int) -> None:
        """Run action `k` of the forward."""
        action = self.schedule.forward[k]
        match action.kind:
            case ActionKind.UNSHARD:
                self._unshard(action.number)
            case ActionKind.PREFETCH:
                self._ahead()
            case ActionKind.FORWARD:
                self._run(action.number)
        for name in self.schedule.dead[k]:
            self.values.pop(name, None)

    def _unshard(self, group: int) -> None:
        use = self.uses[group]
        members = use.members()
        for name, (b, member) in self.graph.members.items():
            if b == group:
                self.values[name] = members[member]
                if use.token is not None:
                    self.trained.add(name)

    def _run(self, number: int) -> None:
        if number in self.skipped:
            return
        segment = self.graph.segments[number]
        if segment.kind == "ops":
            self._run_ops(number, segment)
            return
        (source, *route), (target,) = segment.inputs, segment.outputs
        mesh, x = self.step.mesh, self.values[source]
        with torch.no_grad():
            if segment.kind == "start":
                self._actions[number] = segment.actions_on(*(self.values[name] for name in route))
                self.values[target] = self._actions[number][0].launch(mesh, x, segment.axis)
                self._in_flight.append(number)
            else:
                self.values[target] = self._actions[segment.partner][0].finish(mesh, x)
                self._in_flight.remove(segment.partner)
        if source in self.trained:
            self.trained.add(target)
        if segment.kind == "wait" and self._recomputation is not None:
            result = self.values[target].detach().requires_grad_(target in self.trained)
            self._recomputation.note(target, result, ())

    def _run_ops(self, number: int, segment: OpsSegment) -> None:
        arguments = [self.values[name] for name in segment.inputs]
        trained = [k for k, name in enumerate(segment.inputs) if name in self.trained]
        if not (trained and torch.is_grad_enabled()):
            self.values.update(zip(segment.outputs, self._compute(segment, arguments), strict=True))
            return
        # A leaf of autograd's would hold its tensor; what stands behind an empty one does not.
        anchor = arguments[trained[0]].new_empty(0, requires_grad=True)
        entered = _Entry.apply(anchor, *[arguments[k] for k in trained])  # type: ignore[no-untyped-call]
        for k, x in zip(trained, entered, strict=True):
            arguments[k] = x
        deferred = DeferredWeightGrads() if number in self.schedule.deferred_s else None
        if CONTEXT in segment.inputs:
            k = segment.inputs.index(CONTEXT)
            arguments[k] = replace(arguments[k], deferred=deferred)
        results = self._compute(segment, arguments)
        entries = [(segment.inputs[k], edge_of(arguments[k])) for k in trained]
        exits = []
        for name, x in zip(segment.outputs, results, strict=True):
            if isinstance(x, Tensor) and x.requires_grad:
                exits.append((name, edge_of(x)))
                self.trained.add(name)
                x = x.detach()
            self.values[name] = x
        self._saved[number] = _SavedSegment(entries, exits, deferred)

    def _compute(self, segment: OpsSegment, arguments: Sequence[Any]) -> Sequence[Any]:
        if self._recomputation is not None:
            return self._recomputation.run(segment.graph.graph, arguments)
        return segment.graph.forward(*arguments)  # type: ignore[no-any-return]

    # Backward.

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See RegionExecution."""
        self.step.arrive(self.instance.index, prefetches=False)
        for name, gradient in zip(self.graph.results, gradients, strict=True):
            self.add_gradient(name, gradient)
        for action in range(len(self.schedule.backward)):
            self.run_backward_action(action)
        found = [self.gradients.pop(name, None) for name in self.direct_names]
        assert not self.gradients, f"gradients are computed too late: {sorted(self.gradients)}"
        return found

    def run_backward_action(self, k: int) -> None:
        """Run action `k` of the backward."""
        action = self.schedule.backward[k]
        match action.kind:
            case ActionKind.BACKWARD:
                self._run_backward(action.number)
            case ActionKind.WEIGHTS:
                self._compute_weight_grads(action.number)
            case ActionKind.REDUCE:
                self._reduce(action.number)
            case ActionKind.PREFETCH:
                self.step.prefetch_before(self.instance.index)

    def add_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Add to the gradient of a value."""
        if gradient is not None:
            before = self.gradients.get(name)
            self.gradients[name] = gradient if before is None else before + gradient

    def _run_backward(self, number: int) -> None:
        if number in self.skipped:
            return
        segment = self.graph.segments[number]
        if segment.kind == "ops":
            self._run_ops_backward(number)
            return
        source, (target,) = segment.inputs[0], segment.outputs
        gradient = self.gradients.pop(target, None)
        if gradient is None:
            return
        mesh = self.step.mesh
        if segment.kind == "wait":
            back = self._actions[segment.partner][1]
            self.gradients[source] = back.launch(mesh, gradient, segment.axis)
        else:
            self.add_gradient(source, self._actions[number][1].finish(mesh, gradient))

    def _run_ops_backward(self, number: int) -> None:
        saved = self._saved.get(number)
        if saved is None:
            return
        pairs = [(edge, self.gradients.pop(name, None)) for name, edge in saved.exits]
        found = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if found:
            exits, gradients = zip(*found, strict=True)
            entries = [edge for _, edge in saved.entries]
            computed = torch.autograd.grad(exits, entries, gradients, allow_unused=True)
            for (name, _), gradient in zip(saved.entries, computed, strict=True):
                self.add_gradient(name, gradient)
        if saved.deferred is None:
            del self._saved[number]

    def _compute_weight_grads(self, number: int) -> None:
        saved = self._saved.pop(number, None)
        if saved is None or saved.deferred is None:
            return
        names = [name for name, _ in saved.entries]
        # Others may refer to tensors that an action BACKWARD computed.
        before = [self.gradients.pop(n, None) if n in self._weight_grads else None for n in names]
        computed = saved.deferred.gradients([edge for _, edge in saved.entries], before)
        for name, gradient in zip(names, computed, strict=True):
            self.add_gradient(name, gradient)
            if gradient is not None:
                self._weight_grads.add(name)

    def _reduce(self, group: int) -> None:
        use = self.uses[group]
        if use.token is None:
            return
        found: list[Tensor | None] = [None] * len(use.group.members)
        for name, (b, member) in self.graph.members.items():
            if b == group:
                found[member] = self.gradients.pop(name, None)
        use.start_reduction(found)


def _recompute(step: TrainingStep, instance: RegionInstance) -> Run:
    """Runs the segments a second time, in an execution of its own: what autograd saves of the
    first must not lead to it."""

    def run(context: StepContext, direct: Sequence[Tensor]) -> None:
        second = SegmentExecution(step, instance)
        try:
            second._run_forward(context, direct)
        finally:
            second._finish_collectives()

    return run


@dataclass(frozen=True, slots=True)
class _SavedSegment:
    """Where a segment begins and ends in autograd's graph, by names of values."""

    entries: Sequence[tuple[str, GradientEdge]]
    exits: Sequence[tuple[str, GradientEdge]]
    deferred: DeferredWeightGrads | None


class _Entry(torch.autograd.Function):
    """The same tensors, at a new place of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise AssertionError("gradients are taken where a segment begins")


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, execution: RegionExecution, num_tokens: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.execution = execution
        ctx.set_materialize_grads(False)
        computed, trained = execution.forward(tensors[num_tokens:])
        # New tensors: autograd writes itself into what is returned.
        results = tuple(x.detach() for x in computed)
        pairs = zip(results, trained, strict=True)
        ctx.mark_non_differentiable(*(x for x, is_trained in pairs if not is_trained))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        execution, ctx.execution = ctx.execution, None
        if execution is None:
            raise MeshfoldError(SECOND_BACKWARD)
        direct = execution.backward(gradients)
        tokens = [new_token(use.shards[0]) for use in execution.uses if use.token is not None]
        return None, None, *tokens, *direct
