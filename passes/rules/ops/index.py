"""Rules of lookups by index: rows are found in an unsharded dim, in a sharded one as a sum, or are
exchanged.

Exchanged rows ("t"): dim 0 of what is read or written is a shard, and so are the indices, at the
same place. Each rank sends what it asks for, or gives, to the ranks that hold the rows it means
(meshfold.ops.distributed_index): buffers of experts are filled and emptied so.
"""

from dataclasses import replace

from meshfold.ir.op_graph import ITEM_BYTES, Value
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    RuleComm,
    Special,
    broadcast_dims,
    dim_label,
    numbered,
    rule,
)


def _embedding(op: BoundOp) -> OpLabels | None:
    """weight [v, o], ids [...] -> [..., o]. Sharded by v, each rank adds the rows it has."""
    if op.get("sparse") is True or op.get("scale_grad_by_freq") is True:
        return None
    ids = numbered(op.value("indices").shape)
    return OpLabels(
        ((dim_label("v"), dim_label("o")), ids),
        ((*ids, dim_label("o")),),
        summed=frozenset({"v"}),
        special={"v": Special(local="embedding")},
        pads=frozenset({"v"}),
        keeps_padding=frozenset({"o"}),
    )


ROWS = "t"
MOST_ROWS = 1.25
"""Rows that the busiest rank gets over the mean: what room beyond its share experts are given
(passes/rules/ops/experts.py, EXPERT_LOAD)."""


def _exchange(op: BoundOp, indices: tuple[int, ...], rows: Value, local: str) -> Special:
    """How many go, which, and the rows themselves; in backward their gradient."""
    num_rows = rows.shape[0] * ITEM_BYTES["int64"]
    counts = RuleComm("all_to_all", ITEM_BYTES["int64"], is_saved=True)
    asked = RuleComm("all_to_all", int(MOST_ROWS * num_rows) * len(indices), is_undivided=True)
    moved = RuleComm("all_to_all", int(MOST_ROWS * rows.num_bytes), is_undivided=True)
    back = RuleComm("all_to_all", moved.num_bytes, is_backward=True, is_undivided=True)
    comm = (counts, asked, moved, *((back,) if rows.requires_grad else ()))
    return Special(local=local, comm=comm, load=MOST_ROWS)


def _of_first_dims(op: BoundOp, indexed: list[int]) -> bool:
    """Whether indices are of the first dims, one number for every row."""
    shapes = {op.values[k].shape for k in op.positions("indices")}
    return indexed == list(range(len(indexed))) and len(shapes) == 1 and len(shapes.pop()) == 1


def _rows_of(value: Value) -> Dims:
    return (dim_label(ROWS), *(None,) * (len(value.shape) - 1))


def _index_select(op: BoundOp) -> OpLabels | None:
    """self [..., x, ...], index [i] -> [..., i, ...]"""
    shape = op.value("self").shape
    if not shape or len(op.value("index").shape) != 1:
        return None
    dim = op.dim("dim", len(shape))
    source = numbered(shape, but=(dim,))
    out = (*source[:dim], dim_label("i"), *source[dim + 1 :])
    found = OpLabels((source, (dim_label("i"),)), (out,), linear=(frozenset({0}),))
    return found if dim else _exchanged(op, found, (1,))


def _exchanged(op: BoundOp, found: OpLabels, indices: tuple[int, ...]) -> OpLabels:
    """The labels with one more way: rows exchanged to where the indices are."""
    rows = op.outputs[0]
    return replace(
        found,
        special={ROWS: _exchange(op, indices, rows, "take_rows")},
        alternatives={ROWS: tuple(map(_rows_of, (*op.values, rows)))},
    )


