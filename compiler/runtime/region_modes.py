"""The ways in which a region instance runs; each instance gets one when a program is loaded.

EagerRegion      the graph of the region, under autograd
ScheduledRegion  its segments, in the order of its schedule
ChainedRegion    its segments, software-pipelined with those of its neighbours
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from meshfold.codegen.program.emitted import RegionInstance
from meshfold.codegen.program.region_schedule import ChunkedBoundary
from meshfold.distributed.step_context import StepContext
from meshfold.runtime.chained_execution import ChainedExecution
from meshfold.runtime.recomputation import Recomputation, start_nothing
from meshfold.runtime.segment_execution import SegmentExecution, run_as_node
from meshfold.runtime.selective_recomputation import SelectiveRecomputation, SelectiveRegion
from meshfold.zero.step import TrainingStep


@dataclass(frozen=True, slots=True)
class RegionCall:
    """One forward of an instance."""

    step: TrainingStep
    direct: Sequence[Tensor]
    """The local tensors that are passed directly."""
    ahead: Callable[[], None]
    """Starts the gathers that come next."""
    unfinished: dict[int, ChainedExecution]
    """Executions whose epilogue the next instance runs, by instance."""


class RegionMode(Protocol):
    """How an instance runs."""

    def run(self, call: RegionCall) -> Sequence[Tensor]:
        """The region's results, ready for backward, then the new values of mutated buffers."""


@dataclass(frozen=True, slots=True)
class EagerRegion:
    """graph: the region's, or what runs in its place. selective: see SegmentExecution."""

    instance: RegionInstance
    graph: Callable[..., Any]
    selective: SelectiveRegion | None = None

    def run(self, call: RegionCall) -> Sequence[Tensor]:
        """See RegionMode."""
        instance, step, graph = self.instance, call.step, self.graph
        uses = step.uses[instance.index]

        def run(
            context: StepContext,
            arrived: Sequence[Tensor],
            ahead: Callable[[], None] = start_nothing,
        ) -> Any:
            return graph(context, ahead, instance.number, *uses, *arrived, *instance.floats)

        if self.selective is not None and step.is_recording:
            selective = SelectiveRecomputation(step, instance, self.selective)
            with selective.recording(call.direct) as context:
                first = context, call.ahead, instance.number
                arguments = *first, *uses, *call.direct, *instance.floats
                return selective.run(instance.region.graph.graph, arguments)
        if instance.region.recompute != "full" or not step.is_recording:
            return run(step.context, call.direct, call.ahead)  # type: ignore[no-any-return]
        recomputation = Recomputation(step, instance.index, run, uses)
        with recomputation.saving_numbers(call.direct) as context:
            return run(context, call.direct, call.ahead)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class ScheduledRegion:
    """See the module docstring."""

    instance: RegionInstance
    selective: SelectiveRegion | None = None

    def run(self, call: RegionCall) -> Sequence[Tensor]:
        """See RegionMode."""
        execution = SegmentExecution(call.step, self.instance, call.ahead, selective=self.selective)
        return run_as_node(execution, call.direct)


@dataclass(frozen=True, slots=True)
class ChainedRegion:
    """boundary: what it receives and sends in chunks."""

    instance: RegionInstance
    boundary: ChunkedBoundary

    def run(self, call: RegionCall) -> Sequence[Tensor]:
        """See RegionMode."""
        k = self.instance.index
        previous = call.unfinished.pop(k - 1, None)
        execution = ChainedExecution(call.step, self.instance, call.ahead, self.boundary, previous)
        results = run_as_node(execution, call.direct)
        if self.boundary.sent:
            call.unfinished[k] = execution
        return results
