"""Rows travel to the ranks that hold their experts, and back: the ops dispatch and combine.

On the whole tensor both return what they are given: where a row is computed changes nothing. On an
axis of n ranks that share the experts, rank r holding experts r * e / n and on,

    dispatch   rows in the order of the ranks that hold their experts; counts, then rows, exchanged.
               What arrives is kept in order of arrival: by sender, then as the sender had them
    combine    what was dispatched goes back over the same paths, into the order it had

Nothing is dropped and nothing padded: how many rows a rank gets depends on the routing. In backward
rows go the other way, with the counts that the forward found.
"""

import math
from typing import Any

import torch
from torch import Tensor

from meshfold.collectives import RankMesh


def _dispatched(x: Tensor, ids: Tensor, num_experts: int, load: float = 0.0) -> Tensor:
    """x [t, ...], ids [t]. load, what a probe of memory asks for: as many rows as come to a rank
    that gets `load` times its share."""
    if not load:
        return x.view_as(x)
    rows = torch.arange(math.ceil(x.shape[0] * load), device=x.device)
    return x.index_select(0, rows % x.shape[0])


def _combined(x: Tensor, ids: Tensor, num_experts: int, load: float = 0.0) -> Tensor:
    """As _dispatched, the way back: x has t rows or, under a load, more."""
    if not load:
        return x.view_as(x)
    return x.index_select(0, torch.arange(ids.shape[0], device=x.device))


for _name, _function in (("dispatch", _dispatched), ("combine", _combined)):
    torch.library.define(
        f"meshfold::{_name}", "(Tensor x, Tensor ids, int num_experts, float load=0.0) -> Tensor"
    )
    torch.library.impl(f"meshfold::{_name}", "CompositeImplicitAutograd", _function)


def dispatch(mesh: RankMesh, x: Tensor, ids: Tensor, num_experts: int, axis: str) -> Tensor:
    """Rows of x [t, ...] go to the ranks of `axis` that hold experts ids [t]; returns the rows that
    came here, as many as there are."""
    owners, order = _owners(mesh, ids, num_experts, axis)
    sent = torch.bincount(owners, minlength=mesh.size((axis,)))
    received = exchanged_counts(mesh, sent, axis)
    rows = x.index_select(0, order)
    return exchanged(mesh, rows, axis, sent.tolist(), received.tolist())


def combine(mesh: RankMesh, x: Tensor, ids: Tensor, num_experts: int, axis: str) -> Tensor:
    """Inverse of dispatch: x holds what came here, ids [t] are those of this rank's own rows, which
    are returned."""
    owners, order = _owners(mesh, ids, num_experts, axis)
    sent = torch.bincount(owners, minlength=mesh.size((axis,)))
    received = exchanged_counts(mesh, sent, axis)
    rows = exchanged(mesh, x, axis, received.tolist(), sent.tolist())
    return rows.index_select(0, order.argsort())


def _owners(mesh: RankMesh, ids: Tensor, num_experts: int, axis: str) -> tuple[Tensor, Tensor]:
    """Per row the rank that holds its expert, and the rows by rank."""
    owners = ids // (num_experts // mesh.size((axis,)))
    return owners, owners.argsort(stable=True)


def exchanged_counts(mesh: RankMesh, counts: Tensor, axis: str) -> Tensor:
    """Rows that come from every rank, given those that go there."""
    return mesh.wait(mesh.start_all_to_all(counts, (axis,)))


def exchanged(
    mesh: RankMesh, rows: Tensor, axis: str, sent: list[int], received: list[int]
) -> Tensor:
    """sent[j] rows, in order, go to rank j of the axis; received[j] come from there. Gradients go
    the other way."""
    moved: Tensor
    moved = _Exchange.apply(mesh, rows, axis, sent, received)  # type: ignore[no-untyped-call]
    return moved


class _Exchange(torch.autograd.Function):
    """sent[j] rows, in order, go to rank j; received[j] come from there."""

    @staticmethod
    def forward(
        ctx: Any, mesh: RankMesh, rows: Tensor, axis: str, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.given = mesh, axis, sent, received
        return mesh.wait(mesh.start_exchange(rows.contiguous(), (axis,), sent, received))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mesh, axis, sent, received = ctx.given
        back = mesh.start_exchange(gradient.contiguous(), (axis,), received, sent)
        return None, mesh.wait(back), None, None, None
