"""Shards of a tensor along one dim in blocks: slicing, stacking, indices. No communication.

A dim of `blocks` equal blocks, each split into n equal shards, is viewed as [blocks, n, rest];
shard r is [:, r, :] (meshfold.ir.spmd).
"""

import math

import torch
from torch import Tensor


def shard(x: Tensor, dim: int, blocks: int, num_shards: int, index: int) -> Tensor:
    """Shard `index`, contiguous: [..., size, ...] -> [..., size / num_shards, ...]."""
    width = x.shape[dim] // num_shards
    if blocks == 1:
        return x.narrow(dim, index * width, width).contiguous()
    return _digits(x, dim, blocks, num_shards).select(dim + 1, index).flatten(dim, dim + 1)


def stacked_shards(x: Tensor, dim: int, blocks: int, num_shards: int) -> Tensor:
    """All shards on a new dim 0, contiguous: [num_shards, ..., size / num_shards, ...]."""
    shards = _digits(x, dim, blocks, num_shards).movedim(dim + 1, 0)
    return shards.flatten(dim + 1, dim + 2).contiguous()


def unstacked_shards(shards: Tensor, dim: int, blocks: int) -> Tensor:
    """Inverse of stacked_shards."""
    count, size = shards.shape[0], shards.shape[dim + 1]
    digits = torch.unflatten(shards, dim + 1, (blocks, size // blocks)).movedim(0, dim + 1)
    assert digits.shape[dim + 1] == count
    return digits.flatten(dim, dim + 2)


def zero_padded(x: Tensor, dim: int, blocks: int, num_shards: int, index: int) -> Tensor:
    """The unsharded dim with x at shard `index` and zeros elsewhere."""
    size = x.shape[dim]
    full = x.new_zeros((*x.shape[:dim], size * num_shards, *x.shape[dim + 1 :]))
    target = _digits(full, dim, blocks, num_shards).select(dim + 1, index)
    target.copy_(torch.unflatten(x, dim, (blocks, size // blocks)))
    return full


def filled_blocks(x: Tensor, dim: int, blocks: int, size: int) -> Tensor:
    """x with zeros at the end of every block of a dim, which then has `size`; itself if it has."""
    width = x.shape[dim] // blocks
    beyond = size // blocks - width
    if not beyond:
        return x
    ends = (*(0, 0) * (x.dim() - 1 - dim), 0, beyond)
    in_blocks = torch.unflatten(x, dim, (blocks, width))
    return torch.nn.functional.pad(in_blocks, ends).flatten(dim, dim + 1)


def cropped_blocks(x: Tensor, dim: int, blocks: int, size: int) -> Tensor:
    """The first rows of every block of a dim, which then has `size`; a view of one block."""
    if x.shape[dim] == size:
        return x
    if blocks == 1:
        return x.narrow(dim, 0, size)
    in_blocks = torch.unflatten(x, dim, (blocks, x.shape[dim] // blocks))
    return in_blocks.narrow(dim + 1, 0, size // blocks).flatten(dim, dim + 1)


ShardIndices = tuple[tuple[int, int, int, int], ...]
"""(blocks, number of shards, shard index, granularity) of every axis that shards a dim; the
granularity as in the type. A padded axis is the only one. The index of a padding row of the last
block is beyond the end of the dim; that of another block is that of a row of the next."""


def _filled_size(size: int, indices: ShardIndices) -> int:
    """Size of the dim with padding."""
    for blocks, num_shards, _, granularity in indices:
        if granularity:
            step = blocks * granularity * num_shards
            return -(-size // step) * step
    return size


def _widths(size: int, filled: int, indices: ShardIndices) -> tuple[int, int]:
    """Widths of the blocks behind whose end padding moves an index, without and with it: those of
    the padded axis where it has several."""
    blocks = indices[0][0] if filled > size else 1
    return (size // blocks, filled // blocks) if blocks > 1 else (max(filled, 1),) * 2


def num_valid_rows(size: int, indices: ShardIndices) -> int:
    """How many rows of every block of a dim of `size` are local, padding left out, on a dim of one
    axis."""
    ((blocks, num_shards, shard_index, _),) = indices
    shard_rows = _filled_size(size, indices) // (blocks * num_shards)
    return min(shard_rows, max(0, size // blocks - shard_index * shard_rows))


def locate_indices(index: Tensor, size: int, indices: ShardIndices) -> tuple[Tensor, Tensor]:
    """Which of the global indices on a dim of `size` are local, and where: (is local, local index).
    The local index is valid in any case, but meaningless of others."""
    filled = _filled_size(size, indices)
    width, wider = _widths(size, filled, indices)
    if wider > width:
        index = index + index // width * (wider - width)
    is_local = torch.ones_like(index, dtype=torch.bool)
    local = index
    # The axis with the fewest blocks has the highest digit: removing it leaves the lower ones
    # in place.
    for blocks, num_shards, shard_index, _ in sorted(indices):
        below = filled // (blocks * num_shards)
        is_local &= index // below % num_shards == shard_index
        local = local // (below * num_shards) * below + local % below
    return is_local, local


def local_row(row: int, size: int, indices: ShardIndices) -> int | None:
    """Where one global index is, see locate_indices; None if it is not local."""
    filled = _filled_size(size, indices)
    width, wider = _widths(size, filled, indices)
    row += row // width * (wider - width)
    local = row
    for blocks, num_shards, shard_index, _ in sorted(indices):
        below = filled // (blocks * num_shards)
        if row // below % num_shards != shard_index:
            return None
        local = local // (below * num_shards) * below + local % below
    return local


def local_indices(size: int, indices: ShardIndices, device: torch.device) -> Tensor:
    """Global indices of a dim of `size` that are local, ascending; padding has indices, too."""
    filled = _filled_size(size, indices)
    width, wider = _widths(size, filled, indices)
    index = torch.arange(filled // math.prod(n for _, n, _, _ in indices), device=device)
    # The reverse of locate_indices, lowest digit first.
    for blocks, num_shards, shard_index, _ in sorted(indices, reverse=True):
        below = filled // (blocks * num_shards)
        index = (index // below * num_shards + shard_index) * below + index % below
    return index - index // wider * (wider - width) if wider > width else index


def local_runs(size: int, indices: ShardIndices) -> tuple[tuple[int, int], ...]:
    """The same as ranges without gaps, of a dim without padding: (first global index, number)."""
    count = size // math.prod(n for _, n, *_ in indices)
    granularity = min((size // (blocks * n) for blocks, n, *_ in indices), default=count)
    runs: list[tuple[int, int]] = []
    for index in range(0, count, max(granularity, 1)):
        for blocks, num_shards, shard_index, _ in sorted(indices, reverse=True):
            below = size // (blocks * num_shards)
            index = (index // below * num_shards + shard_index) * below + index % below
        if runs and sum(runs[-1]) == index:
            runs[-1] = runs[-1][0], runs[-1][1] + granularity
        else:
            runs.append((index, granularity))
    return tuple(runs)


def _digits(x: Tensor, dim: int, blocks: int, num_shards: int) -> Tensor:
    return torch.unflatten(x, dim, (blocks, num_shards, x.shape[dim] // (blocks * num_shards)))


def check_indices(index: Tensor, size: int, what: str) -> None:
    """Raises IndexError, as torch does of unsharded tensors, for an index that is not below `size`;
    on accelerators an assertion of the device, so that nothing waits for it."""
    if index.device.type == "meta" or type(index) is not Tensor:
        return
    is_beyond = (index < 0) | (index >= size)
    if index.device.type != "cpu":
        torch._assert_async(~is_beyond.any(), f"{what} out of range")
    elif bool(is_beyond.any()):
        raise IndexError(f"{what} {int(index[is_beyond][0])} is not one of {size}")