def _index(op: BoundOp) -> OpLabels | None:
    """x[..., index, ...]: dims of the (broadcast) indices are labels, indexed dims are
    unsharded."""
    given = op.get("indices")
    assert isinstance(given, tuple)
    if any(op.values[k].dtype == "bool" for k in op.positions("indices")):
        return None
    shape = op.value("self").shape
    indexed = [d for d, index in enumerate(given) if index is not None]
    indices = [op.values[k].shape for k in op.positions("indices")]
    rank = max(map(len, indices))
    # Indices in neighbouring dims put their dims in place, others put them first.
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    start = indexed[0] if adjacent else 0
    full = op.outputs[0].shape[start : start + rank]
    found: Dims = tuple(dim_label(f"i{d}") for d in range(rank))
    source = numbered(shape, but=indexed)
    unindexed = [p for d, p in enumerate(source) if d not in indexed]
    out = (*unindexed[:start], *found, *unindexed[start:])
    inputs = (source, *(broadcast_dims(index, full, found) for index in indices))
    labels = OpLabels(inputs, (out,), linear=(frozenset({0}),))
    return (
        _exchanged(op, labels, op.positions("indices")) if _of_first_dims(op, indexed) else labels
    )


def _index_put(op: BoundOp) -> OpLabels | None:
    """self[..., index, ...] = or += values: indexed dims unsharded, the others labels. Where values
    are added, their dims are summed into self. One number goes to places of any dims."""
    given = op.get("indices")
    assert isinstance(given, tuple)
    if any(op.values[k].dtype == "bool" for k in op.positions("indices")):
        return None
    indexed = [d for d, index in enumerate(given) if index is not None]
    shape, values = op.value("self").shape, op.value("values").shape
    if not values and not op.get("accumulate", False):
        filled = numbered(shape, but=indexed)
        indices = (op.values[k].shape for k in op.positions("indices"))
        return OpLabels((filled, *((None,) * len(i) for i in indices), ()), (filled,))
    if not _of_first_dims(op, indexed) or len(values) != 1 + len(shape) - len(indexed):
        return None
    labels = numbered(shape, but=indexed)
    adds = op.get("accumulate", False) is True
    row = (dim_label("i"),) if adds else (None,)
    source = broadcast_dims(
        values, (values[0], *shape[len(indexed) :]), (*row, *labels[len(indexed) :])
    )
    last = len(op.values) - 1
    found = OpLabels(
        (labels, *(row,) * len(indexed), source),
        (labels,),
        summed=frozenset({"i"} if adds else ()),
        added=frozenset({0}),
        linear=(frozenset({0, last}),),
    )
    return _put(op, found, op.positions("indices"), "values")


def _put(op: BoundOp, found: OpLabels, indices: tuple[int, ...], rows: str) -> OpLabels:
    """The labels with one more way: rows exchanged to their owners."""
    return replace(
        found,
        special={ROWS: _exchange(op, indices, op.value(rows), "put_rows")},
        alternatives={ROWS: tuple(map(_rows_of, (*op.values, *op.outputs)))},
    )


def _gather(op: BoundOp) -> OpLabels | None:
    """self and index agree on the other dims, unsharded where index is shorter."""
    shape, index = op.value("self").shape, op.value("index").shape
    if len(index) != len(shape):
        return None
    dim = op.dim("dim", len(shape))
    shorter = [d for d in range(len(shape)) if shape[d] != index[d]]
    labels = numbered(shape, but=(dim, *shorter))
    own = (*labels[:dim], dim_label("i"), *labels[dim + 1 :]) if shape else ()
    return OpLabels((labels, own), (own,), linear=(frozenset({0}),))


def _index_add(op: BoundOp) -> OpLabels | None:
    """self [..., x, ...], index [i], source [..., i, ...]: adds rows; i is summed into self."""
    shape = op.value("self").shape
    if not shape:
        return None
    dim = op.dim("dim", len(shape))
    labels = numbered(shape, but=(dim,))
    source = (*labels[:dim], dim_label("i"), *labels[dim + 1 :])
    found = OpLabels(
        (labels, (dim_label("i"),), source),
        (labels,),
        summed=frozenset({"i"}),
        added=frozenset({0}),
        linear=(frozenset({0, 2}),),
    )
    return found if dim or len(op.value("index").shape) != 1 else _put(op, found, (1,), "source")


