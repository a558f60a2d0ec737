"""What a schedule that splits the backward keeps for W: of every product whose weight gradient is
put off, its input and the gradient of its result (meshfold.distributed.deferred_weight_grads).

Activations are gone after B, recomputed ones too; these are there until W. The plan of a device
says how much more that makes than the activations of its microbatches in flight, which the search
counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.compute import op_name
from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.price.parameters import local_bytes
from meshfold.passes.price.weight_gradients import SPLIT, trained_weights


@dataclass(frozen=True)
class PutOff:
    """Bytes of one microbatch on one rank: inputs of products, and gradients of their results."""

    inputs: int = 0
    gradients: int = 0

    @property
    def num_bytes(self) -> int:
        return self.inputs + self.gradients

    def __add__(self, other: "PutOff") -> "PutOff":
        return PutOff(self.inputs + other.inputs, self.gradients + other.gradients)


def put_off(graph: OpGraph, typing: RegionTyping, sizes: Sequence[int]) -> PutOff:
    """Of a region typed on a mesh of these sizes."""
    weights = trained_weights(graph)
    read: set[tuple[int, Layout]] = set()
    made: set[tuple[int, Layout]] = set()
    for op, types in zip(graph.ops, typing.ops, strict=True):
        if op_name(op.target) in SPLIT and not weights.isdisjoint(op.operands):
            pairs = zip(op.operands, types.inputs, strict=True)
            read.update((v, layout) for v, layout in pairs if v not in weights)
            # A gradient has the layout of its value.
            made.update(zip(op.outputs, types.outputs, strict=True))

    def num_bytes(places: set[tuple[int, Layout]]) -> int:
        values = [(graph.values[v], layout) for v, layout in places]
        return sum(local_bytes(x, layout, sizes) for x, layout in values if x.is_float)

    return PutOff(num_bytes(read), num_bytes(made))


def most_bytes(
    actions: Sequence[StageAction], kept: Mapping[int, int], of: Mapping[int, PutOff]
) -> int:
    """The most that a device has of all microbatches over its actions. kept: bytes of activations
    of one microbatch from F to B, by stage; of: what is there from B to W."""
    now = most = 0
    for action in actions:
        own, left = kept[action.stage], of[action.stage]
        if action.kind is Pass.FORWARD:
            now += own
        elif action.kind is Pass.BACKWARD:
            # Gradients come before what the forward saved is gone (measured).
            most = max(most, now + left.gradients)
            now += left.inputs + left.gradients - own
        else:
            now -= left.inputs + left.gradients
        most = max(most, now)
    return most
