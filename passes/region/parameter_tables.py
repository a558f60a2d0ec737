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

A bucket is a flat buffer for a collective, and its members are copied into and out of it:

    before a gather     shards cast to what ops read, where they are kept in another dtype; several
                        are put one after the other
    after it            every member out of the parts that all ranks sent, unless it lies there as
                        it is: the only one, cut along its first dim
    before a reduction  every gradient into the buffer, cast to what parameters are kept in
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import ITEM_BYTES, Value
from meshfold.ir.spmd import Layout, SpmdType, is_legal, local_shape
from meshfold.passes.price.conversions import ConversionCosts, Step, step_s
from meshfold.passes.region.elimination import Table
from meshfold.passes.region.roles import SearchCosts

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


def cast_s(value: Value, stored: Layout, mesh: Mesh, costs: ConversionCosts) -> float:
    """Seconds to cast a rank's part of a parameter to what ops read, among others."""
    moved = sum(size(value, stored, mesh.sizes) for size in (local_bytes, stored_bytes))
    return costs.compute_s(0.0, moved, value.dtype) - costs.launch_s


@dataclass(frozen=True, slots=True)
class BucketCopies:
    """Seconds of kernels on one rank: before each gather (or cast) of a bucket, after each gather,
    and before the reduction of its gradients."""

    packed_s: float = 0.0
    taken_s: float = 0.0
    reduced_s: float = 0.0

    @property
    def gathered_s(self) -> float:
        """Around one gather."""
        return self.packed_s + self.taken_s

    def __add__(self, other: "BucketCopies") -> "BucketCopies":
        return BucketCopies(
            self.packed_s + other.packed_s,
            self.taken_s + other.taken_s,
            self.reduced_s + other.reduced_s,
        )

    def __sub__(self, other: "BucketCopies") -> "BucketCopies":
        return BucketCopies(
            self.packed_s - other.packed_s,
            self.taken_s - other.taken_s,
            self.reduced_s - other.reduced_s,
        )


def member_copies(
    value: Value,
    stored: Layout,
    gather: Sequence[int],
    mesh: Mesh,
    costs: ConversionCosts,
) -> BucketCopies:
    """Of a parameter that is one of several in a bucket. gather: axes that it is gathered over."""
    here, kept = (size(value, stored, mesh.sizes) for size in (local_bytes, stored_bytes))
    shards = math.prod(mesh.sizes[k] for k in gather)
    packed_s = taken_s = reduced_s = 0.0
    if value.master:
        packed_s += cast_s(value, stored, mesh, costs)
    if gather:
        # One kernel for all of a bucket.
        packed_s += costs.compute_s(0.0, 2 * here, value.dtype) - costs.launch_s
        taken_s = costs.compute_s(0.0, 2 * shards * here, value.dtype)
    if value.requires_grad:
        reduced_s = costs.compute_s(0.0, shards * (here + kept), value.dtype)
    return BucketCopies(packed_s, taken_s, reduced_s)


