"""Slices of a global tensor by layout, and the global tensor from its slices.

The reference for conversions and rules: written from the definition of the types, by indices, with
random pending sums.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from meshfold.ir.mesh import Mesh
from meshfold.ir.spmd import INVARIANT, PARTIAL, Layout, Shard, SpmdType, local_shape, padded_shape

Coords = tuple[int, ...]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal to rounding in float64; the details only where they are not."""
    if found.dtype != expected.dtype or not torch.allclose(
        found, expected, rtol=1e-11, atol=1e-11, equal_nan=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11, equal_nan=True)


class FlatCosts:
    """A stand-in for the cost model: latency plus bytes, the same everywhere."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def collective_s(self, kind: str, num_bytes: int, axes: tuple[int, ...]) -> float:
        return 5e-6 + (2 if kind == "all_reduce" else 1) * num_bytes * 1e-9

    def compute_s(self, flops: float, num_bytes: float, dtype: str) -> float:
        return 1e-6 + flops * 1e-12 + num_bytes * 1e-12


def _unpadded(t: SpmdType) -> SpmdType:
    return Shard(t.dim, t.blocks) if t.padded else t


def _rows(size: int, full: int, blocks: int) -> Tensor:
    """Where the rows of a padded dim are once its blocks are filled up."""
    return torch.arange(full).view(blocks, -1)[:, : size // blocks].flatten()


def _filled(x: Tensor, layout: Layout, mesh: Mesh, beyond: float) -> Tensor:
    """x among what is filled up with one number."""
    full = padded_shape(x.shape, layout, mesh.sizes)
    for t in layout:
        if t.padded:
            shape = (*x.shape[: t.dim], full[t.dim], *x.shape[t.dim + 1 :])
            out = torch.full(shape, beyond).to(x.dtype)
            x = out.index_copy_(t.dim, _rows(x.shape[t.dim], full[t.dim], t.blocks), x)
    return x


def _inside(x: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """The reverse."""
    for t in layout:
        if t.padded:
            x = x.index_select(t.dim, _rows(shape[t.dim], x.shape[t.dim], t.blocks))
    return x


def gradient_layout(layout: Layout) -> Layout:
    """Layout of the gradient of a value: same everywhere, pending sum, or sharded."""
    dual = {"I": INVARIANT, "R": PARTIAL, "P": INVARIANT}
    return tuple(t if t.is_shard else dual[t.kind] for t in layout)


def _held(shape: Sequence[int], layout: Layout, mesh: Mesh, coords: Coords) -> dict[int, Tensor]:
    """The global indices that the rank at `coords` has, by sharded dim."""
    sharded = sorted({t.dim for t in layout if t.is_shard})
    axes = list(zip(layout, mesh.sizes, coords, strict=True))
    return {
        d: _held_indices(shape[d], tuple((t.blocks, n, c) for t, n, c in axes if t.dim == d))
        for d in sharded
    }


@functools.lru_cache(maxsize=10_000)
def _held_indices(size: int, digits: tuple[tuple[int, int, int], ...]) -> Tensor:
    index = torch.arange(size)
    keep = torch.ones(size, dtype=torch.bool)
    for blocks, num_ranks, coord in digits:
        keep &= index // (size // (blocks * num_ranks)) % num_ranks == coord
    return index[keep]


def cut(
    x: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator, *, beyond: float = 0.0
) -> list[Tensor]:
    """Local tensors of the global x, in rank order. Pending sums are random parts; padding holds
    the number `beyond`."""
    wholes: dict[Coords, Tensor] = {(): x}
    for t, size in zip(layout, mesh.sizes, strict=True):
        parted = {}
        for coords, whole in wholes.items():
            parts = [whole] * size
            if t == PARTIAL and x.is_floating_point():
                noise = torch.randn((size, *x.shape), generator=generator, dtype=x.dtype)
                # What is no number comes from one rank.
                parts = list(noise - noise.mean(0))
                parts[0] += whole
            elif t == PARTIAL:
                parts = [whole, *[torch.zeros_like(whole)] * (size - 1)]
            parted.update({(*coords, c): p for c, p in enumerate(parts)})
        wholes = parted
    out = []
    full = padded_shape(x.shape, layout, mesh.sizes)
    for rank in range(mesh.num_ranks):
        local = _filled(wholes[mesh.coords(rank)], layout, mesh, beyond)
        for dim, held in _held(full, layout, mesh, mesh.coords(rank)).items():
            local = local.index_select(dim, held)
        out.append(local.clone())
    return out


def put_together(
    locals_: Sequence[Tensor],
    shape: Sequence[int],
    layout: Layout,
    mesh: Mesh,
    *,
    zeros_beyond: bool = False,
) -> Tensor:
    """The global tensor without padding. Raises AssertionError where ranks that must agree do not,
    or with `zeros_beyond` where padding holds anything else."""
    full = padded_shape(shape, layout, mesh.sizes)
    if full != tuple(shape):
        whole = put_together(locals_, full, tuple(map(_unpadded, layout)), mesh)
        inside = _inside(whole, shape, layout)
        assert torch.isfinite(whole).all(), "padding that is not finite"
        if zeros_beyond:
            assert_close(whole, _filled(inside, layout, mesh, 0.0))
        return inside
    wholes: dict[Coords, Tensor] = {}
    for rank, local in enumerate(locals_):
        assert local.shape == local_shape(shape, layout, mesh.sizes), "local shape"
        for dim, held in _held(shape, layout, mesh, mesh.coords(rank)).items():
            extended = (*local.shape[:dim], shape[dim], *local.shape[dim + 1 :])
            local = torch.zeros(extended, dtype=local.dtype).index_copy_(dim, held, local)
        wholes[mesh.coords(rank)] = local
    for axis in reversed(range(len(mesh.sizes))):
        merged: dict[Coords, Tensor] = {}
        for coords in itertools.product(*(range(n) for n in mesh.sizes[:axis])):
            parts = [wholes[(*coords, c)] for c in range(mesh.sizes[axis])]
            if layout[axis].kind in "IR":
                for part in parts[1:]:
                    assert_close(part, parts[0])
                merged[coords] = parts[0]
            elif parts[0].dtype == torch.bool:
                merged[coords] = torch.stack(parts).any(0)
            else:
                merged[coords] = torch.stack(parts).sum(0, dtype=parts[0].dtype)
        wholes = merged
    return wholes[()]
