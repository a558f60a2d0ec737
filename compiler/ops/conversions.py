"""Conversions of layout as differentiable functions on local tensors, and their emission.

A conversion that communicates in either direction is two functions. Forward, `start_x` starts the
collective and `wait_x` finishes it; backward, wait_x starts the dual collective and start_x
finishes it. What stands between the two in the graph overlaps with communication both ways: an
early start is a late wait in backward.

A start returns (in_flight, token). Data flows through in_flight; the gradient, itself in flight,
through the token: a tensor without storage that has the shape of the dual collective's result.

Names of the functions tell the forward collective, x_actions both directions of it. wait_x takes
what start_x returned, and the same other arguments: those of x_actions. `dim` and `blocks` are
those of the local tensor (spmd.local_blocks), axes are symbolic names, and the first argument is
the StepContext.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

from meshfold.distributed.step_context import StepContext
from meshfold.ir.conversion_step import Step, exchange_is_even
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, Layout, Shard, local_blocks, padded_shape
from meshfold.ops.expert_dispatch import (
    combine_actions,
    dispatch_actions,
    start_combine,
    start_dispatch,
    wait_combine,
    wait_dispatch,
)
from meshfold.sharding.async_autograd import Action, Actions, InFlight, Local, Start, Wait
from meshfold.sharding.slicing import filled_blocks


def all_gather_actions(dim: int, blocks: int, backward: str) -> Actions:
    """Shard -> Replicate (backward "reduce_scatter") or Invariant (backward "slice")."""
    return Action("all_gather", dim, blocks), Action(backward, dim, blocks)


def reduce_scatter_actions(dim: int, blocks: int) -> Actions:
    """Partial -> Shard; backward all-gather."""
    return Action("reduce_scatter", dim, blocks), Action("all_gather", dim, blocks)


def all_reduce_actions(backward: str) -> Actions:
    """Partial -> Invariant (backward "none") or Replicate (backward "all_reduce")."""
    return Action("all_reduce"), Action(backward)


def gradient_all_reduce_actions() -> Actions:
    """Invariant -> Replicate: nothing forward, all-reduce backward."""
    return Action("none"), Action("all_reduce")


def slice_actions(dim: int, blocks: int) -> Actions:
    """Invariant -> Shard: the own shard forward, all-gather backward."""
    return Action("slice", dim, blocks), Action("all_gather", dim, blocks)


def all_to_all_actions(dim: int, blocks: int, to_dim: int, to_blocks: int) -> Actions:
    """Shard(to_dim) -> Shard(dim): slices `dim`, gathers `to_dim`; backward the reverse."""
    there = Action("all_to_all", dim, blocks, to_dim, to_blocks)
    return there, Action("all_to_all", to_dim, to_blocks, dim, blocks)


def start_all_gather(context: StepContext, x: Tensor, axis: str, *args: Any) -> InFlight:
    return _start(context, x, axis, all_gather_actions(*args))


def wait_all_gather(context: StepContext, in_flight: InFlight, axis: str, *args: Any) -> Tensor:
    return _wait(context, in_flight, axis, all_gather_actions(*args))


def start_reduce_scatter(context: StepContext, x: Tensor, axis: str, *args: Any) -> InFlight:
    return _start(context, x, axis, reduce_scatter_actions(*args))


def wait_reduce_scatter(context: StepContext, in_flight: InFlight, axis: str, *args: Any) -> Tensor:
    return _wait(context, in_flight, axis, reduce_scatter_actions(*args))


def start_all_reduce(context: StepContext, x: Tensor, axis: str, *args: Any) -> InFlight:
    return _start(context, x, axis, all_reduce_actions(*args))


def wait_all_reduce(context: StepContext, in_flight: InFlight, axis: str, *args: Any) -> Tensor:
    return _wait(context, in_flight, axis, all_reduce_actions(*args))


def start_gradient_all_reduce(context: StepContext, x: Tensor, axis: str) -> InFlight:
    return _start(context, x, axis, gradient_all_reduce_actions())


def wait_gradient_all_reduce(context: StepContext, in_flight: InFlight, axis: str) -> Tensor:
    return _wait(context, in_flight, axis, gradient_all_reduce_actions())


def start_slice(context: StepContext, x: Tensor, axis: str, *args: Any) -> InFlight:
    return _start(context, x, axis, slice_actions(*args))


def wait_slice(context: StepContext, in_flight: InFlight, axis: str, *args: Any) -> Tensor:
    return _wait(context, in_flight, axis, slice_actions(*args))


def start_all_to_all(context: StepContext, x: Tensor, axis: str, *args: Any) -> InFlight:
    return _start(context, x, axis, all_to_all_actions(*args))


def wait_all_to_all(context: StepContext, in_flight: InFlight, axis: str, *args: Any) -> Tensor:
    return _wait(context, in_flight, axis, all_to_all_actions(*args))


def local_slice(context: StepContext, x: Tensor, axis: str, dim: int, blocks: int) -> Tensor:
    """Replicate -> Shard: the own shard forward, zero padding backward."""
    there, back = Action("slice", dim, blocks), Action("zero_pad", dim, blocks)
    return Local.apply(context.mesh, x, axis, there, back)  # type: ignore[no-any-return, no-untyped-call]


def fill_up(context: StepContext, x: Tensor, axis: str, dim: int, blocks: int, size: int) -> Tensor:
    """An unsharded dim, its blocks filled up with zeros to `size`, before a padded shard of it."""
    return filled_blocks(x, dim, blocks, size)


def zero_pad(context: StepContext, x: Tensor, axis: str, dim: int, blocks: int) -> Tensor:
    """Shard -> Partial: the own shard among zeros forward, the own shard backward."""
    there, back = Action("zero_pad", dim, blocks), Action("slice", dim, blocks)
    return Local.apply(context.mesh, x, axis, there, back)  # type: ignore[no-any-return, no-untyped-call]


def keep_on_first(context: StepContext, x: Tensor, axis: str, backward: str) -> Tensor:
    """Invariant (backward "none") or Replicate (backward "mask") -> Partial: coordinate 0 keeps the
    value, the others hold zeros."""
    return Local.apply(context.mesh, x, axis, Action("mask"), Action(backward))  # type: ignore[no-any-return, no-untyped-call]


def keep_gradient_on_first(context: StepContext, x: Tensor, axis: str) -> Tensor:
    """Replicate -> Invariant: nothing forward; backward coordinate 0 keeps the gradient, so that
    the pending sum counts it once."""
    return Local.apply(context.mesh, x, axis, Action("none"), Action("mask"))  # type: ignore[no-any-return, no-untyped-call]


def _start(context: StepContext, x: Tensor, axis: str, actions: Actions) -> InFlight:
    return Start.apply(context.mesh, x, axis, *actions)  # type: ignore[no-any-return, no-untyped-call]


def _wait(context: StepContext, in_flight: InFlight, axis: str, actions: Actions) -> Tensor:
    return Wait.apply(context.mesh, *in_flight, axis, *actions)  # type: ignore[no-any-return, no-untyped-call]


STARTS: Mapping[Callable[..., Any], Callable[..., Actions]] = MappingProxyType(
    {
        start_all_gather: all_gather_actions,
        start_reduce_scatter: reduce_scatter_actions,
        start_all_reduce: all_reduce_actions,
        start_gradient_all_reduce: gradient_all_reduce_actions,
        start_slice: slice_actions,
        start_all_to_all: all_to_all_actions,
        start_dispatch: dispatch_actions,
        start_combine: combine_actions,
    }
)
"""What each start and its wait do in either direction, of its arguments behind the axis. Those of
rows that travel to experts take a route, which is known when it runs
(meshfold.ops.expert_dispatch)."""

WAITS: frozenset[Callable[..., Any]] = frozenset(
    {
        wait_all_gather,
        wait_reduce_scatter,
        wait_all_reduce,
        wait_gradient_all_reduce,
        wait_slice,
        wait_all_to_all,
        wait_dispatch,
        wait_combine,
    }
)


@dataclass(frozen=True, slots=True)
class Call:
    """function(context, x, axis, *args): one node of an emitted graph."""

    function: Callable[..., Any]
    axis: str
    args: tuple[int | str, ...] = ()


def step_calls(step: Step, mesh: Mesh, value: Value) -> tuple[Call, ...]:
    """The functions that realise `step` for `value`, each applied to the result of the one before.

    A start and its wait are neighbours. Empty where nothing is to be done: an axis of one rank, or
    Invariant <-> Replicate of a value without gradient.
    """
    axis, size = mesh.names[step.axis], mesh.sizes[step.axis]
    if size == 1:
        return ()
    if step.source.is_shard and step.target.is_shard:
        return _move_calls(step, mesh, value, axis)
    if step.target.padded:
        return _padded_calls(step, mesh, value, axis)
    shard = _local_shard(step.before if step.source.is_shard else step.after, mesh, step.axis)
    kinds = step.source.kind + step.target.kind
    if not value.requires_grad and kinds in _WITHOUT_GRADIENT:
        kinds = _WITHOUT_GRADIENT[kinds]
    match kinds:
        case "none":
            return ()
        case "IR":
            return _pair(start_gradient_all_reduce, wait_gradient_all_reduce, axis)
        case "RI":
            return (Call(keep_gradient_on_first, axis),)
        case "IP":
            return (Call(keep_on_first, axis, ("none",)),)
        case "RP":
            return (Call(keep_on_first, axis, ("mask",)),)
        case "PI":
            return _pair(start_all_reduce, wait_all_reduce, axis, "none")
        case "PR":
            return _pair(start_all_reduce, wait_all_reduce, axis, "all_reduce")
        case "IS":
            return _pair(start_slice, wait_slice, axis, *shard)
        case "RS":
            return (Call(local_slice, axis, shard),)
        case "PS":
            return _pair(start_reduce_scatter, wait_reduce_scatter, axis, *shard)
        case "SI":
            return _pair(start_all_gather, wait_all_gather, axis, *shard, "slice")
        case "SR":
            return _pair(start_all_gather, wait_all_gather, axis, *shard, "reduce_scatter")
        case "SP":
            return (Call(zero_pad, axis, shard),)
    raise AssertionError(f"no conversion from {step.source} to {step.target}")


def _padded_calls(step: Step, mesh: Mesh, value: Value, axis: str) -> tuple[Call, ...]:
    """Invariant or Replicate -> a padded Shard: the own shard of what is filled up."""
    filled = padded_shape(value.shape, step.after, mesh.sizes)
    dim, blocks = step.target.dim, step.target.blocks
    even = replace(step, target=Shard(dim, blocks))
    rest = step_calls(even, mesh, replace(value, shape=filled))
    return (Call(fill_up, axis, (dim, blocks, filled[dim])), *rest)


_WITHOUT_GRADIENT = {"IR": "none", "RI": "none", "IS": "RS"}
"""Conversions that need no backward communication become local ones when there is no gradient."""


def _move_calls(step: Step, mesh: Mesh, value: Value, axis: str) -> tuple[Call, ...]:
    """Shard -> another Shard."""
    if not exchange_is_even(step.source, step.target, mesh.sizes[step.axis]):
        there = Step(step.axis, step.source, INVARIANT, step.before)
        back = Step(step.axis, INVARIANT, step.target, there.after)
        return step_calls(there, mesh, value) + step_calls(back, mesh, value)
    sliced_dim, sliced_blocks = _local_shard(step.after, mesh, step.axis)
    gathered_dim, gathered_blocks = _local_shard(step.before, mesh, step.axis)
    if sliced_dim == gathered_dim:
        # Each shard is a digit of the index; a lower one has its blocks counted within the higher.
        size = mesh.sizes[step.axis]
        if step.source.blocks < step.target.blocks:
            sliced_blocks //= size
        else:
            gathered_blocks //= size
    args = (sliced_dim, sliced_blocks, gathered_dim, gathered_blocks)
    return _pair(start_all_to_all, wait_all_to_all, axis, *args)


def _local_shard(layout: Layout, mesh: Mesh, axis: int) -> tuple[int, int]:
    """dim and blocks of the shard on `axis` as seen in the local tensor of the other axes."""
    if not layout[axis].is_shard:
        return 0, 1
    return layout[axis].dim, local_blocks(layout, mesh.sizes, axis)


def _pair(
    start: Callable[..., Any], wait: Callable[..., Any], axis: str, *args: int | str
) -> tuple[Call, ...]:
    return Call(start, axis, args), Call(wait, axis, args)


def emit_step(
    graph: fx.Graph, context_node: fx.Node, x: fx.Node, step: Step, mesh: Mesh, value: Value
) -> fx.Node:
    """Appends the nodes of `step` on x to `graph`; returns the node of the converted value."""
    for call in step_calls(step, mesh, value):
        x = graph.call_function(call.function, (context_node, x, call.axis, *call.args))
    return x