@dataclass(frozen=True, slots=True)
class _Way:
    """From a stored layout. steps: with each, whether the role of its axis makes what is bucketed
    free, and whether a parameter may not have the layout after it. is_reduced: whether the gradient
    is reduced in a bucket that is not free."""

    stored: Layout
    steps: tuple[tuple[Step, bool, bool], ...]
    is_reduced: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Ways from stored to used layouts, None where not allowed, and [stored, used] -> its way; the
    distinct used layouts, and [used] -> its layout."""

    ways: list[_Way | None]
    numbers: NDArray[np.intp]
    used: list[Layout]
    places: NDArray[np.intp]


class ParameterPrices:
    """Conversion prices of parameters on one mesh. Which steps a pair of layouts takes is kept."""

    def __init__(self, mesh: Mesh, costs: SearchCosts) -> None:
        self.mesh = mesh
        self.costs = costs
        self._per_byte: dict[tuple[str, int], float] = {}
        self._pairs: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], _Pairs] = {}

    def num_bytes(self, value: Value, layouts: Sequence[Layout], *, stored: bool = False) -> Table:
        """Bytes per rank in each layout, as it is kept (`stored`) or as ops read it."""
        size = stored_bytes if stored else local_bytes
        return np.array([size(value, x, self.mesh.sizes) for x in layouts], dtype=float)

    def tables(
        self, value: Value, stored: Sequence[Layout], used: Sequence[Layout]
    ) -> tuple[Table, Table]:
        """([stored, used] -> seconds, +inf where the pair is not allowed; num_bytes of `used`)."""
        # Lists of layouts repeat over the parameters of ops of one kind.
        key = tuple(stored), tuple(used)
        pairs = self._pairs.get(key)
        if pairs is None:
            pairs = self._pairs[key] = self._find_pairs(*key)
        seconds = np.array([self._way_s(value, way) for way in pairs.ways])
        return seconds[pairs.numbers], self.num_bytes(value, pairs.used)[pairs.places]

    def _find_pairs(self, stored: tuple[Layout, ...], used: tuple[Layout, ...]) -> _Pairs:
        distinct = {u: k for k, u in enumerate(dict.fromkeys(used))}
        places = np.array([distinct[u] for u in used], dtype=np.intp)
        ways = [self._way(s, u) for s in stored for u in distinct]
        rows = np.arange(len(stored))[:, None] * len(distinct)
        return _Pairs(ways, rows + places, list(distinct), places)

    def _way_s(self, value: Value, way: _Way | None) -> float:
        if way is None:
            return math.inf
        total = 0.0
        for step, is_free, may_conflict in way.steps:
            if may_conflict and not is_legal(value.shape, step.after, self.mesh.sizes):
                return math.inf
            if is_bucketed(step.source, step.target):
                total += 0.0 if is_free else self._reduced_s(value, step)
            else:
                total += step_s(value, step, self.mesh, self.costs)
        if way.is_reduced:
            # Without launches, as collectives are without latency: buckets are there in any case.
            total += member_copies(value, way.stored, (), self.mesh, self.costs).reduced_s
        return total

    def _way(self, stored: Layout, used: Layout) -> _Way | None:
        """From layout to layout, axis by axis, whatever the parameter; None if not allowed."""
        way, now = [], stored
        for axis, (source, target) in enumerate(zip(stored, used, strict=True)):
            if not self._allowed(axis, source, target):
                return None
            if source == target:
                continue
            step = Step(axis, source, target, now)
            now = step.after
            # What cuts one axis alone is legal, since a layout holds it.
            may_conflict = sum(t.is_shard for t in now) > 1
            is_free = not self.costs.roles[axis].charges_reductions
            way.append((step, is_free, may_conflict))
        is_reduced = any(
            is_bucketed(step.source, step.target) and not is_free for step, is_free, _ in way
        )
        return _Way(stored, tuple(way), is_reduced)

    def _allowed(self, axis: int, source: SpmdType, target: SpmdType) -> bool:
        if self.costs.roles[axis].uses_parameters_whole:
            return target.kind in ("I", "R")
        return source == target or (source.kind == "I" and not target.padded)

    def _reduced_s(self, value: Value, step: Step) -> float:
        """Of its gradient; on no axis that is charged are parameters gathered."""
        assert not step.source.is_shard
        if not value.requires_grad:
            return 0.0
        num_bytes = stored_bytes(value, step.after, self.mesh.sizes)
        return self._share_s("all_reduce", num_bytes, step.axis)

    def _share_s(self, kind: str, num_bytes: int, axis: int) -> float:
        """A share of a full bucket's time, by bytes."""
        if (kind, axis) not in self._per_byte:
            bucket_s = self.costs.collective_s(kind, BUCKET_BYTES, (axis,))
            self._per_byte[kind, axis] = bucket_s / BUCKET_BYTES
        return self._per_byte[kind, axis] * num_bytes
