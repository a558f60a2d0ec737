"""Cutting a global tensor into local ones by layout, and putting local ones together again.

The reference for conversions and rules: written from the definition of the types, by indices, with
random pending sums.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from meshfold.mesh import Mesh
from meshfold.spmd import INVARIANT, PARTIAL, Layout

Coords = tuple[int, ...]


class FlatCosts:
    """A stand-in for the cost model: latency plus bytes, the same everywhere."""

    def collective_s(self, kind: str, num_bytes: int, axes: tuple[int, ...]) -> float:
        return 5e-6 + (2 if kind == "all_reduce" else 1) * num_bytes * 1e-9

    def compute_s(self, flops: float, num_bytes: float, dtype: str) -> float:
        return 1e-6 + flops * 1e-12 + num_bytes * 1e-12


def gradient_layout(layout: Layout) -> Layout:
    """Layout of the gradient of a value: same everywhere, pending sum, or sharded."""
    dual = {"I": INVARIANT, "R": PARTIAL, "P": INVARIANT}
    return tuple(t if t.is_shard else dual[t.kind] for t in layout)


def _held(shape: Sequence[int], layout: Layout, mesh: Mesh, coords: Coords, dim: int) -> Tensor:
    """Global indices of `dim` on the rank at `coords`."""
    index = torch.arange(shape[dim])
    keep = torch.ones(shape[dim], dtype=torch.bool)
    for t, size, coord in zip(layout, mesh.sizes, coords, strict=True):
        if t.is_shard and t.dim == dim:
            keep &= index // (shape[dim] // (t.blocks * size)) % size == coord
    return index[keep]


def cut(x: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """Local tensors of the global x, in rank order. Pending sums are random parts."""
    wholes: dict[Coords, Tensor] = {(): x}
    for t, size in zip(layout, mesh.sizes, strict=True):
        parted = {}
        for coords, whole in wholes.items():
            parts = [whole] * size
            if t == PARTIAL and x.is_floating_point():
                noise = torch.randn((size, *x.shape), generator=generator, dtype=x.dtype)
                parts = list(noise - noise.mean(0) + whole / size)
            elif t == PARTIAL:
                parts = [whole, *[torch.zeros_like(whole)] * (size - 1)]
            parted.update({(*coords, c): p for c, p in enumerate(parts)})
        wholes = parted
    out = []
    for rank in range(mesh.num_ranks):
        local = wholes[mesh.coords(rank)]
        for dim in range(x.dim()):
            held = _held(x.shape, layout, mesh, mesh.coords(rank), dim)
            local = local.index_select(dim, held)
        out.append(local.clone())
    return out


def put_together(
    locals_: Sequence[Tensor], shape: Sequence[int], layout: Layout, mesh: Mesh
) -> Tensor:
    """The global tensor. Raises AssertionError where ranks that must agree do not."""
    wholes: dict[Coords, Tensor] = {}
    for rank, local in enumerate(locals_):
        coords = mesh.coords(rank)
        index = [_held(shape, layout, mesh, coords, d) for d in range(len(shape))]
        assert local.shape == tuple(len(i) for i in index), "local shape"
        whole = torch.zeros(tuple(shape), dtype=local.dtype)
        if shape:
            whole[torch.meshgrid(*index, indexing="ij")] = local
        else:
            whole = local.clone()
        wholes[coords] = whole
    for axis in reversed(range(len(mesh.sizes))):
        merged: dict[Coords, Tensor] = {}
        for coords in itertools.product(*(range(n) for n in mesh.sizes[:axis])):
            parts = [wholes[(*coords, c)] for c in range(mesh.sizes[axis])]
            if layout[axis].kind in "IR":
                for part in parts[1:]:
                    torch.testing.assert_close(part, parts[0], rtol=1e-12, atol=1e-12)
                merged[coords] = parts[0]
            elif parts[0].dtype == torch.bool:
                merged[coords] = torch.stack(parts).any(0)
            else:
                merged[coords] = torch.stack(parts).sum(0)
        wholes = merged
    return wholes[()]
