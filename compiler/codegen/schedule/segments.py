"""A region's graph split into segments: what runs between its collectives, and these themselves.

A conversion that communicates is two segments, its start and its wait, and so are rows on their way
to experts, or back. All other nodes that have the same waits before them, those for groups
included, and the same starts behind them are one segment: whatever order the collectives come in,
nothing is gained by parting them. No segment needs another one that needs it: what is before a
segment only grows along the graph, what is behind it only shrinks.

What splits a value into micro-chunks, or joins one, can be a segment of its own, and others can be
shorter (SegmentLimits), for meshfold.codegen.chained_chunks.

Each segment is a graph of its own, run under autograd by meshfold.runtime.segment_execution, so its
backward can be called for by itself.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Literal

import torch
from torch import fx

from meshfold.codegen.program.emitted import CONTEXT, NAME, ORIGIN, group_number
from meshfold.codegen.program.region_schedule import CollectiveSegment, OpsSegment, SegmentedGraph
from meshfold.ops.conversions import STARTS, WAITS
from meshfold.zero.graph_ops import replicate_group, start_ahead, wait_group


@dataclass(frozen=True)
class SegmentLimits:
    """Where segments end that could go on."""

    splits: tuple[frozenset[int], ...] = ()
    """Sets of ops that take a value apart: a segment each."""
    joins: tuple[frozenset[int], ...] = ()
    """Sets of ops that join one: a segment each."""
    seconds: tuple[float, ...] = ()
    """Seconds of every op, forward."""
    shortest_s: float = math.inf
    """A segment ends once it takes so long."""


def segmented_graph(graph: fx.Graph, limits: SegmentLimits | None = None) -> SegmentedGraph:
    """The segments of a region's graph as meshfold.codegen.emit.region writes it."""
    return _written(graph, _grouped(_nodes(graph), limits or SegmentLimits()))


def fused_graph(
    graph: fx.Graph, limits: SegmentLimits, runs: Sequence[Sequence[int]]
) -> tuple[SegmentedGraph, tuple[int, ...]]:
    """The segments as segmented_graph has them, those of each run as one; and per segment its
    number among these."""
    groups = _grouped(_nodes(graph), limits)
    first = {k: run[0] for run in runs for k in run}
    together: dict[int, list[fx.Node]] = {}
    for k, group in enumerate(groups):
        together.setdefault(first.get(k, k), []).extend(group)
    ordered = _in_order(list(together.values()))
    numbers = {node: k for k, group in enumerate(ordered) for node in group}
    return _written(graph, ordered), tuple(numbers[group[0]] for group in groups)


def _nodes(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and not _is_group(n)]


