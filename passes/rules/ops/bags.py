"""Rules of embedding_bag: rows of a table in bags (meshfold.ops.embedding_bag).

    table [v, o], ids [b, l] -> [b, o]      ids [n], offsets -> [b, o], b unsharded

Sharded by v, each rank adds the rows it has; a maximum needs all rows.
"""

from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    Special,
    dim_label,
    rule,
)

EMBEDDING_BAG = "meshfold.embedding_bag.default"
_MAX = 2


def _embedding_bag(op: BoundOp) -> OpLabels:
    ids = op.value("ids").shape
    has_rows = len(ids) == 2
    of_ids: Dims = (dim_label("b"), None) if has_rows else (None,)
    bag = dim_label("b") if has_rows else None
    rest: list[Dims] = []
    if op.has_tensor("offsets"):
        rest.append((None,))
    if op.has_tensor("weights"):
        rest.append(of_ids)
    adds = op.integer("mode") != _MAX
    row = dim_label("v") if adds else None
    linear = [frozenset({0})] if adds else []
    if op.has_tensor("weights"):
        linear.append(frozenset({op.position("weights")}))
    return OpLabels(
        ((row, dim_label("o")), of_ids, *rest),
        ((bag, dim_label("o")),),
        summed=frozenset({"v"} if adds else ()),
        linear=tuple(linear),
        special={"v": Special(local="embedding_bag")} if adds else {},
        pads=frozenset({"v"} if adds else ()),
        keeps_padding=frozenset({"o"}),
    )


BAG_RULES = {
    EMBEDDING_BAG: rule(
        "table ids offsets weights mode include_last_offset padding_idx", _embedding_bag
    ),
}
