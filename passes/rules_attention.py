"""Rules of scaled dot-product attention: batch, heads and query rows are labels.

query [..., h, s, e], key and value [..., g, t, e], mask broadcast to [..., h, s, t]. With grouped
queries (g key heads serve h query heads) key heads are sharded with the query heads while g
divides; beyond that each rank picks its key heads from the whole. Where the heads do not divide,
padded: query heads in units of those that share a key head. A mask of flags must not have heads
then: beyond the end it would leave a query without keys.
"""

from types import MappingProxyType

from meshfold.passes.rule_labels import (
    BoundOp,
    Dims,
    OpLabels,
    broadcast_dims,
    numbered,
    part,
    rule,
)


def _attention(op: BoundOp) -> OpLabels | None:
    query, key = op.value("query").shape, op.value("key").shape
    if len(query) < 3 or len(key) != len(query):
        return None
    leading: Dims = numbered(query[:-2])
    if len(query) > 3:
        leading = (*leading[:-1], part("h"))
    rows: Dims = (*leading, part("s"), None)
    inputs = [rows, (*leading, None, None), (*leading, None, None)]
    if op.has_tensor("attn_mask"):
        scores = (*query[:-1], key[-2])
        inputs.append(broadcast_dims(op.value("attn_mask").shape, scores, rows))
    flags = op.has_tensor("attn_mask") and not op.value("attn_mask").is_float
    masked = flags and part("h") in inputs[-1]
    grouped = len(query) > 3 and query[-3] != key[-3]
    return OpLabels(
        tuple(inputs),
        (rows,),
        whole_if_odd=MappingProxyType({"h": frozenset({1, 2})} if grouped else {}),
        heads=frozenset() if masked or len(query) < 4 else frozenset({"h"}),
        local="attention",
    )


ATTENTION_RULES = {
    "aten.scaled_dot_product_attention.default": rule(
        "query key value attn_mask dropout_p is_causal scale enable_gqa", _attention
    ),
}
