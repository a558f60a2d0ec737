"""Conversions: the one table of layout changes, and what a change of layout costs.

On one axis every pair of types has one direct conversion (CONVERSIONS). On several axes a change of
layout is one step per axis, in the cheapest order whose layouts in between are all legal:

    cost(s -> t) = min over orders of  sum_k step(s_k -> t_k | the other axes as converted so far)

Two shards of one dim that swap axes have no such order; then one axis first goes to Invariant.

Times are seconds, sizes bytes per rank. Gradients: a value that needs none has a free backward, and
its Invariant and Replicate are the same.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from meshfold.ir.conversion_step import Step, exchange_is_even, with_type
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, Layout, SpmdType, is_legal, local_blocks, local_shape


class ConversionCosts(Protocol):
    """What pricing a conversion needs of a cost model
    (cost_models.op_costs.cost_model.CostModel)."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def launch_s(self) -> float: ...

    def collective_s(self, kind: str, num_bytes: int, axes: tuple[int, ...]) -> float: ...

    def compute_s(self, flops: float, num_bytes: float, dtype: str) -> float: ...


@dataclass(frozen=True, slots=True)
class AxisConversion:
    """What one step does to the value (forward) and to its gradient (backward).

    Collectives: "all_reduce", "all_gather", "reduce_scatter", "all_to_all". Local: "slice" (keep
    the own shard), "zero_pad" (the own shard among zeros), "mask" (coordinate 0 keeps the value,
    the others hold zeros), "none".
    """

    forward: str
    backward: str


CONVERSIONS: dict[tuple[str, str], AxisConversion] = {
    ("I", "R"): AxisConversion("none", "all_reduce"),
    ("I", "S"): AxisConversion("slice", "all_gather"),
    ("I", "P"): AxisConversion("mask", "none"),
    ("R", "I"): AxisConversion("none", "mask"),
    ("R", "S"): AxisConversion("slice", "zero_pad"),
    ("R", "P"): AxisConversion("mask", "mask"),
    ("P", "I"): AxisConversion("all_reduce", "none"),
    ("P", "R"): AxisConversion("all_reduce", "all_reduce"),
    ("P", "S"): AxisConversion("reduce_scatter", "all_gather"),
    ("S", "R"): AxisConversion("all_gather", "reduce_scatter"),
    ("S", "I"): AxisConversion("all_gather", "slice"),
    ("S", "P"): AxisConversion("zero_pad", "slice"),
    ("S", "S"): AxisConversion("all_to_all", "all_to_all"),
}

COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})

_SPLITTING = frozenset({"reduce_scatter", "all_to_all"})
_JOINING = frozenset({"all_gather", "all_to_all"})

_SHARD_OVERLAP = AxisConversion("all_gather", "all_gather")


@dataclass(frozen=True, slots=True)
class StepAction:
    """What a step does one way. Copies around a collective split shards of an inner dim, or join
    them."""

    kind: str
    """A name of AxisConversion."""
    num_bytes: int
    """Bytes as CostModel.collective_s takes them; 0 for what is local."""
    seconds: float
    before_s: float = 0.0
    """Seconds of a copy before the collective; after_s: of one after it."""
    after_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.before_s + self.seconds + self.after_s


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What a step takes both ways, whatever dims other axes shard: collectives and local copies;
    copies beside collectives where shards of its source, and of its target, are of an inner dim
    (inner_shards)."""

    moved_s: float
    source_copies_s: float
    target_copies_s: float


@dataclass(frozen=True, slots=True)
class ConversionCost:
    """Price of a conversion."""

    forward_s: float
    backward_s: float
    by_axis_s: tuple[float, ...]
    """Forward plus backward, without copies beside collectives."""
    forward_by_axis_s: tuple[float, ...]
    forward: tuple[str, ...]
    """Collectives in order of execution, as `backward`."""
    backward: tuple[str, ...]
    num_bytes: int
    """Local payload of the forward collectives together, of the backward ones if there are none."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def has_conversion(source: SpmdType, target: SpmdType) -> bool:
    """Whether there is one between two different types of one axis. Only ops that keep padding read
    it, and a rank pads only what is unsharded."""
    return not source.padded and (not target.padded or source.kind in "IR")


def converts(source: Layout, target: Layout) -> bool:
    """Whether each axis of two layouts is alike, or has a conversion."""
    return all(a == b or has_conversion(a, b) for a, b in zip(source, target, strict=True))


