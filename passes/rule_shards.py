"""Which shards the ops of a region ask for on one axis, from the labels on their dims.

(dim, blocks) candidates of every value grow from blocks = 1 along labels until nothing changes,
forwards and backwards over the whole region: a split into q, k, v asks for three blocks of the
weight in front of it. A vocabulary that does not divide is filled up: embeddings and losses over
classes ask for a padded shard of it (OpLabels.pads), which grows along ops that do not mix what is
beyond the end with the rest (OpLabels.keeps_padding).
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from meshfold.opgraph import Op, OpGraph
from meshfold.passes.rule_labels import Dims, OpLabels
from meshfold.spmd import PaddedShard, Shard, SpmdType

PADDED = 0
"""As a number of blocks, or a place: one block, padded."""


class Divisions:
    """What divides over an axis of `size` ranks, with all answers given so far: the one way in
    which rules depend on a size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._answers: dict[tuple[int, int], bool] = {}

    def __call__(self, extent: int, blocks: int) -> bool:
        """Whether `blocks` equal blocks of an extent divide over the axis. PADDED: whether it does
        not divide, and every rank holds some of it once it is filled up."""
        key = extent, blocks
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = _divides(extent, blocks, self.size)
        return found

    def agree_with(self, size: int) -> bool:
        """Whether another size, on an axis that is one, gives all of these answers."""
        if 1 in (size, self.size):
            return size == self.size
        return all(
            _divides(extent, blocks, size) == answer
            for (extent, blocks), answer in self._answers.items()
        )


def _divides(extent: int, blocks: int, size: int) -> bool:
    if blocks == PADDED:
        return extent % size != 0 and -(-extent // size) * (size - 1) < extent
    return extent % (blocks * size) == 0


Candidates = tuple[frozenset[tuple[int, int]], ...]
"""Per value of the graph: (dim, blocks) of its shards on one axis."""

Shards = tuple[SpmdType | None, ...]
"""Shards of operands, then outputs; None: does not carry the label."""

Shardings = dict[tuple[str, int], Shards | None]
"""By (label, place); None: some tensor cannot be sharded there."""


def grown_shardings(
    graph: OpGraph, labels: Sequence[OpLabels | None], divisions: Divisions
) -> tuple[Candidates, list[Shardings]]:
    """Candidates of every value, and per op the shards they lead to."""
    found: list[set[tuple[int, int]]] = [
        {(d, 1) for d, extent in enumerate(value.shape) if extent and divisions(extent, 1)}
        for value in graph.values
    ]
    for op, spec in zip(graph.ops, labels, strict=True):
        if spec is not None and spec.pads:
            _seed_padding(graph, op, spec, divisions, found)
    shardings: list[Shardings] = [{} for _ in graph.ops]
    waiting = set() if divisions.size == 1 else {k for k, spec in enumerate(labels) if spec}
    while waiting:
        for k in sorted(waiting):
            waiting.discard(k)
            op, spec = graph.ops[k], labels[k]
            assert spec is not None
            for shards in new_shardings(graph, op, spec, divisions, found, shardings[k]):
                for v, t in zip((*op.operands, *op.outputs), shards, strict=True):
                    if t is None:
                        continue
                    candidate = t.dim, PADDED if t.padded else t.blocks
                    if candidate not in found[v]:
                        found[v].add(candidate)
                        near = (*graph.users[v], graph.producers[v])
                        waiting.update(j for j in near if j >= 0 and labels[j])
    return tuple(map(frozenset, found)), shardings


def _seed_padding(
    graph: OpGraph,
    op: Op,
    spec: OpLabels,
    divisions: Divisions,
    found: Sequence[set[tuple[int, int]]],
) -> None:
    """Adds the dims that an op itself may have padded."""
    for v, dims in zip((*op.operands, *op.outputs), (*spec.inputs, *spec.outputs), strict=True):
        for d, carried in enumerate(dims):
            if carried and carried[0] in spec.pads and divisions(graph.values[v].shape[d], PADDED):
                found[v].add((d, PADDED))


def new_shardings(
    graph: OpGraph,
    op: Op,
    spec: OpLabels,
    divisions: Divisions,
    candidates: Sequence[AbstractSet[tuple[int, int]]],
    known: Shardings,
) -> list[Shards]:
    """Adds to `known` every (label, place) that a candidate of some operand or output asks for;
    returns the shards of those that were added and that all tensors can have."""
    tensors = [
        (graph.values[v].shape, candidates[v], dims)
        for v, dims in zip((*op.operands, *op.outputs), (*spec.inputs, *spec.outputs), strict=True)
    ]
    wanted = {
        (carried[0], carried[1] * blocks)
        for _, found, dims in tensors
        for d, blocks in found
        if (carried := dims[d]) is not None
    }
    new = []
    for label, place in sorted(wanted - known.keys()):
        known[label, place] = shards = shards_at(graph, op, spec, label, place, divisions)
        if shards is not None:
            new.append(shards)
    return new


def shards_at(
    graph: OpGraph, op: Op, spec: OpLabels, label: str, place: int, divisions: Divisions
) -> Shards | None:
    """Shards of operands, then outputs, with the label sharded at `place`; None if one cannot."""
    if place == PADDED:
        return _padded_at(graph, op, spec, label, divisions)
    if not divisions(spec.units.get(label, 0), place):
        return None
    optional = spec.whole_if_odd.get(label, frozenset())
    shards: list[SpmdType | None] = []
    pairs = zip((*op.operands, *op.outputs), spec.dims_of(label), strict=True)
    for k, (v, dims) in enumerate(pairs):
        possible, shard = _shard_at(graph.values[v].shape, dims, label, place, divisions)
        if not possible and k not in optional:
            return None
        shards.append(shard)
    return tuple(shards)


def _padded_at(
    graph: OpGraph, op: Op, spec: OpLabels, label: str, divisions: Divisions
) -> Shards | None:
    """The same with a padded shard of the label, which must be a whole dim wherever it is."""
    if label not in spec.pads | spec.keeps_padding:
        return None
    shards: list[SpmdType | None] = []
    extents: set[int] = set()
    for v, dims in zip((*op.operands, *op.outputs), (*spec.inputs, *spec.outputs), strict=True):
        at = [d for d, carried in enumerate(dims) if carried and carried[0] == label]
        if len(at) > 1 or (at and dims[at[0]] != (label, 1)):
            return None
        extents.update(graph.values[v].shape[d] for d in at)
        shards.append(PaddedShard(at[0]) if at else None)
    return tuple(shards) if all(divisions(n, PADDED) for n in extents) else None


def _shard_at(
    shape: Sequence[int], dims: Dims, label: str, place: int, divisions: Divisions
) -> tuple[bool, SpmdType | None]:
    """(possible, shard) of a tensor whose label is sharded at `place`."""
    carries = False
    for d, carried in enumerate(dims):
        if carried is not None and carried[0] == label:
            carries = True
            blocks, rest = divmod(place, carried[1])
            if rest == 0 and shape[d] and divisions(shape[d], blocks):
                return True, Shard(d, blocks)
    return not carries, None
