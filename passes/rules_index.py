"""Rules of lookups by index: rows are found in a whole dim, or in a sharded one as a sum."""

from types import MappingProxyType

from meshfold.passes.rule_labels import (
    BoundOp,
    Dims,
    OpLabels,
    Special,
    broadcast_dims,
    numbered,
    part,
    rule,
)


def _embedding(op: BoundOp) -> OpLabels | None:
    """weight [v, o], ids [...] -> [..., o]. Sharded by v, each rank adds the rows it has."""
    if op.get("sparse") is True or op.get("scale_grad_by_freq") is True:
        return None
    ids = numbered(op.value("indices").shape)
    return OpLabels(
        ((part("v"), part("o")), ids),
        ((*ids, part("o")),),
        summed=frozenset({"v"}),
        special=MappingProxyType({"v": Special(local="embedding")}),
        pads=frozenset({"v"}),
        keeps_padding=frozenset({"o"}),
    )


def _index_select(op: BoundOp) -> OpLabels | None:
    """self [..., x, ...], index [i] -> [..., i, ...]"""
    shape = op.value("self").shape
    if not shape or len(op.value("index").shape) != 1:
        return None
    dim = op.dim("dim", len(shape))
    source = numbered(shape, but=(dim,))
    out = (*source[:dim], part("i"), *source[dim + 1 :])
    return OpLabels((source, (part("i"),)), (out,), linear=(frozenset({0}),))


def _index(op: BoundOp) -> OpLabels | None:
    """x[..., index, ...]: dims of the (broadcast) indices are labels, indexed dims are whole."""
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
    found: Dims = tuple(part(f"i{d}") for d in range(rank))
    source = numbered(shape, but=indexed)
    kept = [p for d, p in enumerate(source) if d not in indexed]
    out = (*kept[:start], *found, *kept[start:])
    inputs = (source, *(broadcast_dims(index, full, found) for index in indices))
    return OpLabels(inputs, (out,), linear=(frozenset({0}),))


def _gather(op: BoundOp) -> OpLabels:
    """self and index agree on the other dims, where index may be shorter: then they are whole."""
    shape, index = op.value("self").shape, op.value("index").shape
    dim = op.dim("dim", len(shape))
    shorter = [d for d in range(len(shape)) if shape[d] != index[d]]
    labels = numbered(shape, but=(dim, *shorter))
    own = (*labels[:dim], part("i"), *labels[dim + 1 :]) if shape else ()
    return OpLabels((labels, own), (own,), linear=(frozenset({0}),))


def _index_add(op: BoundOp) -> OpLabels:
    """self [..., x, ...], index [i], source [..., i, ...]: adds rows; i is summed into self."""
    shape = op.value("self").shape
    dim = op.dim("dim", len(shape))
    labels = numbered(shape, but=(dim,))
    source = (*labels[:dim], part("i"), *labels[dim + 1 :])
    return OpLabels(
        (labels, (part("i"),), source),
        (labels,),
        summed=frozenset({"i"}),
        added=frozenset({0}),
        linear=(frozenset({0, 2}),),
    )


def _scatter(op: BoundOp) -> OpLabels:
    """self [..., x, ...], index and src [..., i, ...] -> self's dims: x and i are whole, and so are
    the other dims where index is shorter than self or src. A value for all places adds nothing."""
    operands = [value.shape for value in op.values]
    shape = operands[0]
    dim = op.dim("dim", len(shape))
    shorter = [d for d in range(len(shape)) if len({other[d] for other in operands if other}) > 1]
    labels = numbered(shape, but=(dim, *shorter))
    with_src = op.has_tensor("src")
    linear = (frozenset({0, 2}),) if with_src else ()
    return OpLabels((labels,) * (3 if with_src else 2), (labels,), linear=linear)


def _scatter_add(op: BoundOp) -> OpLabels:
    """As scatter, but i may be sharded where no rank reads more than its part: it is summed."""
    plain = _scatter(op)
    labels, index = plain.inputs[0], op.value("index").shape
    if not index or op.value("src").shape != index:
        return plain
    dim = op.dim("dim", len(index))
    source = (*labels[:dim], part("i"), *labels[dim + 1 :])
    return OpLabels(
        (labels, source, source),
        (labels,),
        summed=frozenset({"i"}),
        added=frozenset({0}),
        linear=plain.linear,
    )


def _one_hot(op: BoundOp) -> OpLabels:
    """ids [...] -> [..., classes]; classes whole."""
    ids = numbered(op.value("self").shape)
    return OpLabels((ids,), ((*ids, None),))


INDEX_RULES = {
    "aten.embedding.default": rule(
        "weight indices padding_idx scale_grad_by_freq sparse", _embedding
    ),
    "aten.index_select.default": rule("self dim index", _index_select),
    "aten.index.Tensor": rule("self indices", _index),
    "aten.gather.default": rule("self dim index sparse_grad", _gather),
    "aten.index_add.default": rule("self dim index source alpha", _index_add),
    "aten.scatter.value": rule("self dim index value", _scatter),
    "aten.scatter.src": rule("self dim index src", _scatter),
    "aten.scatter_add.default": rule("self dim index src", _scatter_add),
    "aten.one_hot.default": rule("self num_classes", _one_hot),
}