def axis_conversion(source: SpmdType, target: SpmdType, axis_size: int) -> AxisConversion:
    """The conversion between two different types of one axis. Shards of one dim with overlapping
    digits gather and slice, both ways."""
    assert "E" not in (source.kind, target.kind), "only combine brings rows back from their experts"
    if source.is_shard and target.is_shard and not exchange_is_even(source, target, axis_size):
        return _SHARD_OVERLAP
    return CONVERSIONS[source.kind, target.kind]


def conversion_steps(
    value: Value, source: Layout, target: Layout, costs: ConversionCosts
) -> tuple[Step, ...]:
    """The cheapest legal sequence of steps; empty if nothing changes.

    Both layouts must be legal. Ties go to the order that converts the first axes first.
    """
    changed = [k for k, (s, t) in enumerate(zip(source, target, strict=True)) if s != t]
    if len(changed) < 2:
        return tuple(Step(k, source[k], target[k], source) for k in changed)
    found = _cheapest(value, _orders(source, target, changed), costs)
    if found is None:
        # An axis between two shards goes through Invariant.
        found = _cheapest(value, _detours(source, target, changed), costs)
    assert found is not None, "taking every axis to Invariant first is always legal"
    return found


def conversion_cost(
    value: Value, source: Layout, target: Layout, costs: ConversionCosts
) -> ConversionCost:
    """Price of the steps that conversion_steps gives."""
    return steps_cost(value, conversion_steps(value, source, target, costs), costs)


def steps_cost(value: Value, steps: Sequence[Step], costs: ConversionCosts) -> ConversionCost:
    """Price of steps one after the other."""
    forward_s = backward_s = 0.0
    by_axis_s = [0.0] * len(costs.mesh.axes)
    forward_by_axis_s = [0.0] * len(costs.mesh.axes)
    forward: list[str] = []
    backward: list[str] = []
    forward_bytes = backward_bytes = 0
    for step in steps:
        there, back = step_actions(value, step, costs)
        forward_s += there.total_s
        backward_s += back.total_s
        by_axis_s[step.axis] += there.seconds + back.seconds
        forward_by_axis_s[step.axis] += there.seconds
        num_bytes = max(_ends(value, step, costs.mesh))
        if there.kind in COLLECTIVES:
            forward.append(there.kind)
            forward_bytes += num_bytes
        if back.kind in COLLECTIVES:
            backward.insert(0, back.kind)
            backward_bytes += num_bytes
    return ConversionCost(
        forward_s,
        backward_s,
        tuple(by_axis_s),
        tuple(forward_by_axis_s),
        tuple(forward),
        tuple(backward),
        forward_bytes or backward_bytes,
    )


def step_s(value: Value, step: Step, costs: ConversionCosts) -> float:
    """Seconds of one step, forward plus backward."""
    there, back = step_actions(value, step, costs)
    return there.total_s + back.total_s


def step_actions(value: Value, step: Step, costs: ConversionCosts) -> tuple[StepAction, StepAction]:
    """What one step does forward and backward."""
    mesh, axis, before = costs.mesh, step.axis, step.before
    there, back = _actions(value, step, costs)
    # Of what is copied: the shards of its source, and of its target.
    is_inner = [
        t.is_shard and any(copies) and inner_shards(value.shape, before, axis, t, mesh.sizes)
        for t, copies in (
            (step.source, (there.after_s, back.before_s)),
            (step.target, (there.before_s, back.after_s)),
        )
    ]
    return _where(there, is_inner[1], is_inner[0]), _where(back, is_inner[0], is_inner[1])


def step_seconds(value: Value, step: Step, costs: ConversionCosts) -> StepSeconds:
    """The same as step_s, with copies apart."""
    there, back = _actions(value, step, costs)
    return StepSeconds(
        there.seconds + back.seconds,
        there.after_s + back.before_s,
        there.before_s + back.after_s,
    )


def _actions(value: Value, step: Step, costs: ConversionCosts) -> tuple[StepAction, StepAction]:
    """Forward and backward, as if all shards were of an inner dim."""
    ends = _ends(value, step, costs.mesh)

    def action(kind: str) -> StepAction:
        seconds = _action_s(value, step, kind, ends, costs)
        if kind not in COLLECTIVES:
            return StepAction(kind, 0, seconds)
        num_bytes = _collective_bytes(step, kind, ends, costs.mesh)
        splits, joins = kind in _SPLITTING, kind in _JOINING
        copy_s = costs.compute_s(0.0, 2 * num_bytes, value.dtype) if splits or joins else 0.0
        return StepAction(kind, num_bytes, seconds, splits * copy_s, joins * copy_s)

    # The gradient goes from the target's type, or its dual, to the source's.
    there_kind, back_kind = _kinds(value, step, costs.mesh)
    return action(there_kind), action(back_kind)


