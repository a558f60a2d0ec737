"""Indices that name every row in order select nothing, and leave the program.

    x[arange(b)[:, None, None, None], arange(s)]    x as [b, 1, 1, s]      masks of Hugging Face
    x[arange(b), last]                              gather along dim 1     the last token of a text

As an index, rows could be anywhere: no rank, and no microbatch, could do with its part of the
batch. Written without it, the batch stays a dim that is sharded.

Which indices are in order is proven from the program's constants, of which small ones are computed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from meshfold.capture.rewrites.known_values import computed, known_values
from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.ir.op_graph import Source, Value

INDEX = "aten.index.Tensor"
LARGEST = 2**22
"""Numbers of a value that is computed."""
NOWHERE = -1
"""Where an index of a dim of size 1 lies."""

Shape = tuple[int, ...]


def plain_indices(program: RawProgram) -> RawProgram:
    """`program` without the indices that are in order."""
    wanted = {arg.key: None for op in program.ops for arg in _indices(op) if arg is not None}
    if not wanted:
        return program
    known = known_values(program, list(wanted), _small)
    values = dict(program.values)
    ops: list[RawOp] = []
    for op in program.ops:
        index = _Index.read(op, values, known)
        ops += [op] if index is None else index.written(values)
    return replace(program, ops=ops, values=values)


def _indices(op: RawOp) -> tuple[Operand | None, ...]:
    return op.args[1] if op.target == INDEX else ()


def _small(op: RawOp, program: RawProgram, known: Mapping[Key, Tensor]) -> Tensor | None:
    if math.prod(program.values[op.outputs[0]].shape) > LARGEST:
        return None
    return computed(op, known)


@dataclass(frozen=True)
class _Index:
    """`op`, which indexes the dims `indexed` of its operand. lies: for each of them the dim of the
    index along which it is in order, None for one that is not. full: shape of the index; start:
    where it stands in the result."""

    op: RawOp
    indexed: tuple[int, ...]
    lies: tuple[int | None, ...]
    full: Shape
    start: int

    @classmethod
    def read(
        cls, op: RawOp, values: Mapping[Key, Value], known: Mapping[Key, Tensor]
    ) -> "_Index | None":
        """What `op` does, if it is an index that can be written without those in order."""
        given = [(d, arg.key) for d, arg in enumerate(_indices(op)) if arg is not None]
        if not given or any(values[key].dtype != "int64" for _, key in given):
            return None
        shape = values[op.args[0].key].shape
        backwards = zip_longest(*(values[key].shape[::-1] for _, key in given), fillvalue=1)
        full = tuple(next((n for n in of_dim if n != 1), 1) for of_dim in backwards)[::-1]
        indexed = tuple(d for d, _ in given)
        lies = tuple(_lies(known.get(key), shape[d], full) for d, key in given)
        adjacent = indexed == tuple(range(indexed[0], indexed[0] + len(indexed)))
        found = cls(op, indexed, lies, full, indexed[0] if adjacent else 0)
        return found if found._is_view(shape) or found._is_gather(shape) else None

    def _is_view(self, shape: Shape) -> bool:
        """Whether all indices are in order, each along a dim of its own."""
        places = [place for place in self.lies if place != NOWHERE]
        if None in places or len(set(places)) != len(places):
            return False
        return math.prod(self.full) == math.prod(shape[d] for d in self.indexed)

    def _is_gather(self, shape: Shape) -> bool:
        """Whether the first dims are indexed, all but the last of them in order and in place."""
        ordered = tuple(range(len(self.indexed) - 1))
        in_place = self.lies == (*ordered, None) and self.indexed == (*ordered, len(ordered))
        return in_place and 0 < len(ordered) and shape[: len(ordered)] == self.full[: len(ordered)]

    def written(self, values: dict[Key, Value]) -> list[RawOp]:
        """The ops in place of the index; `values` takes what they make."""
        return list(self._view(values) if None not in self.lies else self._gather(values))

    def _view(self, values: dict[Key, Value]) -> Iterator[RawOp]:
        """The indexed dims in the order in which the index has them."""
        x, shape = self.op.args[0].key, values[self.op.args[0].key].shape
        by_place = sorted(zip(self.lies, self.indexed, strict=True))
        others = [d for d in range(len(shape)) if d not in self.indexed]
        order = (*others[: self.start], *(d for _, d in by_place), *others[self.start :])
        (result,) = self.op.outputs
        if order != tuple(range(len(shape))):
            moved = tuple(shape[d] for d in order)
            yield self._make(values, "permute", f"{result}:moved", moved, "", x, order)
            x = f"{result}:moved"
        yield self._make(
            values, "reshape", result, values[result].shape, "", x, values[result].shape
        )

    def _gather(self, values: dict[Key, Value]) -> Iterator[RawOp]:
        """Rows of dim k, which the last index names, for every one of the dims in front of it."""
        (result,) = self.op.outputs
        x, k = self.op.args[0].key, len(self.indexed) - 1
        rest, size = values[x].shape[k + 1 :], values[x].shape[k]
        rows = (*self.full[:k], math.prod(self.full[k:]))
        one = (*rows, *(1,) * len(rest))
        index = _indices(self.op)[k]
        assert index is not None
        own, full = values[index.key].shape, self.full
        negative, wrapped, at, whole, column, spread, taken = (
            f"{result}:{name}"
            for name in ("negative", "wrapped", "at", "whole", "column", "spread", "taken")
        )
        # gather takes no negative numbers.
        yield self._make(values, "lt.Scalar", negative, own, "bool", index.key, 0)
        yield self._make(values, "add.Tensor", wrapped, own, "int64", index.key, size)
        yield self._make(values, "where.self", at, own, "int64", negative, wrapped, index.key)
        if own != full:
            yield self._make(values, "expand", whole, full, "int64", at, full)
            at = whole
        yield self._make(values, "reshape", column, one, "int64", at, one)
        yield self._make(values, "expand", spread, (*rows, *rest), "int64", column, (*rows, *rest))
        yield self._make(values, "gather", taken, (*rows, *rest), "", x, k, spread)
        shape = values[result].shape
        yield self._make(values, "reshape", result, shape, "", taken, shape)

    def _make(
        self,
        values: dict[Key, Value],
        op: str,
        name: str,
        shape: Shape,
        dtype: str,
        *args: object,
    ) -> RawOp:
        """An op that makes `name`; dtype "": that of the result."""
        like = values[self.op.outputs[0]]
        values[name] = replace(like, shape=shape, dtype=dtype or like.dtype)
        target = f"aten.{op}" if "." in op else f"aten.{op}.default"
        keys: tuple[RawArg, ...] = tuple(_operand(arg) for arg in args)
        return replace(self.op, target=target, args=keys, kwargs=(), outputs=(name,))


def _operand(arg: object) -> RawArg:
    return Operand(arg) if isinstance(arg, str | Source) else arg


def _lies(index: Tensor | None, size: int, full: Shape) -> int | None:
    """The dim of the index along which it is 0, 1, ... size - 1, and the same along all others;
    None if there is none."""
    if index is None or index.numel() != size:
        return None
    shape = (1,) * (len(full) - index.dim()) + tuple(index.shape)
    if not torch.equal(index.reshape(-1), torch.arange(size)):
        return None
    places = [d for d, n in enumerate(shape) if n > 1] or [NOWHERE]
    return places[0] if len(places) == 1 else None
