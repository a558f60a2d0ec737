"""Both directions of a conversion on local tensors: the autograd functions of conversions.py.

An Action is one direction. Start begins the forward action and, in backward, finishes the backward
one; Wait finishes the forward action and, in backward, begins the backward one. Local does both
directions without communication.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.sharding import slicing as shard_tensors

InFlight = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Action:
    """One direction of a conversion on a local tensor. kind: as in passes.price.conversions.

    dim, blocks: the dim that is gathered or sliced. For "all_to_all" the dim that is sliced;
    to_dim, to_blocks: the dim that is put together. For "exchange", of rows, sent and received: as
    many to each rank, and from there.
    """

    kind: str
    dim: int = 0
    blocks: int = 1
    to_dim: int = 0
    to_blocks: int = 1
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def in_flight_shape(self, shape: torch.Size, size: int) -> tuple[int, ...]:
        """Shape of what `launch` returns for a tensor of `shape`."""
        if self.kind == "all_gather":
            return (size, *shape)
        if self.kind == "exchange":
            return (sum(self.received), *shape[1:])
        if self.kind in ("reduce_scatter", "slice", "all_to_all"):
            sliced = (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])
            return (size, *sliced) if self.kind == "all_to_all" else sliced
        return tuple(shape)

    def launch(self, mesh: RankMesh, x: Tensor, axis: str) -> Tensor:
        """Starts the action, or does it at once if it is local."""
        size = mesh.size((axis,))
        shape = self.in_flight_shape(x.shape, size)
        match self.kind:
            case "none":
                return x.view_as(x)
            case "slice":
                return _own_part(x, self, size, mesh.coord(axis))
            case "all_reduce":
                return mesh.start_all_reduce(x.contiguous(), (axis,))
            case "all_gather":
                return mesh.start_all_gather(x.contiguous(), (axis,)).view(shape)
            case "reduce_scatter":
                stacked = shard_tensors.stacked_shards(x, self.dim, self.blocks, size)
                return mesh.start_reduce_scatter(stacked.flatten(0, 1), (axis,)).view(shape)
            case "all_to_all":
                stacked = shard_tensors.stacked_shards(x, self.dim, self.blocks, size)
                return mesh.start_all_to_all(stacked, (axis,))
            case "exchange":
                sent, received = list(self.sent), list(self.received)
                return mesh.start_exchange(x.contiguous(), (axis,), sent, received)
        raise AssertionError(f"{self.kind} is not split in start and wait")

    def finish(self, mesh: RankMesh, in_flight: Tensor) -> Tensor:
        """The result of the action that `launch` began."""
        match self.kind:
            case "none" | "slice":
                return in_flight.view_as(in_flight)
            case "all_reduce" | "reduce_scatter" | "exchange":
                return mesh.wait(in_flight).view_as(in_flight)
            case "all_gather":
                return shard_tensors.unstacked_shards(mesh.wait(in_flight), self.dim, self.blocks)
            case "all_to_all":
                return shard_tensors.unstacked_shards(
                    mesh.wait(in_flight), self.to_dim, self.to_blocks
                )
        raise AssertionError(f"{self.kind} is not split in start and wait")


Actions = tuple[Action, Action]
"""Forward and backward."""


def row_actions(sent: tuple[int, ...], received: tuple[int, ...]) -> Actions:
    """sent[j] rows, in order, go to rank j of an axis, received[j] come from there; backward their
    gradients the other way."""
    there = Action("exchange", sent=sent, received=received)
    return there, Action("exchange", sent=received, received=sent)


class Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mesh: RankMesh, x: Tensor, axis: str, forward: Action, backward: Action
    ) -> InFlight:
        ctx.mesh, ctx.backward_action = mesh, backward
        ctx.set_materialize_grads(False)
        in_flight = forward.launch(mesh, x, axis)
        # The gradient of x has the shape of x, so that of the output is known backwards: what the
        # dual collective brings into flight on the way to x.
        token = x.new_empty(()).expand(_dual_shape(x, forward, backward, mesh.size((axis,))))
        ctx.mark_non_differentiable(in_flight)
        return in_flight, token

    @staticmethod
    def backward(ctx: Any, _: None, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None, None
        return None, ctx.backward_action.finish(ctx.mesh, gradient), None, None, None


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mesh: RankMesh,
        in_flight: Tensor,
        token: Tensor,
        axis: str,
        forward: Action,
        backward: Action,
    ) -> Tensor:
        ctx.mesh, ctx.axis, ctx.backward_action = mesh, axis, backward
        ctx.set_materialize_grads(False)
        return forward.finish(mesh, in_flight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * 6
        in_flight = ctx.backward_action.launch(ctx.mesh, gradient, ctx.axis)
        return None, None, in_flight, None, None, None


def _dual_shape(x: Tensor, forward: Action, backward: Action, size: int) -> tuple[int, ...]:
    """The in-flight shape of `backward` applied to a gradient of the output of `forward` on x."""
    if backward.kind == "all_gather":
        sliced = Action("slice", backward.dim).in_flight_shape(x.shape, size)
        return (size, *sliced)
    if backward.kind == "all_to_all":
        # Backward slices the dim that forward gathered, and gathers the one that it sliced.
        sliced = Action("slice", backward.to_dim).in_flight_shape(x.shape, size)
        return (size, *sliced)
    return tuple(x.shape)


class Local(torch.autograd.Function):
    """A conversion without communication in either direction."""

    @staticmethod
    def forward(
        ctx: Any, mesh: RankMesh, x: Tensor, axis: str, forward: Action, backward: Action
    ) -> Tensor:
        ctx.mesh, ctx.axis, ctx.backward_action = mesh, axis, backward
        return _local(mesh, x, axis, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _local(ctx.mesh, gradient, ctx.axis, ctx.backward_action), None, None, None


def _local(mesh: RankMesh, x: Tensor, axis: str, action: Action) -> Tensor:
    size, coord = mesh.size((axis,)), mesh.coord(axis)
    match action.kind:
        case "none":
            return x.view_as(x)
        case "mask":
            return x.view_as(x) if coord == 0 else torch.zeros_like(x)
        case "slice":
            return _own_part(x, action, size, coord)
        case "zero_pad":
            return shard_tensors.zero_padded(x, action.dim, action.blocks, size, coord)
    raise AssertionError(f"{action.kind} communicates")


def _own_part(x: Tensor, action: Action, size: int, coord: int) -> Tensor:
    """What a slice keeps of x, in a storage of its own. A view, as of rows, would keep all of x
    alive for as long as the backward needs the shard: of weights that are put together for experts,
    those of all ranks."""
    shard = shard_tensors.shard(x, action.dim, action.blocks, size, coord)
    return shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()
