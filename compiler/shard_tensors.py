"""Parts of a tensor along one dim in blocks: cutting, stacking, merging. No communication.

A dim of `blocks` equal blocks, each cut in n equal parts, is seen as [blocks, n, rest]; part r is
[:, r, :] (meshfold.spmd).
"""

import math

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
    digits = torch.unflatten(parts, dim + 1, (blocks, size // blocks)).movedim(0, dim + 1)
    assert digits.shape[dim + 1] == count
    return digits.flatten(dim, dim + 2)


def zero_padded(x: Tensor, dim: int, blocks: int, num_parts: int, index: int) -> Tensor:
    """The whole dim with x at part `index` and zeros elsewhere."""
    size = x.shape[dim]
    whole = x.new_zeros((*x.shape[:dim], size * num_parts, *x.shape[dim + 1 :]))
    target = _digits(whole, dim, blocks, num_parts).select(dim + 1, index)
    target.copy_(torch.unflatten(x, dim, (blocks, size // blocks)))
    return whole


Places = tuple[tuple[int, int, int], ...]
"""(blocks, number of parts, own part) of every axis that shards a dim."""


def digits_of(index: Tensor, size: int, places: Places) -> tuple[Tensor, Tensor]:
    """Which of the global indices on a dim of `size` are held here, and where: (held, local index).
    The local index of what is not held is valid but meaningless."""
    held = torch.ones_like(index, dtype=torch.bool)
    local = index
    # The axis with the fewest blocks holds the highest digit: taking it out leaves the lower ones
    # in place.
    for blocks, num_parts, own in sorted(places):
        below = size // (blocks * num_parts)
        held &= index // below % num_parts == own
        local = local // (below * num_parts) * below + local % below
    return held, local


def local_row(row: int, size: int, places: Places) -> int | None:
    """As digits_of for one number; None if it is not held here."""
    local = row
    for blocks, num_parts, own in sorted(places):
        below = size // (blocks * num_parts)
        if row // below % num_parts != own:
            return None
        local = local // (below * num_parts) * below + local % below
    return local


def held_indices(size: int, places: Places, device: torch.device) -> Tensor:
    """Global indices of a dim of `size` that are held here, ascending."""
    index = torch.arange(size // math.prod(n for _, n, _ in places), device=device)
    # The reverse of digits_of, lowest digit first.
    for blocks, num_parts, own in sorted(places, reverse=True):
        below = size // (blocks * num_parts)
        index = (index // below * num_parts + own) * below + index % below
    return index


def held_runs(size: int, places: Places) -> tuple[tuple[int, int], ...]:
    """The same as ranges without gaps: (first global index, number of them)."""
    count = size // math.prod(n for _, n, _ in places)
    unit = min((size // (blocks * n) for blocks, n, _ in places), default=count)
    runs: list[tuple[int, int]] = []
    for index in range(0, count, max(unit, 1)):
        for blocks, num_parts, own in sorted(places, reverse=True):
            below = size // (blocks * num_parts)
            index = (index // below * num_parts + own) * below + index % below
        if runs and sum(runs[-1]) == index:
            runs[-1] = runs[-1][0], runs[-1][1] + unit
        else:
            runs.append((index, unit))
    return tuple(runs)


def _digits(x: Tensor, dim: int, blocks: int, num_parts: int) -> Tensor:
    return torch.unflatten(x, dim, (blocks, num_parts, x.shape[dim] // (blocks * num_parts)))
