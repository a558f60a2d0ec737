"""Parts of a tensor along one dim in blocks: cutting, stacking, merging. No communication.

A dim of `blocks` equal blocks, each cut in n equal parts, is seen as [blocks, n, rest]; part r is
[:, r, :] (meshfold.ir.spmd).
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


def filled_blocks(x: Tensor, dim: int, blocks: int, size: int) -> Tensor:
    """x with zeros at the end of every block of a dim, which then has `size`; itself if it has."""
    width = x.shape[dim] // blocks
    beyond = size // blocks - width
    if not beyond:
        return x
    ends = (*(0, 0) * (x.dim() - 1 - dim), 0, beyond)
    parts = torch.unflatten(x, dim, (blocks, width))
    return torch.nn.functional.pad(parts, ends).flatten(dim, dim + 1)


def cropped_blocks(x: Tensor, dim: int, blocks: int, size: int) -> Tensor:
    """The first rows of every block of a dim, which then has `size`; a view of one block."""
    if x.shape[dim] == size:
        return x
    if blocks == 1:
        return x.narrow(dim, 0, size)
    parts = torch.unflatten(x, dim, (blocks, x.shape[dim] // blocks))
    return parts.narrow(dim + 1, 0, size // blocks).flatten(dim, dim + 1)


Places = tuple[tuple[int, int, int, int], ...]
"""(blocks, number of parts, own part, unit) of every axis that shards a dim; unit as in the type.
One that is padded is alone. The index of what is beyond the end of the last block is beyond that of
the dim; beyond the end of another it is that of a row of the next."""


def _filled_size(size: int, places: Places) -> int:
    """Size of the dim with padding."""
    for blocks, num_parts, _, unit in places:
        if unit:
            step = blocks * unit * num_parts
            return -(-size // step) * step
    return size


def _widths(size: int, filled: int, places: Places) -> tuple[int, int]:
    """Widths of the blocks behind whose end padding moves an index, without and with it: those of
    the padded axis where it has several."""
    blocks = places[0][0] if filled > size else 1
    return (size // blocks, filled // blocks) if blocks > 1 else (max(filled, 1),) * 2


def held_rows(size: int, places: Places) -> int:
    """How many rows of every block of a dim of `size` are held here, on a dim of one axis."""
    ((blocks, num_parts, own, _),) = places
    part = _filled_size(size, places) // (blocks * num_parts)
    return min(part, max(0, size // blocks - own * part))


def digits_of(index: Tensor, size: int, places: Places) -> tuple[Tensor, Tensor]:
    """Which of the global indices on a dim of `size` are held here, and where: (held, local index).
    The local index of what is not held is valid but meaningless."""
    filled = _filled_size(size, places)
    width, wider = _widths(size, filled, places)
    if wider > width:
        index = index + index // width * (wider - width)
    held = torch.ones_like(index, dtype=torch.bool)
    local = index
    # The axis with the fewest blocks holds the highest digit: taking it out leaves the lower ones
    # in place.
    for blocks, num_parts, own, _ in sorted(places):
        below = filled // (blocks * num_parts)
        held &= index // below % num_parts == own
        local = local // (below * num_parts) * below + local % below
    return held, local


def local_row(row: int, size: int, places: Places) -> int | None:
    """As digits_of for one number; None if it is not held here."""
    filled = _filled_size(size, places)
    width, wider = _widths(size, filled, places)
    row += row // width * (wider - width)
    local = row
    for blocks, num_parts, own, _ in sorted(places):
        below = filled // (blocks * num_parts)
        if row // below % num_parts != own:
            return None
        local = local // (below * num_parts) * below + local % below
    return local


def held_indices(size: int, places: Places, device: torch.device) -> Tensor:
    """Global indices of a dim of `size` that are held here, ascending; padding has indices, too."""
    filled = _filled_size(size, places)
    width, wider = _widths(size, filled, places)
    index = torch.arange(filled // math.prod(n for _, n, _, _ in places), device=device)
    # The reverse of digits_of, lowest digit first.
    for blocks, num_parts, own, _ in sorted(places, reverse=True):
        below = filled // (blocks * num_parts)
        index = (index // below * num_parts + own) * below + index % below
    return index - index // wider * (wider - width) if wider > width else index


def held_runs(size: int, places: Places) -> tuple[tuple[int, int], ...]:
    """The same as ranges without gaps, of a dim without padding: (first global index, number)."""
    count = size // math.prod(n for _, n, *_ in places)
    unit = min((size // (blocks * n) for blocks, n, *_ in places), default=count)
    runs: list[tuple[int, int]] = []
    for index in range(0, count, max(unit, 1)):
        for blocks, num_parts, own, _ in sorted(places, reverse=True):
            below = size // (blocks * num_parts)
            index = (index // below * num_parts + own) * below + index % below
        if runs and sum(runs[-1]) == index:
            runs[-1] = runs[-1][0], runs[-1][1] + unit
        else:
            runs.append((index, unit))
    return tuple(runs)


def _digits(x: Tensor, dim: int, blocks: int, num_parts: int) -> Tensor:
    return torch.unflatten(x, dim, (blocks, num_parts, x.shape[dim] // (blocks * num_parts)))
