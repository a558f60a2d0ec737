"""Operator splitting (OSDP, Jiang et al. 2023, arXiv:2209.13258): a large linear layer or embedding
in n equal slices of its parameter W, each a layer of its own.

    y = x W'   by columns of the result    y = cat(x W'[0], ..., x W'[n-1])
    y = x W'   by columns of x             y = x[0] W'[0] + ... + x[n-1] W'[n-1]
    y = W[i]   by columns of the result    y = cat(W[0][i], ..., W[n-1][i])

Slices are regions, so what ZeRO does with regions it does with them: under ZeRO 3 one slice is
gathered and the next one in flight, forward and backward, and its gradient is reduced as it comes.

How many slices an operator has follows from its size: the largest has `count`, others as many as
make their slices no larger than its. The parameter remains one: a rank stores the shards of all its
slices, one after the other, which is Shard(dim, blocks) of the whole (`whole_layout`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.ir.op_graph import (
    Arg,
    FoldedGraph,
    Op,
    OpGraph,
    ParameterSlice,
    Ref,
    Region,
    Slot,
    SlotKind,
    Source,
    Value,
)
from meshfold.ir.spmd import Layout
from meshfold.passes.rules.ops.index import EMBEDDING
from meshfold.passes.rules.ops.random import draw_of
from meshfold.passes.split.pieces import cut_at

_LINEAR, _ADDMM, _MM = "aten.linear.default", "aten.addmm.default", "aten.mm.default"
_CAT, _ADD, _SLICE = "aten.cat.default", "aten.add.Tensor", "aten.slice.Tensor"

_WEIGHT = {_LINEAR: 1, _ADDMM: 2, _MM: 1, EMBEDDING: 0}
"""Which argument of an op is the parameter that is sliced."""
_JOINED = {_LINEAR: 0, _ADDMM: 1, _MM: 1, EMBEDDING: 1}
"""The dim of it whose slices make columns of the result."""
_SUMMED = {_LINEAR: 1, _ADDMM: 0, _MM: 0}
"""The dim of it whose slices make summands of the result."""

MOST_SURPLUS = 2
"""So many times the slices that are wanted a parameter may have, where its dim does not divide."""

RegionSlot = tuple[int, int]
"""Region, slot."""


@dataclass(frozen=True)
class Slicing:
    """A parameter slot in `count` slices along `dim`."""

    dim: int
    count: int


def with_slices(folded: FoldedGraph, count: int) -> FoldedGraph:
    """`folded` whose largest operator runs in at least `count` slices, and others by their size;
    `folded` itself where none can, and where operators are in slices already."""
    is_sliced = any(s.slice for instance in folded.instances for s in instance.sources)
    slicings = {} if is_sliced else slicings_of(folded, count)
    if not slicings:
        return folded
    written = [_Written.of(r, folded, slicings) for r in range(len(folded.regions))]
    instances = tuple(
        replace(i, sources=written[i.region].sources(i.sources)) for i in folded.instances
    )
    regions = tuple(
        replace(region, graph=w.graph) for region, w in zip(folded.regions, written, strict=True)
    )
    rewritten = replace(folded, regions=regions, instances=instances)
    pieces = cut_at(rewritten, {r: w.ends for r, w in enumerate(written) if w.ends})
    names = [
        f"{region.name}{n}" if w.ends else region.name
        for region, w in zip(regions, written, strict=True)
        for n in range(len(w.ends) or 1)
    ]
    return _merged(replace(pieces.folded, numbers=pieces.numbers), names)


def whole_layout(layout: Layout, of: ParameterSlice) -> Layout:
    """The layout of a parameter whose slices are all stored as `layout`: one after the other on
    every rank."""
    return tuple(replace(t, blocks=t.blocks * of.count) if t.dim == of.dim else t for t in layout)


def operators_in_slices(folded: FoldedGraph) -> list[tuple[int, int]]:
    """(instance of the first slice, of the last one) of every operator that is in slices."""
    found: list[tuple[int, int]] = []
    begins: dict[str, int] = {}
    for k, instance in enumerate(folded.instances):
        for source in instance.sources:
            if (part := source.slice) is None:
                continue
            if part.number == 0:
                begins[source.name] = k
            if part.number == part.count - 1:
                found.append((begins[source.name], k))
    return found


# Which parameters are sliced.


def slicings_of(folded: FoldedGraph, count: int) -> dict[RegionSlot, Slicing]:
    """The parameter slots that are read in slices, if the largest operator is to have `count`."""
    groups = _operators(folded)
    largest = max((_value(folded, g[0]).num_bytes for g in groups), default=0)
    found: dict[RegionSlot, Slicing] = {}
    for group in groups:
        value = _value(folded, group[0])
        wanted = math.ceil(value.num_bytes * count / largest) if largest else 1
        if wanted > 1 and (slicing := _slicing(folded, group, value, wanted)):
            found.update(dict.fromkeys(group, slicing))
    return found


def largest_operator_bytes(folded: FoldedGraph) -> int:
    """Bytes of the largest parameter that slices can be read of."""
    groups = _operators(folded)
    return max((_value(folded, group[0]).num_bytes for group in groups), default=0)


def _operators(folded: FoldedGraph) -> list[tuple[RegionSlot, ...]]:
    """The parameters that slices can be read of."""
    return [g for g in _parameters(folded) if all(_is_operator(folded, *slot) for slot in g)]


def _parameters(folded: FoldedGraph) -> list[tuple[RegionSlot, ...]]:
    """The parameter slots, those that share a parameter together."""
    tied = {slot for group in folded.tied_slots for slot in group}
    alone = (
        (r, i)
        for r, region in enumerate(folded.regions)
        for i, slot in enumerate(region.graph.slots)
        if slot.kind is SlotKind.PARAMETER and (r, i) not in tied
    )
    return [*folded.tied_slots, *((slot,) for slot in alone)]


def _value(folded: FoldedGraph, slot: RegionSlot) -> Value:
    return folded.regions[slot[0]].graph.values[slot[1]]


def _is_operator(folded: FoldedGraph, region: int, v: int) -> bool:
    """Whether all that reads a parameter can run in slices of it."""
    graph = folded.regions[region].graph
    if len(graph.values[v].shape) != 2 or v in graph.outputs or not graph.users[v]:
        return False
    return all(_reads_as_weight(graph.ops[k], v) for k in graph.users[v])


def _reads_as_weight(op: Op, v: int) -> bool:
    at = _WEIGHT.get(op.target, -1)
    is_plain = op.operands.count(v) == 1 and not op.kwargs
    return at >= 0 and is_plain and op.args[at] == Ref(v)


def _slicing(
    folded: FoldedGraph, group: Sequence[RegionSlot], value: Value, wanted: int
) -> Slicing | None:
    """The dim and number of slices: at least `wanted`, columns of the results where that can be."""
    targets = [
        graph.ops[k].target
        for r, v in group
        for graph in (folded.regions[r].graph,)
        for k in graph.users[v]
    ]
    dims = [d for d in (0, 1) if all(d in (_JOINED[t], _SUMMED.get(t)) for t in targets)]
    dims.sort(key=lambda d: sum(_JOINED[t] != d for t in targets))
    for dim in dims:
        counts = range(wanted, MOST_SURPLUS * wanted + 1)
        count = next((n for n in counts if value.shape[dim] % n == 0), 0)
        if count and count < value.shape[dim]:
            return Slicing(dim, count)
    return None


# Regions with slices.


@dataclass(frozen=True)
class _Written:
    """A region whose operators are in slices, still in one. origins: per slot the slot before, and
    the slice of it. ends: of its parts, in ops; empty where it is as before."""

    graph: OpGraph
    origins: tuple[tuple[int, ParameterSlice | None], ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(region: int, folded: FoldedGraph, slicings: Mapping[RegionSlot, Slicing]) -> "_Written":
        graph = folded.regions[region].graph
        own = {v: x for (r, v), x in slicings.items() if r == region}
        if not own:
            return _Written(graph, tuple((v, None) for v in range(len(graph.slots))), ())
        return _Writer(graph, own).written()

    def sources(self, sources: Sequence[Source]) -> tuple[Source, ...]:
        """The sources of an instance, given those before."""
        return tuple(replace(sources[v], slice=part) for v, part in self.origins)


class _Writer:
    """Writes a region anew."""

    def __init__(self, graph: OpGraph, slicings: Mapping[int, Slicing]) -> None:
        self.graph = graph
        self.slicings = slicings
        self.slots: list[Slot] = []
        self.values: list[Value] = []
        self.origins: list[tuple[int, ParameterSlice | None]] = []
        self.ops: list[Op] = []
        self.ends: list[int] = []
        self.numbers: dict[int, int] = {}
        """Of values, before -> now."""
        self.slices: dict[int, list[int]] = {v: [] for v in slicings}

    def written(self) -> _Written:
        graph = self.graph
        for v in range(len(graph.slots)):
            self._slot(v)
        for k, op in enumerate(graph.ops):
            weight = next((v for v in op.operands if v in self.slicings), None)
            if weight is None:
                outputs = tuple(self._value(graph.values[v]) for v in op.outputs)
                self.numbers.update(zip(op.outputs, outputs, strict=True))
                args = tuple(map(self._arg, op.args))
                kwargs = tuple((name, self._arg(a)) for name, a in op.kwargs)
                draw = draw_of(op, k)
                self.ops.append(replace(op, args=args, kwargs=kwargs, outputs=outputs, draw=draw))
            else:
                self._operator(op, weight)
        now = OpGraph(
            tuple(self.slots),
            tuple(self.values),
            tuple(self.ops),
            tuple(self.numbers[v] for v in graph.outputs),
            tuple((self.numbers[slot], self.numbers[v]) for slot, v in graph.mutations),
        )
        ends = sorted({*self.ends, len(self.ops)} - {0})
        return _Written(now, tuple(self.origins), tuple(ends))

    def _slot(self, v: int) -> None:
        value, slot = self.graph.values[v], self.graph.slots[v]
        if (slicing := self.slicings.get(v)) is None:
            self.numbers[v] = self._value(value)
            self.slots.append(slot)
            self.origins.append((v, None))
            return
        dim, count = slicing.dim, slicing.count
        shape = tuple(n // count if d == dim else n for d, n in enumerate(value.shape))
        for number in range(count):
            self.slices[v].append(self._value(replace(value, shape=shape)))
            self.slots.append(slot)
            self.origins.append((v, ParameterSlice(dim, number, count)))

    def _value(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _arg(self, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(self.numbers[arg.index])
        return tuple(map(self._arg, arg)) if isinstance(arg, tuple) else arg

    def _operator(self, op: Op, weight: int) -> None:
        """An op in slices of its parameter, each one a part of the region."""
        self.ends.append(len(self.ops))
        made = op.outputs[0]
        is_joined = self.slicings[weight].dim == _JOINED[op.target]
        write = self._joined if is_joined else self._summed
        self.numbers[made] = write(op, weight, self.graph.values[made])

    def _emit(self, like: Op, target: str, args: tuple[Arg, ...], value: Value) -> int:
        v = self._value(value)
        self.ops.append(replace(like, target=target, args=args, kwargs=(), outputs=(v,)))
        return v

    def _joined(self, op: Op, weight: int, made: Value) -> int:
        columns = made.shape[-1] // self.slicings[weight].count
        part = replace(made, shape=(*made.shape[:-1], columns))
        target = _MM if op.target == _ADDMM else op.target
        found = []
        for w in self.slices[weight]:
            args = self._with_weight(op, w, target)
            found.append(self._emit(op, target, args, part))
            self.ends.append(len(self.ops))
        refs = tuple(map(Ref, found))
        joined = self._emit(op, _CAT, (refs, len(made.shape) - 1), made)
        bias = self._bias(op)
        return joined if bias is None else self._emit(op, _ADD, (Ref(joined), bias), made)

    def _bias(self, op: Op) -> Arg:
        if op.target == _ADDMM:
            return self._arg(op.args[0])
        return self._arg(op.args[2]) if op.target == _LINEAR and len(op.args) > 2 else None

    def _with_weight(self, op: Op, weight: int, target: str) -> tuple[Arg, ...]:
        """The arguments of a slice by columns of the result, without a bias."""
        if op.target == EMBEDDING:
            return (Ref(weight), *map(self._arg, op.args[1:]))
        x = op.args[1] if op.target == _ADDMM else op.args[0]
        return self._arg(x), Ref(weight)

    def _summed(self, op: Op, weight: int, made: Value) -> int:
        x = op.args[1] if op.target == _ADDMM else op.args[0]
        assert isinstance(x, Ref), "a linear layer reads a tensor"
        before = self.graph.values[x.index]
        last = len(before.shape) - 1
        width = before.shape[-1] // self.slicings[weight].count
        total = self._bias(op)
        for n, w in enumerate(self.slices[weight]):
            columns = (self._arg(x), last, n * width, (n + 1) * width)
            part = replace(before, shape=(*before.shape[:-1], width))
            rows = Ref(self._emit(op, _SLICE, columns, part))
            total = Ref(self._added(op, total, rows, Ref(w), made))
            self.ends.append(len(self.ops))
        assert isinstance(total, Ref), "there are slices"
        return total.index

    def _added(self, op: Op, total: Arg, x: Ref, weight: Ref, made: Value) -> int:
        """`total` and the product of a slice; the first total is the bias, or nothing."""
        if op.target == _LINEAR:
            is_bias = total is None or len(self.values[_index(total)].shape) == 1
            if is_bias:
                args: tuple[Arg, ...] = (x, weight) if total is None else (x, weight, total)
                return self._emit(op, _LINEAR, args, made)
            product = self._emit(op, _LINEAR, (x, weight), made)
            return self._emit(op, _ADD, (total, Ref(product)), made)
        if total is None:
            return self._emit(op, _MM, (x, weight), made)
        return self._emit(op, _ADDMM, (total, x, weight), made)


def _index(arg: Arg) -> int:
    assert isinstance(arg, Ref), "a tensor"
    return arg.index


# Equal regions.


def _merged(folded: FoldedGraph, names: Sequence[str]) -> FoldedGraph:
    """`folded` with equal regions as one, under new names."""
    numbers: dict[OpGraph, int] = {}
    number_of = [numbers.setdefault(region.graph, len(numbers)) for region in folded.regions]
    first = [number_of.index(n) for n in range(len(numbers))]
    regions = tuple(Region(names[r], folded.regions[r].graph) for r in first)
    instances = tuple(replace(i, region=number_of[i.region]) for i in folded.instances)
    return replace(folded, regions=regions, instances=instances)
