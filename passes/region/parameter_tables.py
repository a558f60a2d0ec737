"""Tables of what parameters cost between stored and used layouts, for the search of a region."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfold.ir.conversion_step import Step
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import Layout, SpmdType, is_legal
from meshfold.passes.price.conversions import step_s
from meshfold.passes.price.parameters import (
    BUCKET_BYTES,
    is_grouped,
    local_bytes,
    member_copies,
    stored_bytes,
)
from meshfold.passes.region.elimination import Table
from meshfold.passes.region.roles import SearchCosts


@dataclass(frozen=True, slots=True)
class Prices:
    """What the search pays for memory of parameters of two dims and more: per byte of the stored
    layout on a rank, and per byte of the layout that ops read (after a gather)."""

    state_s_per_byte: float = 0.0
    used_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class _Path:
    """The way from a stored layout to a used one. steps: with each, whether the role of its axis
    makes what is bucketed free, and whether a parameter may not have the layout after it.
    is_reduced: whether the gradient is reduced in a bucket that is not free."""

    stored: Layout
    steps: tuple[tuple[Step, bool, bool], ...]
    is_reduced: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Ways from stored to used layouts, None where not allowed, and [stored, used] -> its way; the
    distinct used layouts, and [used] -> its layout."""

    paths: list[_Path | None]
    numbers: NDArray[np.intp]
    used: list[Layout]
    columns: NDArray[np.intp]


class ParameterPrices:
    """Conversion prices of parameters on one mesh. The steps of a pair of layouts are cached."""

    def __init__(self, costs: SearchCosts) -> None:
        self.mesh = costs.mesh
        self.costs = costs
        self._per_byte: dict[tuple[str, int], float] = {}
        self._pairs: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], _Pairs] = {}

    def num_bytes(self, value: Value, layouts: Sequence[Layout], *, stored: bool = False) -> Table:
        """Bytes per rank in each layout, as it lives between steps (`stored`) or as ops read it."""
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
        seconds = np.array([self._path_s(value, path) for path in pairs.paths])
        return seconds[pairs.numbers], self.num_bytes(value, pairs.used)[pairs.columns]

    def _find_pairs(self, stored: tuple[Layout, ...], used: tuple[Layout, ...]) -> _Pairs:
        distinct = {u: k for k, u in enumerate(dict.fromkeys(used))}
        columns = np.array([distinct[u] for u in used], dtype=np.intp)
        paths = [self._path(s, u) for s in stored for u in distinct]
        rows = np.arange(len(stored))[:, None] * len(distinct)
        return _Pairs(paths, rows + columns, list(distinct), columns)

    def _path_s(self, value: Value, path: _Path | None) -> float:
        if path is None:
            return math.inf
        total = 0.0
        for step, is_free, may_conflict in path.steps:
            if may_conflict and not is_legal(value.shape, step.after, self.mesh.sizes):
                return math.inf
            if is_grouped(step.source, step.target):
                total += 0.0 if is_free else self._reduced_s(value, step)
            else:
                total += step_s(value, step, self.costs)
        if path.is_reduced:
            # Without launches, as collectives are without latency: buckets are there in any case.
            total += member_copies(value, path.stored, (), self.costs).reduced_s
        return total

    def _path(self, stored: Layout, used: Layout) -> _Path | None:
        """The steps between two layouts, axis by axis, of any parameter; None if not allowed."""
        path, now = [], stored
        for axis, (source, target) in enumerate(zip(stored, used, strict=True)):
            if not self._allowed(axis, source, target):
                return None
            if source == target:
                continue
            step = Step(axis, source, target, now)
            now = step.after
            # What shards one axis alone is legal, since a layout holds it.
            may_conflict = sum(t.is_shard for t in now) > 1
            is_free = not self.costs.roles[axis].charges_reductions
            path.append((step, is_free, may_conflict))
        is_reduced = any(
            is_grouped(step.source, step.target) and not is_free for step, is_free, _ in path
        )
        return _Path(stored, tuple(path), is_reduced)

    def _allowed(self, axis: int, source: SpmdType, target: SpmdType) -> bool:
        if self.costs.roles[axis].uses_unsharded_parameters:
            return target.kind in ("I", "R")
        return source == target or (source.kind == "I" and not target.padded)

    def _reduced_s(self, value: Value, step: Step) -> float:
        """Seconds to reduce a gradient; parameters are gathered on no axis that is charged."""
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