def _scatter(op: BoundOp) -> OpLabels:
    """self [..., x, ...], index and src [..., i, ...] -> self's dims: x and i are unsharded, and so
    are the other dims where index is shorter than self or src. A number as src adds nothing."""
    operands = [value.shape for value in op.values]
    shape = operands[0]
    dim = op.dim("dim", len(shape))
    shorter = [d for d in range(len(shape)) if len({other[d] for other in operands if other}) > 1]
    labels = numbered(shape, but=(dim, *shorter))
    with_src = op.has_tensor("src")
    linear = (frozenset({0, 2}),) if with_src else ()
    return OpLabels((labels,) * (3 if with_src else 2), (labels,), linear=linear)


def _scatter_add(op: BoundOp) -> OpLabels:
    """The same, but i may be sharded where no rank reads more than its share: it is summed."""
    plain = _scatter(op)
    labels, index = plain.inputs[0], op.value("index").shape
    if not index or op.value("src").shape != index:
        return plain
    dim = op.dim("dim", len(index))
    source = (*labels[:dim], dim_label("i"), *labels[dim + 1 :])
    return OpLabels(
        (labels, source, source),
        (labels,),
        summed=frozenset({"i"}),
        added=frozenset({0}),
        linear=plain.linear,
    )


def _scatter_reduce(op: BoundOp) -> OpLabels:
    """As scatter, with what meets in one place reduced: x and i are unsharded."""
    return replace(_scatter(op), linear=())


def _index_fill(op: BoundOp) -> OpLabels:
    """self [..., x, ...], index [i]: x is unsharded."""
    shape = op.value("self").shape
    labels = numbered(shape, but=(op.dim("dim", len(shape)),))
    return OpLabels((labels, (None,)), (labels,))


def _index_copy(op: BoundOp) -> OpLabels:
    """self [..., x, ...], index [i], source [..., i, ...]: x and i are unsharded."""
    return replace(_index_reduce(op), linear=(frozenset({0, 2}),))


def _index_reduce(op: BoundOp) -> OpLabels:
    """The same, where products or extremes of the rows are kept."""
    shape = op.value("self").shape
    labels = numbered(shape, but=(op.dim("dim", len(shape)),))
    return OpLabels((labels, (None,), labels), (labels,))


def _diagonal_scatter(op: BoundOp) -> OpLabels:
    """self [..., x, ..., y, ...], source [..., diagonal]: x, y and the diagonal are unsharded."""
    shape = op.value("self").shape
    square = op.dim("dim1", len(shape), 0), op.dim("dim2", len(shape), 1)
    labels = numbered(shape, but=square)
    source = (*(p for d, p in enumerate(labels) if d not in square), None)
    return OpLabels((labels, source), (labels,), linear=(frozenset({0, 1}),))


def _one_hot(op: BoundOp) -> OpLabels:
    """ids [...] -> [..., classes]; classes unsharded."""
    ids = numbered(op.value("self").shape)
    return OpLabels((ids,), ((*ids, None),))


EMBEDDING = "aten.embedding.default"

INDEX_RULES = {
    EMBEDDING: rule("weight indices padding_idx scale_grad_by_freq sparse", _embedding),
    "aten.index_select.default": rule("self dim index", _index_select),
    "aten.index.Tensor": rule("self indices", _index),
    "aten.gather.default": rule("self dim index sparse_grad", _gather),
    "aten.index_put.default": rule("self indices values accumulate", _index_put),
    "aten.index_add.default": rule("self dim index source alpha", _index_add),
    "aten.scatter.value": rule("self dim index value", _scatter),
    "aten.scatter.src": rule("self dim index src", _scatter),
    "aten.scatter_add.default": rule("self dim index src", _scatter_add),
    "aten.scatter_reduce.two": rule("self dim index src reduce include_self", _scatter_reduce),
    "aten.index_fill.int_Scalar": rule("self dim index value", _index_fill),
    "aten.index_copy.default": rule("self dim index source", _index_copy),
    "aten.index_reduce.default": rule("self dim index source reduce include_self", _index_reduce),
    "aten.diagonal_scatter.default": rule("self src offset dim1 dim2", _diagonal_scatter),
    "aten.one_hot.default": rule("self num_classes", _one_hot),
}