def _where(action: StepAction, splits: bool, joins: bool) -> StepAction:
    if splits and joins or not (action.before_s or action.after_s):
        return action
    return replace(action, before_s=splits * action.before_s, after_s=joins * action.after_s)


def inner_shards(
    shape: Sequence[int], layout: Layout, axis: int, shard: SpmdType, sizes: Sequence[int]
) -> bool:
    """Whether shards by `axis`, with the other axes as in `layout`, are not contiguous in memory.
    sizes: of the mesh."""
    if not shard.dim and shard.blocks == 1:
        return False
    if math.prod(shape[: shard.dim]) > math.prod(sizes):
        return True  # the other axes cannot take that down to one
    whole = local_shape(shape, with_type(layout, axis, INVARIANT), sizes)
    blocks = local_blocks(with_type(layout, axis, shard), sizes, axis)
    return math.prod(whole[: shard.dim]) * blocks > 1


def _orders(source: Layout, target: Layout, changed: Sequence[int]) -> list[tuple[Step, ...]]:
    moves = [(k, target[k]) for k in changed]
    return [_steps(source, order) for order in itertools.permutations(moves)]


def _detours(source: Layout, target: Layout, changed: Sequence[int]) -> list[tuple[Step, ...]]:
    """Sequences in which some axes between two shards go to Invariant before anything else."""
    able = [k for k in changed if source[k].is_shard and target[k].is_shard]
    found = []
    for count in range(1, len(able) + 1):
        for early in itertools.combinations(able, count):
            first = [(k, INVARIANT) for k in early]
            for order in itertools.permutations([(k, target[k]) for k in changed]):
                found.append(_steps(source, (*first, *order)))
    return found


def _steps(source: Layout, moves: Sequence[tuple[int, SpmdType]]) -> tuple[Step, ...]:
    out = []
    now = source
    for axis, target in moves:
        out.append(Step(axis, now[axis], target, now))
        now = with_type(now, axis, target)
    return tuple(out)


def _cheapest(
    value: Value,
    sequences: Sequence[tuple[Step, ...]],
    costs: ConversionCosts,
) -> tuple[Step, ...] | None:
    legal = [
        steps
        for steps in sequences
        if all(is_legal(value.shape, step.after, costs.mesh.sizes) for step in steps)
    ]
    if len(legal) < 2:
        return legal[0] if legal else None
    return min(legal, key=lambda steps: _total_ps(value, steps, costs))


def _total_ps(value: Value, steps: tuple[Step, ...], costs: ConversionCosts) -> int:
    return round(math.fsum(step_s(value, step, costs) for step in steps) * 1e12)


def _kinds(value: Value, step: Step, mesh: Mesh) -> tuple[str, str]:
    """What the step does forward and backward, for this value."""
    size = mesh.sizes[step.axis]
    if size == 1:
        return "none", "none"
    conversion = axis_conversion(step.source, step.target, size)
    return conversion.forward, conversion.backward if value.requires_grad else "none"


def _action_s(
    value: Value,
    step: Step,
    kind: str,
    ends: tuple[int, int],
    costs: ConversionCosts,
) -> float:
    """Seconds of what a step does one way. ends: local bytes before and after it."""
    if kind == "none":
        return 0.0
    if kind in COLLECTIVES:
        num_bytes = _collective_bytes(step, kind, ends, costs.mesh)
        return costs.collective_s(kind, num_bytes, (step.axis,))
    small, large = min(ends), max(ends)
    moved = {"slice": 2 * small, "zero_pad": small + large, "mask": 2 * large}[kind]
    if step.target.padded:  # filled up before
        moved += 2 * large
    return costs.compute_s(0.0, moved, value.dtype)


def _collective_bytes(step: Step, kind: str, ends: tuple[int, int], mesh: Mesh) -> int:
    """Gathered output, reduce-scatter input, all-reduced tensor: the larger end. An exchange keeps
    the size; where shards overlap it gathers the whole dim."""
    overlaps = step.source.is_shard and step.target.is_shard and kind == "all_gather"
    return max(ends) * (mesh.sizes[step.axis] if overlaps else 1)


def _ends(value: Value, step: Step, mesh: Mesh) -> tuple[int, int]:
    """Local bytes before and after a step."""
    shards = 1
    for axis, (t, size) in enumerate(zip(step.before, mesh.sizes, strict=True)):
        if t.is_shard and axis != step.axis:
            shards *= t.num_shards(size)
    size, num_bytes = mesh.sizes[step.axis], value.num_bytes
    before = shards * size if step.source.is_shard else shards
    after = shards * size if step.target.is_shard else shards
    return num_bytes // before, num_bytes // after
