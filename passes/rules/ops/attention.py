"""Rules of scaled dot-product attention: batch, heads and query rows are labels.

query [..., h, s, e], key and value [..., g, t, e], mask broadcast to [..., h, s, t]. With grouped
queries (g key heads serve h query heads) key heads are sharded with the query heads while g
divides; beyond that each rank picks its key heads from all. Where the heads do not divide, padded:
query heads with a granularity of those that share a key head, or one by one beside unsharded key
heads. A mask of flags must not have heads then: beyond the end it would leave a query without keys.

Two rules shard query rows. "s" takes keys and values unsharded. "ring" has each rank's rows of
them, too, and passes them round inside the op (meshfold.ops.ring_attention): what is saved and what
is sent at once is a rank's share. Under a causal mask both take as long as the last rank, which
sees all keys, while the work of the op is half of the square.
"""

import math
from collections.abc import Sequence

from meshfold.ir.op_graph import Arg, Op, Ref
from meshfold.passes.rules.ops.labels import (
    SHIFT,
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

RING = "ring"
RING_ATTENTION = "meshfold.ring_attention.default"
CAUSAL_LOAD = 2.0
"""Work of the rank with the last rows over the mean: 2 - 1 / n on n ranks."""


def _attention(op: BoundOp) -> OpLabels | None:
    query, key = op.value("query").shape, op.value("key").shape
    if len(query) < 3 or len(key) != len(query):
        return None
    leading: Dims = numbered(query[:-2])
    if len(query) > 3:
        leading = (*leading[:-1], dim_label("h"))
    rows: Dims = (*leading, dim_label("s"), None)
    inputs = [rows, (*leading, None, None), (*leading, None, None)]
    if op.has_tensor("attn_mask"):
        scores = (*query[:-1], key[-2])
        inputs.append(broadcast_dims(op.value("attn_mask").shape, scores, rows))
    flags = op.has_tensor("attn_mask") and not op.value("attn_mask").is_float
    masked = flags and dim_label("h") in inputs[-1]
    grouped = len(query) > 3 and query[-3] != key[-3]
    drops = op.get("dropout_p", 0.0) != 0.0
    load = CAUSAL_LOAD if op.get("is_causal", False) else 1.0
    return OpLabels(
        tuple(inputs),
        (rows,),
        unsharded_if_uneven={"h": frozenset({1, 2})} if grouped else {},
        special={"s": Special(load=load), RING: Special(comm=_passes(op), load=load)},
        refinements={} if drops else {RING: ("s", _around(inputs, rows))},
        heads=frozenset() if masked or len(query) < 4 else frozenset({"h"}),
        local="attention",
    )


def _around(inputs: list[Dims], rows: Dims) -> tuple[Dims, ...]:
    """Dims of the ring: rows of query, key, value, mask and result."""
    ring: Dims = (*(None,) * (len(rows) - 2), dim_label(RING), None)
    mask = (tuple(dim_label(RING) if p == ("s", 1) else None for p in dims) for dims in inputs[3:])
    return (ring, ring, ring, *mask, ring)


def _passes(op: BoundOp) -> tuple[RuleComm, ...]:
    """Key and value of all ranks in flight; in backward once more, with gradients behind them
    (meshfold.passes.price.op_time)."""
    num_bytes = sum(op.value(name).num_bytes for name in ("key", "value"))
    return RuleComm(SHIFT, num_bytes), RuleComm(SHIFT, num_bytes, is_backward=True)


def ring_call(op: Op, rules: Sequence[str], sizes: Sequence[int]) -> tuple[Arg, ...] | None:
    """Arguments of RING_ATTENTION, which does on local tensors what the busiest rank does where
    these rules of an op, by axis, have keys and values go round; None where they do not."""
    if op.target not in ATTENTION_RULES or RING not in (name.partition("/")[0] for name in rules):
        return None
    pairs = zip(rules, sizes, strict=True)
    num_ranks = math.prod(n for name, n in pairs if name.partition("/")[0] == RING)
    given = dict(zip(_PARAMETERS.split(), op.args, strict=False)) | dict(op.kwargs)
    mask = Ref(3) if isinstance(given.get("attn_mask"), Ref) else None
    return (Ref(0), Ref(1), Ref(2), mask, given.get("is_causal", False), num_ranks)


_PARAMETERS = "query key value attn_mask dropout_p is_causal scale enable_gqa"

ATTENTION_RULES = {
    "aten.scaled_dot_product_attention.default": rule(_PARAMETERS, _attention),
}
