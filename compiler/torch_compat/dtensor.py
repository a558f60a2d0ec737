"""Local shards as DTensors. The one file that knows torch's private placement for strided shards.

DTensor shards left to right: on one dim, each further axis cuts what the axes before it left. A
layout of ours that nests the other way round (ZeRO-3 over a tensor-parallel column: dp Shard(0, n)
outside tp Shard(0)) is torch's _StridedShard, as fully_shard makes it. Other interleavings (fused
qkv: blocks; whole heads of a number that does not divide: units) have no DTensor that
torch.distributed.checkpoint would save rightly; they are re-sharded to `checkpoint_layout` first.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshfold.errors import moved
from meshfold.ir.spmd import Layout, PaddedShard, SpmdType
from meshfold.ir.spmd import Shard as ShardType

try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError as error:  # pragma: no cover
    raise moved("_StridedShard") from error


def checkpoint_layout(stored: Layout, sizes: Sequence[int]) -> Layout:
    """The layout in which a parameter stored in `stored` is saved: the same axes shard the same
    dims, but every rank holds one consecutive piece that DTensor can describe."""
    layout = list(stored)
    for dim in {t.dim for t in stored if t.is_shard}:
        axes = [k for k, t in enumerate(stored) if t.dim == dim]
        if _split_factors(stored, sizes, axes) is None:
            outer = 1
            for k in axes:
                layout[k] = PaddedShard(dim) if stored[k].padded else ShardType(dim, outer)
                outer *= sizes[k]
    return tuple(layout)


def placements_of(layout: Layout, sizes: Sequence[int]) -> tuple[Placement, ...]:
    """DTensor placements of a checkpoint layout, one per axis."""
    found: list[Placement] = [Replicate()] * len(layout)
    for dim in {t.dim for t in layout if t.is_shard}:
        axes = [k for k, t in enumerate(layout) if t.dim == dim]
        factors = _split_factors(layout, sizes, axes)
        assert factors is not None, "not a checkpoint layout"
        for k, factor in zip(axes, factors, strict=True):
            found[k] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return tuple(found)


def _split_factors(layout: Layout, sizes: Sequence[int], axes: list[int]) -> list[int] | None:
    """Split factor per axis of `axes`, which shard one dim, or None if DTensor cannot say it."""
    outer = 1
    for k in axes:
        if layout[k].blocks != outer or layout[k].unit > 1:
            break
        outer *= sizes[k]
    else:
        return [1] * len(axes)
    if len(axes) == 2:
        first, second = axes
        if layout[second].blocks == 1 and layout[first].blocks == sizes[second]:
            return [layout[first].blocks, 1]
    return None


def as_dtensor(
    local: torch.Tensor,
    shape: Sequence[int],
    layout: Layout,
    sizes: Sequence[int],
    device_mesh: DeviceMesh,
) -> DTensor:
    """The DTensor of global `shape` whose part here is `local`, in a checkpoint layout."""
    meta = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(
        local,
        device_mesh,
        placements_of(layout, sizes),
        run_check=False,
        shape=meta.shape,
        stride=meta.stride(),
    )


def is_placed(value: DTensor, layout: Layout, sizes: Sequence[int], mesh: DeviceMesh) -> bool:
    """Whether `value` is already in this checkpoint layout on this mesh."""
    return value.device_mesh == mesh and tuple(value.placements) == placements_of(layout, sizes)


def drop_axes(layout: Layout, sizes: Sequence[int]) -> tuple[tuple[SpmdType, ...], tuple[int, ...]]:
    """Layout and sizes without the axes of one rank."""
    kept = [(t, n) for t, n in zip(layout, sizes, strict=True) if n > 1]
    return tuple(t for t, _ in kept), tuple(n for _, n in kept)


def part_of(value: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """What this rank holds of a tensor, one piece, and where in the tensor it begins."""
    if not isinstance(value, DTensor):
        return (0,) * value.dim(), value.detach()
    (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets), value.to_local().detach()


def empty_as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory of its own for a tensor that is placed as `value`."""
    if not isinstance(value, DTensor):
        return torch.empty_like(value, dtype=dtype, requires_grad=False)
    return DTensor.from_local(
        torch.empty_like(value.to_local().detach(), dtype=dtype),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
