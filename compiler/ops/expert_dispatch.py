"""Rows travel to the ranks that hold their experts, and back: the ops dispatch and combine.

On the whole tensor both return what they are given: where a row is computed changes nothing. On an
axis of n ranks that share the experts, rank r holding experts r * e / n and on,

    routed     how many rows of each expert every rank sends is exchanged: a Route, which all ops
               on the same ids share
    dispatch   rows in the order of their experts start to the ranks that hold these, and are waited
               for. What arrives is kept in order of arrival: by sender, then by expert, then as the
               sender had them. Their experts are known from the counts: ids do not travel
    combine    what was dispatched goes back over the same paths, into the order it had

Nothing is dropped and nothing padded: how many rows a rank gets depends on the routing. In backward
rows go the other way, with the counts that the forward found: the backward of the wait starts the
exchange of gradients, that of the start waits for it (meshfold.sharding.async_autograd).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.sharding.async_autograd import Actions, InFlight, Start, Wait, row_actions


def _dispatched(x: Tensor, ids: Tensor, num_experts: int, load: float = 0.0) -> Tensor:
    """x [t, ...], ids [t]. load, what a probe of memory asks for: as many rows as come to a rank
    that gets `load` times its share."""
    if not load:
        return x.view_as(x)
    rows = torch.arange(math.ceil(x.shape[0] * load), device=x.device)
    return x.index_select(0, rows % x.shape[0])


def _combined(x: Tensor, ids: Tensor, num_experts: int, load: float = 0.0) -> Tensor:
    """The way back of _dispatched: x has t rows or, under a load, more."""
    if not load:
        return x.view_as(x)
    return x.index_select(0, torch.arange(ids.shape[0], device=x.device))


for _name, _function in (("dispatch", _dispatched), ("combine", _combined)):
    torch.library.define(
        f"meshfold::{_name}", "(Tensor x, Tensor ids, int num_experts, float load=0.0) -> Tensor"
    )
    torch.library.impl(f"meshfold::{_name}", "CompositeImplicitAutograd", _function)


@dataclass(frozen=True)
class Route:
    """Where the rows of a rank go. order: its rows by expert; sent, received: rows that go to each
    rank of the axis, and come from there; experts: the expert of every row that came, in order of
    arrival."""

    order: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    experts: Tensor


def routed(context: StepContext, ids: Tensor, num_experts: int, axis: str) -> Route:
    """The route of rows with experts ids [t] on `axis`. Waits for the counts of the other ranks."""
    size = context.mesh.size((axis,))
    counts = torch.bincount(ids, minlength=num_experts)
    come = exchanged_counts(context, counts, axis).view(size, num_experts // size)
    first = context.mesh.coord(axis) * come.shape[1]
    own = torch.arange(first, first + come.shape[1], dtype=ids.dtype, device=ids.device)
    experts = own.repeat(size).repeat_interleave(come.flatten())
    sent, received = counts.view(size, -1).sum(1), come.sum(1)
    order = ids.argsort(stable=True)
    return Route(order, tuple(sent.tolist()), tuple(received.tolist()), experts)


def by_expert(x: Tensor, route: Route) -> Tensor:
    """Rows of x [t, ...] in the order in which they leave."""
    return x.index_select(0, route.order)


def as_before(x: Tensor, route: Route) -> Tensor:
    """Rows that came back, in the order they had."""
    return x.index_select(0, route.order.argsort())


def dispatch_actions(route: Route) -> Actions:
    """Rows to their experts; backward their gradients come back."""
    return row_actions(route.sent, route.received)


def combine_actions(route: Route) -> Actions:
    """Home; backward their gradients go to the experts."""
    return row_actions(route.received, route.sent)


def start_dispatch(context: StepContext, x: Tensor, axis: str, route: Route) -> InFlight:
    """Rows by expert start to the ranks that hold these."""
    return Start.apply(context.mesh, x, axis, *dispatch_actions(route))  # type: ignore[no-any-return, no-untyped-call]


def wait_dispatch(context: StepContext, in_flight: InFlight, axis: str, route: Route) -> Tensor:
    """The rows that came here, as many as there are."""
    return Wait.apply(context.mesh, *in_flight, axis, *dispatch_actions(route))  # type: ignore[no-any-return, no-untyped-call]


def start_combine(context: StepContext, x: Tensor, axis: str, route: Route) -> InFlight:
    """What came here starts back."""
    return Start.apply(context.mesh, x, axis, *combine_actions(route))  # type: ignore[no-any-return, no-untyped-call]


def wait_combine(context: StepContext, in_flight: InFlight, axis: str, route: Route) -> Tensor:
    """This rank's own rows, by expert."""
    return Wait.apply(context.mesh, *in_flight, axis, *combine_actions(route))  # type: ignore[no-any-return, no-untyped-call]


def dispatch(context: StepContext, x: Tensor, ids: Tensor, num_experts: int, axis: str) -> Tensor:
    """Rows of x [t, ...] go to the ranks of `axis` that hold experts ids [t], at once; returns the
    rows that came here."""
    route = routed(context, ids, num_experts, axis)
    in_flight = start_dispatch(context, by_expert(x, route), axis, route)
    return wait_dispatch(context, in_flight, axis, route)


def combine(context: StepContext, x: Tensor, ids: Tensor, num_experts: int, axis: str) -> Tensor:
    """Inverse of dispatch: x holds what came here, ids [t] are those of this rank's own rows, which
    are returned."""
    route = routed(context, ids, num_experts, axis)
    back = wait_combine(context, start_combine(context, x, axis, route), axis, route)
    return as_before(back, route)


def exchanged_counts(context: StepContext, counts: Tensor, axis: str) -> Tensor:
    """Rows that come from every rank, given those that go there; in the second run of
    a region what the first got."""

    def exchange() -> Tensor:
        return context.mesh.wait(context.mesh.start_all_to_all(counts, (axis,)))

    return exchange() if context.counts is None else context.counts.next(exchange)


def exchanged(
    mesh: RankMesh, rows: Tensor, axis: str, sent: list[int], received: list[int]
) -> Tensor:
    """sent[j] rows, in order, go to rank j of the axis; received[j] come from there. Gradients go
    the other way."""
    actions = row_actions(tuple(sent), tuple(received))
    in_flight: Any = Start.apply(mesh, rows, axis, *actions)  # type: ignore[no-untyped-call]
    moved: Tensor = Wait.apply(mesh, *in_flight, axis, *actions)  # type: ignore[no-untyped-call]
    return moved
