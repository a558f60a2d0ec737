"""The canonical form of a segment: equal forms mean that one region can stand for both.

A segment is a stretch of consecutive ops of a flat graph. Its ops are walked in order; values made
inside are numbered as they come, values from outside at first use. The form holds, exactly and
without hashing anything away:

    per op         target, constants with every float replaced by a hole, operand numbers,
                   and shape, dtype, gradient flow and dependence of each result; what is known of
                   an op of the user's
    per slot       kind, shape, dtype, gradient flow, dependence; of a buffer whether it is
                   persistent; of a constant which one it is (constants are named by value)
    outside        which values live on, and which buffers are updated by which values

Because slots are numbered by what they hold, two slots tied to one parameter are one slot, and the
tie pattern is in the form. Floats, names and sources are not: they are the *binding* of an
instance.

Linear in the number of ops. A Weisfeiler-Lehman hash is no substitute: it does not see the order of
operands, so a - b and b - a would be one region.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshfold.ir.op_graph import Arg, OpGraph, Ref, SlotKind, Value

MIN_REGION_OPS = 4

Form = Hashable


@dataclass(frozen=True)
class Segment:
    """Ops start..stop-1 of a flat graph with their canonical form and binding.

    slots: flat values taken from outside, in slot order; locals: flat values made inside, in
    order; outputs: flat values that live on outside; mutations: (flat buffer slot, flat value);
    floats: the float constants in order of appearance.
    """

    start: int
    stop: int
    form: Form
    slots: tuple[int, ...]
    locals: tuple[int, ...]
    outputs: tuple[int, ...]
    mutations: tuple[tuple[int, int], ...]
    floats: tuple[float, ...]


@dataclass(frozen=True)
class FlatIndex:
    """What canonical forms need to know about a whole flat graph, computed once.

    last_use: per value the last op that reads it, infinite for a graph output, -1 for none;
    updates: per value the buffer slots that take it; persistent: names of persistent buffers.
    """

    graph: OpGraph
    last_use: tuple[float, ...]
    updates: Mapping[int, tuple[int, ...]]
    persistent: frozenset[str]


class Span(NamedTuple):
    """Ops start..stop-1 as one segment. Glue is what is left between regions."""

    start: int
    stop: int
    is_glue: bool = False


def flat_index(graph: OpGraph, persistent: frozenset[str]) -> FlatIndex:
    last_use = [users[-1] if users else -1.0 for users in graph.users]
    for value in graph.outputs:
        last_use[value] = math.inf
    updates: dict[int, tuple[int, ...]] = {}
    for slot, value in graph.mutations:
        updates[value] = (*updates.get(value, ()), slot)
    return FlatIndex(graph, tuple(last_use), updates, persistent)


def canonical_segment(index: FlatIndex, start: int, stop: int) -> Segment:
    """Canonical form and binding of ops start..stop-1. O(size of the segment)."""
    walk = _Walk(index)
    ops = tuple(walk.op_form(k) for k in range(start, stop))
    outputs = tuple(v for v in walk.locals if index.last_use[v] >= stop)
    mutations = tuple((slot, v) for v in walk.locals for slot in index.updates.get(v, ()))
    updates = tuple((walk.slot(slot), walk.locals[value]) for slot, value in mutations)
    form = (
        ops,
        tuple(walk.slot_form(slot) for slot in walk.slots),
        tuple(walk.locals[v] for v in outputs),
        updates,
    )
    return Segment(
        start,
        stop,
        form,
        tuple(walk.slots),
        tuple(walk.locals),
        outputs,
        mutations,
        tuple(walk.floats),
    )


def is_worth(index: FlatIndex, span: Span) -> bool:
    """Whether a repeated segment is worth a region: MIN_REGION_OPS ops or more, and a parameter of
    two or more dims among them. Smaller ones (a norm, a table) are glue."""
    if span.stop - span.start < MIN_REGION_OPS:
        return False
    graph = index.graph
    return any(
        v < len(graph.slots)
        and graph.slots[v].kind is SlotKind.PARAMETER
        and len(graph.values[v].shape) > 1
        for op in graph.ops[span.start : span.stop]
        for v in op.operands
    )


class _Walk:
    """Numbers the values of one segment; dicts keep the order of numbering."""

    def __init__(self, index: FlatIndex) -> None:
        self.index = index
        self.slots: dict[int, int] = {}
        self.locals: dict[int, int] = {}
        self.floats: list[float] = []

    def slot(self, value: int) -> int:
        return self.slots.setdefault(value, len(self.slots))

    def op_form(self, number: int) -> Form:
        op = self.index.graph.ops[number]
        args = tuple(map(self._arg_form, op.args))
        kwargs = tuple((name, self._arg_form(arg)) for name, arg in op.kwargs)
        for value in op.outputs:
            self.locals[value] = len(self.locals)
        results = tuple(_facts(self.index.graph.values[v]) for v in op.outputs)
        return op.target, args, kwargs, results, op.custom

    def _arg_form(self, arg: Arg) -> Form:
        # Tagged, because Python holds True, 1 and 1.0 for equal.
        if isinstance(arg, Ref):
            if arg.index in self.locals:
                return "local", self.locals[arg.index]
            return "slot", self.slot(arg.index)
        if isinstance(arg, tuple):
            return tuple(map(self._arg_form, arg))
        if isinstance(arg, float):
            self.floats.append(arg)
            return "float"
        return type(arg).__name__, arg

    def slot_form(self, value: int) -> Form:
        graph = self.index.graph
        facts = _facts(graph.values[value])
        if value >= len(graph.slots):
            return SlotKind.VALUE, facts
        slot = graph.slots[value]
        if slot.kind is SlotKind.BUFFER:
            return slot.kind, facts, slot.name in self.index.persistent
        if slot.kind is SlotKind.CONSTANT:
            return slot.kind, facts, slot.name
        return slot.kind, facts


def _facts(value: Value) -> Form:
    return value.shape, value.dtype, value.requires_grad, value.depends, value.master
