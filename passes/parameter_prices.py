"""What a parameter costs between its stored layout and the layout that ops read.

On one axis                                                               handled by
    same type        free
    I -> R           gradient all-reduce                                  runtime, in buckets
    S -> R           gather, gather again in backward, gradient           runtime, in buckets
                     reduce-scatter
    I -> S, I -> P   in-graph conversion                                  emitted graph
    S -> I           in-graph gather                                      emitted graph

On DATA and CONTEXT axes (passes/axis_roles.py) parameters are used whole, so the used type is I or
R; on every other axis a stored shard is used as it is. Bucketed collectives carry many parameters
at once: a parameter is charged its share of the bytes, without start-up latency, and nothing where
the degree decides (EXPERT axes, too).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshfold.cost_models.cost_model import CostModel
from meshfold.mesh import Mesh
from meshfold.opgraph import ITEM_BYTES, Value
from meshfold.passes.axis_roles import SearchCosts
from meshfold.passes.conversions import Step, step_s
from meshfold.passes.elimination import Table
from meshfold.spmd import Layout, SpmdType, is_legal, local_shape

BUCKET_BYTES = 25 << 20
"""Bytes of a bucket, for the price of a byte in it: the default of DistributedDataParallel."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What the search pays for memory of parameters of two dims and more: per byte of the stored
    layout on a rank, and per byte of the layout that ops read (after a gather)."""

    state_s_per_byte: float = 0.0
    used_s_per_byte: float = 0.0


def stored_bytes(value: Value, layout: Layout, sizes: Sequence[int]) -> int:
    """Bytes of a parameter on one rank in the dtype that it is kept in; so are those of its
    gradient after, and while, it is reduced."""
    return widening(value) * local_bytes(value, layout, sizes)


def widening(value: Value) -> int:
    """Bytes of an element as it is kept over those as ops read it."""
    return ITEM_BYTES[value.stored_dtype] // ITEM_BYTES[value.dtype]


def local_bytes(value: Value, layout: Layout, sizes: Sequence[int]) -> int:
    """Bytes of a value on one rank, in the dtype that ops read."""
    shards = 1
    for t, size in zip(layout, sizes, strict=True):
        if t.padded:
            return math.prod(local_shape(value.shape, layout, sizes)) * ITEM_BYTES[value.dtype]
        if t.is_shard:
            shards *= size
    return value.num_bytes // shards


def is_bucketed(source: SpmdType, target: SpmdType) -> bool:
    """Whether the runtime, not the graph, does this conversion of a parameter on one axis."""
    return target.kind == "R" and source.kind in ("I", "S")


def cast_s(value: Value, stored: Layout, mesh: Mesh, costs: CostModel) -> float:
    """Seconds to cast a rank's part of a parameter to what ops read, among others."""
    moved = sum(size(value, stored, mesh.sizes) for size in (local_bytes, stored_bytes))
    return costs.compute_s(0.0, moved, value.dtype) - costs.launch_s


class ParameterPrices:
    """Conversion prices of parameters on one mesh. Everything computed is kept."""

    def __init__(self, mesh: Mesh, costs: SearchCosts) -> None:
        self.mesh = mesh
        self.costs = costs
        self._per_byte: dict[tuple[str, int], float] = {}
        self._known: dict[tuple[tuple[int, ...], str, str, bool, Layout, Layout], float] = {}

    def num_bytes(self, value: Value, layouts: Sequence[Layout], *, stored: bool = False) -> Table:
        """Bytes per rank in each layout, as it is kept (`stored`) or as ops read it."""
        size = stored_bytes if stored else local_bytes
        return np.array([size(value, x, self.mesh.sizes) for x in layouts], dtype=float)

    def matrix(self, value: Value, stored: Sequence[Layout], used: Sequence[Layout]) -> Table:
        """[stored, used] -> seconds, +inf where the pair is not allowed."""
        distinct = sorted(set(used))
        column = {layout: k for k, layout in enumerate(distinct)}
        small = np.array([[self._price_s(value, s, u) for u in distinct] for s in stored])
        return small[:, [column[u] for u in used]]

    def _price_s(self, value: Value, stored: Layout, used: Layout) -> float:
        key = value.shape, value.dtype, value.master, value.requires_grad, stored, used
        if key not in self._known:
            self._known[key] = self._compute_s(value, stored, used)
        return self._known[key]

    def _compute_s(self, value: Value, stored: Layout, used: Layout) -> float:
        total, now = 0.0, stored
        for axis, (source, target) in enumerate(zip(stored, used, strict=True)):
            if not self._allowed(axis, source, target):
                return math.inf
            if source == target:
                continue
            after = (*now[:axis], target, *now[axis + 1 :])
            if not is_legal(value.shape, after, self.mesh.sizes):
                return math.inf
            if is_bucketed(source, target):
                total += self._bucketed_s(value, now, after, axis)
            else:
                total += step_s(value, Step(axis, source, target, now), self.mesh, self.costs)
            now = after
        return total

    def _allowed(self, axis: int, source: SpmdType, target: SpmdType) -> bool:
        if self.costs.roles[axis].uses_parameters_whole:
            return target.kind in ("I", "R")
        return source == target or (source.kind == "I" and not target.padded)

    def _bucketed_s(self, value: Value, before: Layout, after: Layout, axis: int) -> float:
        if not self.costs.roles[axis].charges_reductions:
            return 0.0
        whole = local_bytes(value, after, self.mesh.sizes)
        gathered = before[axis].is_shard
        total = 2 * self._share_s("all_gather", whole, axis) if gathered else 0.0
        if value.requires_grad:
            kind = "reduce_scatter" if gathered else "all_reduce"
            total += self._share_s(kind, stored_bytes(value, after, self.mesh.sizes), axis)
        return total

    def _share_s(self, kind: str, num_bytes: int, axis: int) -> float:
        """A share of a full bucket's time, by bytes."""
        if (kind, axis) not in self._per_byte:
            bucket_s = self.costs.collective_s(kind, BUCKET_BYTES, (axis,))
            self._per_byte[kind, axis] = bucket_s / BUCKET_BYTES
        return self._per_byte[kind, axis] * num_bytes
