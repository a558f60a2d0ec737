"""Local tensors of a layout: the shard of a global tensor, and the tensor of gathered
shards. Index arithmetic on digits (see meshfold.ir.spmd); no communication here.

A dim that k axes shard is a number in mixed radix, outermost digit first:
    i = (b0, r1, b1, r2, b2, ..., rk, m)
where rj is the coordinate on the j-th axis (axes by ascending `blocks`), the bj are block digits
and m runs inside the innermost shard. A shard fixes the digits of its axes; a gather over some of
them brings these digits back. `Assembly` writes both as one view and one permutation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from meshfold.ir.spmd import Layout, local_blocks, local_shape, padded_shape
from meshfold.sharding.slicing import cropped_blocks, filled_blocks


def shard_of(
    x: torch.Tensor,
    layout: Layout,
    sizes: Sequence[int],
    coords: Sequence[int],
    *,
    done: int = -1,
) -> torch.Tensor:
    """The shard of global tensor `x` at mesh coordinates `coords`; I and R keep all of it.

    The layout must be legal for the global shape and without Partial. `done`: an axis on which `x`
    is sharded already, of type Shard(dim, 1). A view of `x` where possible.
    """
    assert not any(t.kind == "P" for t in layout), "a Partial is no shard of a tensor"
    full = padded_shape(x.shape, layout, sizes)
    for t in layout:
        if t.padded:
            x = filled_blocks(x, t.dim, t.blocks, full[t.dim])
    axes = [k for k, t in enumerate(layout) if t.is_shard and k != done]
    for k in sorted(axes, key=lambda k: layout[k].blocks):
        dim, blocks = layout[k].dim, local_blocks(layout, sizes, k)
        num_shards = layout[k].num_shards(sizes[k])
        rows = x.shape[dim] // (blocks * num_shards)  # -1 is not known where another dim is 0
        digits = x.reshape(*x.shape[:dim], blocks, num_shards, rows, *x.shape[dim + 1 :])
        x = digits.select(dim + 1, coords[k] % num_shards).flatten(dim, dim + 1)
    return x


def filled(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`x` with zeros at the end of its dims up to `shape`; itself if it has that shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    ends = [pair for d in reversed(range(x.dim())) for pair in (0, shape[d] - x.shape[d])]
    return torch.nn.functional.pad(x, ends)


def valid_shape(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], coords: Sequence[int]
) -> tuple[int, ...]:
    """Local shape at `coords` without padding, which is in one block, granularity one row: a
    padded dim may have fewer rows there, or none."""
    valid = list(local_shape(shape, layout, sizes))
    for t, coord in zip(layout, coords, strict=True):
        if t.padded:
            valid[t.dim] = min(valid[t.dim], max(0, shape[t.dim] - coord * valid[t.dim]))
    return tuple(valid)


def cropped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first rows of every dim, up to `shape`: a view."""
    for d, size in enumerate(shape):
        if x.shape[d] != size:
            x = x.narrow(d, 0, size)
    return x


@dataclass(frozen=True)
class Assembly:
    """How shards of one tensor in layout `stored`, stacked over the axes `gather` (mesh order,
    first axis slowest), become the tensor in layout `stored` without these axes, and back.

    shape: global shape. sizes: ranks per mesh axis. The stacked form has shape
    (num_shards, numel of one shard).
    """

    shape: tuple[int, ...]
    stored: Layout
    sizes: tuple[int, ...]
    gather: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(self.stored[k].is_shard for k in self.gather), "only shards can be gathered"

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        return local_shape(self.shape, self.stored, self.sizes)

    @cached_property
    def gathered_shape(self) -> tuple[int, ...]:
        """Local shape after the gather."""
        return local_shape(self.shape, self.stored, self._sizes_left)

    @cached_property
    def _filled_shape(self) -> tuple[int, ...]:
        """The same with padding."""
        full = padded_shape(self.shape, self.stored, self.sizes)
        return local_shape(full, self.stored, self._sizes_left)

    @property
    def _sizes_left(self) -> list[int]:
        """Ranks per axis, gathered ones none."""
        return [1 if k in self.gather else n for k, n in enumerate(self.sizes)]

    @property
    def shard_numel(self) -> int:
        return math.prod(self.shard_shape)

    @cached_property
    def _digits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(sizes of the stacked digits, order in which they are the gathered tensor)."""
        view = [self.sizes[k] for k in self.gather]
        order: list[int] = []
        for d, size in enumerate(padded_shape(self.shape, self.stored, self.sizes)):
            end = 1
            axes = [k for k, t in enumerate(self.stored) if t.dim == d]
            for k in sorted(axes, key=lambda k: self.stored[k].blocks):
                order.append(len(view))
                view.append(self.stored[k].blocks // end)
                if k in self.gather:
                    order.append(self.gather.index(k))
                end = self.stored[k].blocks * self.sizes[k]
            order.append(len(view))
            view.append(size // end)
        return tuple(view), tuple(order)

    @property
    def _padded_dims(self) -> list[tuple[int, int]]:
        """(dim, blocks) where the gather leaves padding out."""
        stored = (self.stored[k] for k in self.gather)
        return [(t.dim, t.blocks) for t in stored if t.padded]

    @property
    def is_view(self) -> bool:
        """Whether the stacked shards lie in memory as the gathered tensor does."""
        view, order = self._digits
        moved = [d for d in order if view[d] > 1]
        return moved == sorted(moved)

    def gathered(self, stacked: torch.Tensor) -> torch.Tensor:
        """Stacked shards (num_shards, shard_numel), rows may be strided -> the gathered tensor.
        One copy, none where `is_view` and the rows are adjacent: its strides are the same
        whatever shares a buffer with it. Padding is left out, so that a dim behind the first
        that has some makes the result strided."""
        view, order = self._digits
        gathered = stacked.view(view).permute(order).reshape(self._filled_shape).contiguous()
        for dim, blocks in self._padded_dims:
            gathered = cropped_blocks(gathered, dim, blocks, self.gathered_shape[dim])
        return gathered

    def write_stacked(
        self, gathered: torch.Tensor, out: torch.Tensor, *, adds: bool = False
    ) -> None:
        """Copy the gathered tensor into its stacked shards `out` (num_shards, shard_numel), or add
        it to what they are."""
        view, order = self._digits
        full = gathered
        for dim, blocks in self._padded_dims:
            full = filled_blocks(full, dim, blocks, self._filled_shape[dim])
        stacked, ordered = out.view(view).permute(order), full.reshape([view[d] for d in order])
        _ = stacked.add_(ordered) if adds else stacked.copy_(ordered)
