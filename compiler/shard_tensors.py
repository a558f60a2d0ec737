"""Parts of a tensor along one dim in blocks: cutting, stacking, merging. No communication.

A dim of `blocks` equal blocks, each cut in n equal parts, is seen as [blocks, n, rest]; part r is
[:, r, :] (meshfold.spmd).
"""

import torch
from torch import Tensor


def part(x: Tensor, dim: int, blocks: int, num_parts: int, index: int) -> Tensor:
    """Part `index`, contiguous: [..., size, ...] -> [..., size / num_parts, ...]."""
    width = x.shape[dim] // num_parts
    if blocks == 1:
        return x.narrow(dim, index * width, width).contiguous()
    return _digits(x, dim, blocks, num_parts).select(dim + 1, index).flatten(dim, dim + 1)


def stacked_parts(x: Tensor, dim: int, blocks: int, num_parts: int) -> Tensor:
    """All parts on a new dim 0, contiguous: [num_parts, ..., size / num_parts, ...]."""
    parts = _digits(x, dim, blocks, num_parts).movedim(dim + 1, 0)
    return parts.flatten(dim + 1, dim + 2).contiguous()


def merged_parts(parts: Tensor, dim: int, blocks: int) -> Tensor:
    """Inverse of stacked_parts."""
    count, size = parts.shape[0], parts.shape[dim + 1]
    digits = parts.unflatten(dim + 1, (blocks, size // blocks)).movedim(0, dim + 1)
    assert digits.shape[dim + 1] == count
    return digits.flatten(dim, dim + 2)


def zero_padded(x: Tensor, dim: int, blocks: int, num_parts: int, index: int) -> Tensor:
    """The whole dim with x at part `index` and zeros elsewhere."""
    size = x.shape[dim]
    whole = x.new_zeros((*x.shape[:dim], size * num_parts, *x.shape[dim + 1 :]))
    target = _digits(whole, dim, blocks, num_parts).select(dim + 1, index)
    target.copy_(x.unflatten(dim, (blocks, size // blocks)))
    return whole


def digits_of(
    index: Tensor, size: int, digits: tuple[tuple[int, int, int], ...]
) -> tuple[Tensor, Tensor]:
    """Which entries of a sharded dim are held here, and where.

    index: global indices on a dim of `size`. digits: (blocks, number of parts, own part) per axis
    that shards the dim. Returns (held, local index); the local index of what is not held is valid
    but meaningless.
    """
    held = torch.ones_like(index, dtype=torch.bool)
    local = index
    # The axis with the fewest blocks holds the highest digit: taking it out leaves the lower ones
    # in place.
    for blocks, num_parts, own in sorted(digits):
        below = size // (blocks * num_parts)
        held &= index // below % num_parts == own
        local = local // (below * num_parts) * below + local % below
    return held, local


def held_indices(
    size: int, digits: tuple[tuple[int, int, int], ...], device: torch.device
) -> Tensor:
    """Global indices of a dim of `size` that are held here, ascending. digits: as digits_of."""
    index = torch.arange(size, device=device)
    held, _ = digits_of(index, size, digits)
    return index[held] if digits else index


def _digits(x: Tensor, dim: int, blocks: int, num_parts: int) -> Tensor:
    return x.unflatten(dim, (blocks, num_parts, x.shape[dim] // (blocks * num_parts)))
