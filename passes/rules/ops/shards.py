"""Which shards the ops of a region ask for on one axis, from the labels on their dims.

(dim, blocks) candidates of every value grow from blocks = 1 along labels until nothing changes,
forwards and backwards over the whole region: a split into q, k, v asks for three blocks of the
weight in front of it.

What does not divide is filled up, where an op asks for a padded shard: embeddings and losses over
classes for one of a vocabulary (OpLabels.pads), attention for one of heads (OpLabels.heads). It
grows along ops that do not mix what is beyond the end with the rest (OpLabels.keeps_padding), or
leave it out (OpLabels.drops_padding). Granules that no shard splits go with it: 25 heads of 64 are,
in a fused projection to q, k and v, 3 blocks of 25 granules of 64 rows.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from meshfold.ir.op_graph import Op, OpGraph
from meshfold.ir.spmd import PaddedShard, Shard, SpmdType
from meshfold.passes.rules.ops.labels import Dims, OpLabels

PADDED = 0
"""A number of blocks that stands for one padded block of single rows, some for every rank."""

GRANULES = -1
"""A number of blocks that stands for one padded block of granules; ranks may have none."""

MOST_FILLING = 2
"""A padded dim has at most this many times its granules."""

LabelShard = tuple[int, int]
"""A shard of the index of a label: (blocks, granules). Granules per block, where they are padded; 0
of a shard that divides."""


class Divisions:
    """What divides over an axis of `size` ranks, with all answers given so far: the one way in
    which rules depend on a size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._answers: dict[tuple[int, int], bool] = {}

    def __call__(self, extent: int, blocks: int) -> bool:
        """Whether `blocks` equal blocks of an extent divide over the axis. PADDED: whether it does
        not divide, and every rank has some of it once it is padded. GRANULES: whether it does not
        divide, and padding is no more than MOST_FILLING allows."""
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
    if blocks == GRANULES:
        filled = -(-extent // size) * size
        return 1 < extent < filled <= MOST_FILLING * extent
    return extent % (blocks * size) == 0


ShardCandidate = tuple[int, int, int]
"""(dim, blocks, granules) of a shard, granules as in LabelShard."""

ShardCandidates = tuple[frozenset[ShardCandidate], ...]
"""The shards on one axis of each value of a graph."""

Shards = tuple[SpmdType | None, ...]
"""Shards of operands, then outputs; None: does not carry the label."""

Shardings = dict[tuple[str, LabelShard], Shards | None]
"""Shards by (label, its shard); None: some tensor cannot be sharded so."""


def grown_shardings(
    graph: OpGraph, labels: Sequence[OpLabels | None], divisions: Divisions
) -> tuple[ShardCandidates, list[Shardings]]:
    """ShardCandidates of every value, and per op the shards they lead to."""
    found: list[set[ShardCandidate]] = [
        {(d, 1, 0) for d, extent in enumerate(value.shape) if extent and divisions(extent, 1)}
        for value in graph.values
    ]
    for op, spec in zip(graph.ops, labels, strict=True):
        if spec is not None and (spec.pads or spec.heads):
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
                    candidate = candidate_of(graph.values[v].shape, t)
                    if candidate not in found[v]:
                        found[v].add(candidate)
                        near = (*graph.users[v], graph.producers[v])
                        waiting.update(j for j in near if j >= 0 and labels[j])
    return tuple(map(frozenset, found)), shardings


def candidate_of(shape: Sequence[int], shard: SpmdType) -> ShardCandidate:
    """What asks for a shard of a tensor."""
    granules = shape[shard.dim] // (shard.blocks * shard.unit) if shard.padded else 0
    return shard.dim, shard.blocks, granules


def _seed_padding(
    graph: OpGraph,
    op: Op,
    spec: OpLabels,
    divisions: Divisions,
    found: Sequence[set[ShardCandidate]],
) -> None:
    """Adds the dims that an op itself may have padded: key heads where query heads do not divide,
    either."""
    carriers: dict[str, list[tuple[int, int, int]]] = {}
    for v, dims in zip((*op.operands, *op.outputs), (*spec.inputs, *spec.outputs), strict=True):
        for d, carried in enumerate(dims):
            if carried is not None and carried[0] in spec.pads | spec.heads:
                places = carriers.setdefault(carried[0], [])
                places.append((graph.values[v].shape[d], v, d))
    for label, places in carriers.items():
        if label in spec.heads and divisions(max(places)[0], 1):
            continue
        for extent, v, d in places:
            if divisions(extent, PADDED if label in spec.pads else GRANULES):
                found[v].add((d, 1, extent))


def new_shardings(
    graph: OpGraph,
    op: Op,
    spec: OpLabels,
    divisions: Divisions,
    candidates: Sequence[AbstractSet[ShardCandidate]] | Mapping[int, AbstractSet[ShardCandidate]],
    known: Shardings,
) -> list[Shards]:
    """Adds to `known` every (label, shard) that a candidate of some operand or output asks for, all
    by value; returns the shards of those that were added and that all tensors can have."""
    values = (*op.operands, *op.outputs)
    wanted = {
        (carried[0], (carried[1] * blocks, granules))
        for of_values in ((*spec.inputs, *spec.outputs), *spec.alternatives.values())
        for v, dims in zip(values, of_values, strict=True)
        for d, blocks, granules in candidates[v]
        if (carried := dims[d]) is not None
    }
    new = []
    for label, at in sorted(wanted - known.keys()):
        known[label, at] = shards = shards_at(graph, op, spec, label, at, divisions)
        if shards is not None:
            new.append(shards)
    return new


def shards_at(
    graph: OpGraph, op: Op, spec: OpLabels, label: str, at: LabelShard, divisions: Divisions
) -> Shards | None:
    """Shards of operands, then outputs, with the label sharded as `at`; None if one cannot."""
    blocks, granules = at
    if granules:
        return _padded_at(graph, op, spec, label, at, divisions)
    if not divisions(spec.granularity.get(label, 0), blocks):
        return None
    optional = spec.unsharded_if_uneven.get(label, frozenset())
    shards: list[SpmdType | None] = []
    pairs = zip((*op.operands, *op.outputs), spec.dims_of(label), strict=True)
    for k, (v, dims) in enumerate(pairs):
        possible, shard = _shard_at(graph.values[v].shape, dims, label, blocks, divisions)
        if not possible and k not in optional:
            return None
        shards.append(shard)
    return tuple(shards)


def _padded_at(
    graph: OpGraph, op: Op, spec: OpLabels, label: str, at: LabelShard, divisions: Divisions
) -> Shards | None:
    """The same with a padded shard of the label."""
    if label not in spec.pads | spec.heads | spec.keeps_padding | spec.drops_padding:
        return None
    is_plain = label in spec.pads
    if not divisions(at[1], PADDED if is_plain else GRANULES):
        return None
    optional = spec.unsharded_if_uneven.get(label, frozenset())
    shards: list[SpmdType | None] = []
    pairs = zip((*op.operands, *op.outputs), (*spec.inputs, *spec.outputs), strict=True)
    for k, (v, dims) in enumerate(pairs):
        possible, shard = _padded_shard(graph.values[v].shape, dims, label, at)
        possible = possible or k in optional
        if not possible or (is_plain and shard and shard != PaddedShard(shard.dim)):
            return None
        shards.append(shard)
    return tuple(shards)


def _padded_shard(
    shape: Sequence[int], dims: Dims, label: str, at: LabelShard
) -> tuple[bool, SpmdType | None]:
    """(possible, shard) of a tensor: one dim has the digit of the granules, and the others nothing
    of it. What is joined with others has no digit for which of them it is."""
    first, granules = at
    if first % min((c[1] for c in dims if c is not None and c[0] == label), default=1):
        return False, None
    shard, carries = None, False
    for d, carried in enumerate(dims):
        if carried is None or carried[0] != label or shape[d] == 1:
            continue
        carries = True
        prefix, end = carried[1], carried[1] * shape[d]
        if shard is None and first % prefix == 0 and end % (first * granules) == 0:
            shard = PaddedShard(d, first // prefix, end // (first * granules))
        elif first % end and prefix % (first * granules):
            return False, None
    return shard is not None or not carries, shard


def _shard_at(
    shape: Sequence[int], dims: Dims, label: str, label_blocks: int, divisions: Divisions
) -> tuple[bool, SpmdType | None]:
    """(possible, shard) of a tensor whose label is sharded in `label_blocks`."""
    carries = False
    for d, carried in enumerate(dims):
        if carried is not None and carried[0] == label:
            carries = True
            blocks, rest = divmod(label_blocks, carried[1])
            if rest == 0 and shape[d] and divisions(shape[d], blocks):
                return True, Shard(d, blocks)
    return not carries, None
