"""Seconds of the segments of a region (meshfold.codegen.program.region_schedule).

The list scheduler and the simulator both have their times from here, so they agree.
"""

import math
from collections.abc import Iterator, Sequence

from meshfold.codegen.program.region_schedule import (
    CollectiveSegment,
    OpsSegment,
    Origin,
    SegmentedGraph,
)
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.conversion_step import Step
from meshfold.ir.op_graph import ITEM_BYTES, OpGraph
from meshfold.ir.spmd import Layout, local_shape, padded_shape
from meshfold.ir.step_events import CollectiveEvent
from meshfold.passes.events.region import collective
from meshfold.passes.price.conversions import COLLECTIVES, StepAction, step_actions
from meshfold.passes.price.host_issue import issued_by_host
from meshfold.passes.price.op_time import OpTime, OpTimer, op_time
from meshfold.passes.price.parameter_groups import group_copies
from meshfold.passes.price.parameters import GroupCopies, local_bytes
from meshfold.passes.rules.table import AxisRule
from meshfold.zero.parameter_group import ParameterGroup

Work = tuple[float, CollectiveEvent | None, Origin]
"""Kernels of so many seconds, or a collective; and the op or conversion it is part of."""


class SegmentCosts:
    """Costs of the segments of one region with the ops `ops`. rules: of every op, one per axis."""

    def __init__(self, ops: OpGraph, rules: Sequence[Sequence[AxisRule]], costs: CostModel) -> None:
        self.ops = ops
        self.rules = rules
        self.costs = costs
        self.op_times: list[OpTime] = []
        self._inside: list[tuple[tuple[CollectiveEvent, bool], ...]] = []
        """Blocking collectives of every op, and whether each is of the backward."""
        self._flying: dict[tuple[int, bool], CollectiveEvent] = {}
        """Asynchronous ones by (op, whether of the backward): rows that travel to experts."""
        for k, (op, of_axes) in enumerate(zip(ops.ops, rules, strict=True)):
            self.op_times.append(op_time(ops, op, of_axes, costs))
            found = []
            if any(rule.comm for rule in of_axes):
                for c in OpTimer(ops, op, costs).inside(of_axes):
                    event = collective(c.kind, c.num_bytes, (c.axis,), costs, c.seconds)
                    if c.is_asynchronous:
                        self._flying[k, c.is_backward] = event
                    else:
                        found.append((event, c.is_backward))
            self._inside.append(tuple(found))
        self.op_times = issued_by_host(self.op_times, ops, costs.device.host_op_s)

    def works(self, graph: SegmentedGraph, segment: OpsSegment, direction: int) -> Iterator[Work]:
        """A segment forward (0) or backward (1), op by op. An op of several nodes counts where
        its last one is."""
        origins = segment.origins if direction == 0 else tuple(reversed(segment.origins))
        for origin in origins:
            if graph.owners[origin] is not segment:
                continue
            if not isinstance(origin, int):
                yield self._action(origin, direction).seconds, None, origin
                continue
            inside = [
                c for c, is_backward in self._inside[origin] if is_backward == bool(direction)
            ]
            time = self.op_times[origin]
            kernels: Work = (time.backward_s if direction else time.forward_s, None, origin)
            yield from ([kernels] if direction == 0 else [])
            yield from ((0.0, c, origin) for c in inside)
            yield from ([kernels] if direction == 1 else [])

    def seconds(self, graph: SegmentedGraph, segment: OpsSegment, direction: int) -> float:
        """Seconds of a segment, with the collectives inside its ops."""
        works = self.works(graph, segment, direction)
        return sum(seconds if c is None else c.seconds for seconds, c, _ in works)

    def conversion(self, segment: CollectiveSegment, direction: int) -> Work:
        """What a conversion, or an op whose rows travel, does in a direction: the collective, and
        the copies before its start or after its wait."""
        if isinstance(segment.origin, int):
            return 0.0, self._flying.get((segment.origin, bool(direction))), segment.origin
        _, step = segment.origin
        action = self._action(segment.origin, direction)
        if action.kind not in COLLECTIVES:
            return action.seconds, None, segment.origin
        event = collective(action.kind, action.num_bytes, (step.axis,), self.costs, action.seconds)
        starts = (segment.kind == "start") == (direction == 0)
        return action.before_s if starts else action.after_s, event, segment.origin

    def _action(self, origin: tuple[int, Step], direction: int) -> StepAction:
        v, step = origin
        return step_actions(self.ops.values[v], step, self.costs)[direction]

    def group_s(self, kind: str, group: ParameterGroup, axes: Sequence[int]) -> float:
        """Seconds of a collective over the members of a parameter group, as ops read them."""
        num_bytes, sizes = 0, self.costs.storage.mesh.sizes
        for member in group.members:
            unsharded = padded_shape(member.shape, member.stored, sizes)
            num_bytes += (
                math.prod(local_shape(unsharded, member.used, sizes)) * ITEM_BYTES[group.dtype]
            )
        return self.costs.storage.collective_s(kind, num_bytes, axes)

    def added_s(self, v: int, layout: Layout) -> float:
        """Seconds that the gradient of weight v takes longer because it is added to another one,
        which the product reads."""
        value = self.ops.values[v]
        num_bytes = local_bytes(value, layout, self.costs.mesh.sizes)
        return self.costs.compute_s(0.0, num_bytes, value.dtype) - self.costs.launch_s

    def copies(self, group: ParameterGroup) -> GroupCopies:
        """Seconds of the copies around the collectives of a parameter group."""
        members = [(self.ops.values[m.slot], m.stored) for m in group.members]
        return group_copies(members, group.gather, self.costs.storage)