def _written(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> SegmentedGraph:
    numbers = {node: k for k, group in enumerate(groups) for node in group}
    segments = tuple(
        _Writer(k, group, numbers).write()
        if _kind(group[0]) == "ops"
        else _collective(group[0], numbers)
        for k, group in enumerate(groups)
    )
    returned: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    members = {
        n.name: (_group_of(n.args[0]), n.args[1])
        for n in graph.nodes
        if n.target is operator.getitem and _is_group(n)
    }
    placeholders = tuple(n.name for n in graph.nodes if n.op == "placeholder")
    return SegmentedGraph(segments, members, tuple(n.name for n in returned), placeholders)


def _kind(node: fx.Node) -> Literal["ops", "start", "wait"]:
    return "start" if node.target in STARTS else "wait" if node.target in WAITS else "ops"


def _origin(node: fx.Node) -> Any:
    """What a node is part of, if that is known."""
    return node.meta.get(ORIGIN)


def _is_group(node: fx.Node) -> bool:
    """Whether a node opens a parameter group, takes a member out of one, or starts a
    prefetch."""
    functions = (wait_group, replicate_group)
    if node.target in (*functions, start_ahead):
        return True
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target in functions


def _group_of(opened: Any) -> int:
    """Number of the group that a node opens."""
    return group_number(opened.args[0].name)


def _grouped(nodes: Sequence[fx.Node], limits: SegmentLimits) -> list[list[fx.Node]]:
    """The nodes of each segment, segments in an order in which they can run: of those that can, the
    one whose first node comes first."""
    bits = {n: 1 << k for k, n in enumerate(n for n in nodes if _kind(n) != "ops")}
    # A segment that takes a value apart or joins one ends others as a collective does: what a split
    # reads is not with what reads the chunks, though no collective need be between them.
    split = {k: 1 << len(bits) + i for i, ops in enumerate(limits.splits) for k in ops}
    shift = len(bits) + len(limits.splits)
    join = {k: 1 << shift + i for i, ops in enumerate(limits.joins) for k in ops}
    shift += len(limits.joins)
    before = {
        user: 1 << shift + _group_of(opened)
        for opened in (nodes[0].graph.nodes if nodes else ())
        if opened.target in (wait_group, replicate_group)
        for user in opened.users
    }
    for n in nodes:
        own = bits[n] if n.target in WAITS else join.get(_origin(n), 0)
        before[n] = reduce(or_, (before.get(m, 0) for m in n.all_input_nodes), own)
    behind: dict[fx.Node, int] = {}
    for n in reversed(nodes):
        own = bits[n] if n.target in STARTS else split.get(_origin(n), 0)
        behind[n] = reduce(or_, (behind.get(m, 0) for m in n.users), own)
    groups: dict[tuple[int, int, int], list[fx.Node]] = {}
    keys: dict[fx.Node, tuple[int, int, int]] = {}
    for n in nodes:
        # What several results are taken out of does not leave its segment.
        source = n.args[0] if n.target is operator.getitem else None
        own_key = before[n], behind[n], bits.get(n, 0)
        keys[n] = keys.get(source, own_key) if isinstance(source, fx.Node) else own_key
        alone = split.get(_origin(n), 0) | join.get(_origin(n), 0)
        if alone:
            keys[n] = -1, -1, alone
        groups.setdefault(keys[n], []).append(n)
    unlimited = SegmentLimits()
    segments = ((group, unlimited if key[0] < 0 else limits) for key, group in groups.items())
    return _in_order([part for group, to in segments for part in _limited(group, to)])


def _limited(group: Sequence[fx.Node], limits: SegmentLimits) -> Iterator[list[fx.Node]]:
    """A group as `limits` has it; the nodes of an op stay together."""
    part: list[fx.Node] = []
    seconds, last = 0.0, None
    for n in group:
        origin = _origin(n)
        if origin != last:
            if part and seconds >= limits.shortest_s:
                yield part
                part, seconds = [], 0.0
            seconds += limits.seconds[origin] if isinstance(origin, int) and limits.seconds else 0.0
            last = origin
        part.append(n)
    if part:
        yield part


def _in_order(groups: list[list[fx.Node]]) -> list[list[fx.Node]]:
    number = {node: k for k, group in enumerate(groups) for node in group}
    needs = [
        {number[m] for n in group for m in n.all_input_nodes if number.get(m, k) != k}
        for k, group in enumerate(groups)
    ]
    done: dict[int, None] = {}
    left = list(range(len(groups)))
    while left:
        ready = next(k for k in left if needs[k].issubset(done))
        left.remove(ready)
        done[ready] = None
    return [groups[k] for k in done]


def _collective(node: Any, numbers: Mapping[fx.Node, int]) -> CollectiveSegment:
    """The segment of a start or a wait."""
    kind = _kind(node)
    assert kind != "ops"
    _, source, axis, *args = node.args
    start = node if kind == "start" else source
    partner = -1 if kind == "start" else numbers[start]
    make = STARTS[start.target]
    routes = [arg.name for arg in args if isinstance(arg, fx.Node)]
    inputs = (source.name, *(routes if kind == "start" else ()))
    actions = make if routes else make(*args)
    return CollectiveSegment(kind, inputs, (node.name,), axis, actions, node.meta[ORIGIN], partner)


class _Writer:
    """Writes segment `number`, the nodes `group` of a region's graph. numbers: the segment of every
    node."""

    def __init__(self, number: int, group: Sequence[fx.Node], numbers: Mapping[fx.Node, int]):
        self.number = number
        self.group = group
        self.numbers = numbers
        self.graph = fx.Graph()
        self.inputs = [CONTEXT]
        self.copies: dict[fx.Node, Any] = {}
        self.mesh = self.graph.placeholder(CONTEXT)

    def write(self) -> OpsSegment:
        for m in dict.fromkeys(m for n in self.group for m in n.all_input_nodes):
            if self.numbers.get(m) != self.number:
                self.copies[m] = self._read(m)
        for n in self.group:
            self.copies[n] = copy = self.graph.node_copy(n, self.copies.__getitem__)
            copy.meta[NAME] = n.name
        read = [n for n in self.group if any(self.numbers.get(u) != self.number for u in n.users)]
        self.graph.output(tuple(self.copies[n] for n in read))
        module = fx.GraphModule(torch.nn.Module(), self.graph, class_name=f"Segment{self.number}")
        origins = dict.fromkeys(n.meta[ORIGIN] for n in self.group if ORIGIN in n.meta)
        return OpsSegment(tuple(self.inputs), tuple(n.name for n in read), module, tuple(origins))

    def _read(self, node: fx.Node) -> fx.Node:
        """What stands for a value that comes from outside."""
        if node.name == CONTEXT:
            return self.mesh
        self.inputs.append(node.name)
        placeholder = self.graph.placeholder(node.name)
        placeholder.meta = {**node.meta, NAME: node.name}
        return placeholder
