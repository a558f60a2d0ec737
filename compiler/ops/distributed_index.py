"""Rows read from, and written to, a tensor whose rows are shards, by ranks that each have some of
the indices: what is asked for, or given, travels between ranks and nothing is gathered.

    put    buffer[index[i]] = or += rows[i]      index and rows are shards of i,
    take   rows[i] = buffer[index[i]]            buffer is one of its own rows

On every axis that shards the buffer, indices go to the rank whose rows they mean, axis by axis, and
rows with them (put) or back (take). How many arrive depends on the indices. In backward rows go the
other way, with the counts that the forward found.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ops.expert_dispatch import exchanged, exchanged_counts
from meshfold.sharding.indices import ShardDigits, shard_indices_of
from meshfold.sharding.slicing import locate_indices


@dataclass(frozen=True)
class _Hop:
    """Rows on their way over one axis: in the order of the ranks they go to, as many to each."""

    axis: str
    order: Tensor
    sent: list[int]
    received: list[int]

    def there(self, mesh: RankMesh, rows: Tensor) -> Tensor:
        """The rows that come here."""
        rows = rows.index_select(0, self.order)
        return exchanged(mesh, rows, self.axis, self.sent, self.received)

    def back(self, mesh: RankMesh, rows: Tensor) -> Tensor:
        """What came here returns, into the order it had."""
        rows = exchanged(mesh, rows, self.axis, self.received, self.sent)
        return rows.index_select(0, self.order.argsort())


def put_rows(
    context: StepContext,
    buffer: Tensor,
    indices: Sequence[Tensor],
    rows: Tensor,
    adds: bool,
    scale: float,
    size: int,
    digits: ShardDigits,
) -> Tensor:
    """buffer [m, ...] with rows [i, ...] at `indices` (each [i], of the first dims), put there or,
    times `scale`, added. size, digits: of dim 0 of the unsharded buffer; indices are global."""
    path, local = _path(context, indices, size, digits)
    for hop in path:
        rows = hop.there(context.mesh, rows)
    return buffer.index_put(local, rows if scale == 1 else rows * scale, adds)


def take_rows(
    context: StepContext, buffer: Tensor, indices: Sequence[Tensor], size: int, digits: ShardDigits
) -> Tensor:
    """buffer[indices]: rows [i, ...] of a buffer [m, ...]. Arguments as of put_rows."""
    path, local = _path(context, indices, size, digits)
    rows = buffer[local]
    for hop in reversed(path):
        rows = hop.back(context.mesh, rows)
    return rows


def _path(
    context: StepContext, indices: Sequence[Tensor], size: int, digits: ShardDigits
) -> tuple[list[_Hop], tuple[Tensor, ...]]:
    """The way to the rows that indices mean, and where those are that arrive: local indices."""
    moving = torch.stack([index.to(torch.int64) for index in indices], dim=1)
    moving[:, 0] += size * (moving[:, 0] < 0)
    path = []
    for axis, blocks, _ in digits:
        num_ranks = context.mesh.size((axis,))
        first = moving[:, 0]
        owner = first // (size // (blocks * num_ranks)) % num_ranks
        # What means no row would go to a rank that is not there.
        owner = torch.where((first >= 0) & (first < size), owner, num_ranks)
        *sent, beyond = torch.bincount(owner, minlength=num_ranks + 1).tolist()
        if beyond:
            raise IndexError(f"{beyond} indices are beyond the {size} rows that they index")
        received = exchanged_counts(context, torch.tensor(sent, device=first.device), axis)
        hop = _Hop(axis, owner.argsort(stable=True), sent, received.tolist())
        moving = hop.there(context.mesh, moving)
        path.append(hop)
    _, first = locate_indices(moving[:, 0], size, shard_indices_of(context.mesh, digits))
    return path, (first, *moving[:, 1:].unbind(1))
