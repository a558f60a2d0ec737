"""Chained regions: one sends values in chunks, which the next receives as it needs them.

Autograd sees an empty tensor in place of such a value (meshfold.codegen.chained_chunks): it carries
the order of regions and no more. Chunks, and their gradients, pass from a region to its neighbour
by number. The last actions of a region, its epilogue, run within the next one: at the actions
EPILOGUE of that one's schedule, or as soon as it reads a chunk that is not computed yet. The
epilogue ends with the region that runs it, and before that starts gathers ahead: parameters of two
regions at most are unsharded, as without. The backward does the same from the last region to the
first.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshfold.codegen.program.emitted import RegionInstance
from meshfold.codegen.program.region_schedule import ActionKind, ChunkedBoundary
from meshfold.runtime.segment_execution import SegmentExecution
from meshfold.zero.step import TrainingStep


class ChainedExecution:
    """A chained instance during one step (a RegionExecution). ahead: starts the gathers that come
    next; previous: the instance before, if that sends chunks."""

    def __init__(
        self,
        step: TrainingStep,
        instance: RegionInstance,
        ahead: Callable[[], None],
        boundary: ChunkedBoundary,
        previous: "ChainedExecution | None",
    ) -> None:
        assert instance.region.recompute == "none"
        schedule = instance.region.schedule
        assert schedule is not None
        self._segments = SegmentExecution(step, instance, ahead, boundary.idle(schedule))
        self.uses = self._segments.uses
        self._schedule = schedule
        self._step = step
        self._index = instance.index
        self._previous = previous
        self._next: ChainedExecution | None = None
        """The next instance, in the backward."""
        received = boundary.received_names(schedule)
        self._received = {name: number for number, name in enumerate(received)}
        """Names of the chunks that are received, with their numbers."""
        self._sent = {name: k for k, name in enumerate(boundary.sent_names(schedule))}
        self._chunked_inputs = {
            n for n, slot in enumerate(instance.region.direct) if slot in boundary.slots
        }
        self._chunked_results = frozenset(boundary.sent)
        self._chunks: dict[int, tuple[Tensor, bool]] = {}
        """Chunks by number, and whether they have a gradient, until the next region reads them."""
        self._awaited = set(self._sent)
        """Names of chunks whose gradients have not come."""
        self._forward_at = schedule.forward_end(boundary.sent)
        self._backward_at = schedule.backward_end(boundary.slots)
        """Of the actions, the first that the next region runs."""
        self._is_released = False

    # Forward.

    def forward(self, direct: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """See RegionExecution."""
        segments, names = self._segments, self._segments.graph.results
        pairs = enumerate(zip(segments.direct_names, direct, strict=True))
        arrived = dict(pair for n, pair in pairs if n not in self._chunked_inputs)
        if not all(direct[n].requires_grad for n in self._chunked_inputs):
            # The backward ends here: nobody would run the epilogue.
            self._backward_at = len(self._schedule.backward)
        with torch.enable_grad():
            segments.enter(self._step.context, arrived)
            for action in range(self._forward_at):
                self._run_forward_action(action)
            if self._previous is not None:
                self._previous.finish_forward()
        results = [
            self._token() if n in self._chunked_results else segments.values[name]
            for n, name in enumerate(names)
        ]
        self._end_forward()
        # Autograd follows the empty tensors in any case.
        chunked, trained = self._chunked_results, segments.trained
        return results, [n in chunked or name in trained for n, name in enumerate(names)]

    def _token(self) -> Tensor:
        return torch.empty(0, device=self._step.mesh.device)

    def _run_forward_action(self, k: int) -> None:
        action = self._schedule.forward[k]
        if self._previous is not None and action.kind is ActionKind.EPILOGUE:
            self._previous.advance_forward()
        if self._previous is not None and action.kind is ActionKind.PREFETCH:
            self._previous.finish_forward()
        runs = action.kind is ActionKind.FORWARD and action.number not in self._segments.skipped
        if runs:
            self._receive_chunks(action.number)
        self._segments.run_forward_action(k)
        for name in self._segments.graph.segments[action.number].outputs if runs else ():
            if name in self._sent:
                is_trained = name in self._segments.trained
                self._chunks[self._sent[name]] = self._segments.values[name], is_trained

    def _receive_chunks(self, segment: int) -> None:
        values = self._segments.values
        for name in self._segments.graph.segments[segment].inputs:
            if name in self._received and name not in values:
                assert self._previous is not None, "a received chunk has a region before"
                values[name], is_trained = self._previous.take_chunk(self._received[name])
                self._segments.trained |= {name} if is_trained else set()

    def advance_forward(self) -> None:
        """Run the next action of the epilogue, if one is left."""
        if self._forward_at < len(self._schedule.forward):
            self._forward_at += 1
            self._run_forward_action(self._forward_at - 1)
            self._end_forward()

    def finish_forward(self) -> None:
        """Run all of the epilogue."""
        while self._forward_at < len(self._schedule.forward):
            self.advance_forward()

    def release(self) -> None:
        """Release the instance's parameters, once its forward has ended."""
        self._is_released = True
        self._end_forward()

    def _end_forward(self) -> None:
        if self._forward_at == len(self._schedule.forward):
            self._segments.values = {}
            if self._is_released:
                self._step.release(self._index)

    def take_chunk(self, number: int) -> tuple[Tensor, bool]:
        """A chunk, and whether it has a gradient, as soon as it is computed."""
        while number not in self._chunks:
            has_epilogue = self._forward_at < len(self._schedule.forward)
            assert has_epilogue, f"chunk {number} is not computed"
            self.advance_forward()
        return self._chunks.pop(number)

    # Backward.

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See RegionExecution."""
        segments = self._segments
        is_begun = self._next is not None and not self._next._is_over
        self._step.arrive(self._index, prefetches=False, is_begun=is_begun)
        for n, (name, gradient) in enumerate(zip(segments.graph.results, gradients, strict=True)):
            if n not in self._chunked_results:
                segments.add_gradient(name, gradient)
        for action in range(self._backward_at):
            self._run_backward_action(action)
        self._finish_next()
        for name in sorted(self._awaited):
            self._take_gradient(name)
        self._next = None
        if self._previous is not None:
            self._previous._next, self._previous = self, None
        found = [
            self._token() if n in self._chunked_inputs else segments.gradients.pop(name, None)
            for n, name in enumerate(segments.direct_names)
        ]
        self._check_over()
        return found

    def _run_backward_action(self, k: int) -> None:
        action = self._schedule.backward[k]
        if self._next is not None and action.kind is ActionKind.EPILOGUE:
            self._next._advance_backward()
        if action.kind is ActionKind.PREFETCH:
            self._finish_next()
        if action.kind is ActionKind.BACKWARD and action.number not in self._segments.skipped:
            for name in self._segments.graph.segments[action.number].outputs:
                if name in self._awaited:
                    self._take_gradient(name)
        self._segments.run_backward_action(k)

    @property
    def _is_over(self) -> bool:
        """Whether the backward has run to its end."""
        return self._backward_at == len(self._schedule.backward)

    def _advance_backward(self) -> None:
        """Run the next action of the epilogue, if one is left."""
        if not self._is_over:
            self._backward_at += 1
            self._run_backward_action(self._backward_at - 1)
            if self._is_over:
                self._check_over()
                self._step.leave_instance()

    def _check_over(self) -> None:
        """At the end of a backward only gradients of received chunks are left."""
        gradients = self._segments.gradients.keys()
        assert not self._is_over or self._received.keys() >= gradients, (
            f"gradients are computed too late: {sorted(gradients)}"
        )

    def _finish_next(self) -> None:
        while self._next is not None and not self._next._is_over:
            self._next._advance_backward()

    def _take_gradient(self, name: str) -> None:
        self._awaited.remove(name)
        if self._next is not None:
            gradient = self._next._gradient_of_chunk(self._sent[name])
            self._segments.add_gradient(name, gradient)

    def _gradient_of_chunk(self, number: int) -> Tensor | None:
        """The gradient of a received chunk, as soon as nothing more is added to it."""
        name = next(name for name, n in self._received.items() if n == number)
        while self._backward_at <= self._schedule.last_readers.get(name, -1):
            self._advance_backward()
        return self._segments.gradients.pop(name, None)
