"""Attention whose keys and values are sharded with its queries: where there is such a rule."""

from typing import Any

from support.graphs.ops import SingleOp
from support.graphs.tensors import real

from meshfold.ir.spmd import Shard
from meshfold.passes.rules.table import AxisRule, refined_rules, region_rules, rule_inside


def attention(rows: int, keys: int, **kwargs: Any) -> SingleOp:
    query, key = real(2, 4, rows, 4), real(2, 4, keys, 4)
    return SingleOp("aten.scaled_dot_product_attention.default", query, key, key, **kwargs)


def rings(op: SingleOp, size: int) -> list[AxisRule]:
    found = (
        refined_rules(op.graph, 0, rule, size) for rule in region_rules(op.graph, (size,))[0][0]
    )
    return [rule for of_rule in found for rule in of_rule]


def test_keys_are_sharded_beside_the_rule_that_shards_queries_and_asked_for_by_no_other() -> None:
    op = attention(8, 12)
    assert not any(r.name.startswith("ring") for r in region_rules(op.graph, (2,))[0][0])
    assert [(r.name, set(r.inputs), r.outputs) for r in rings(op, 2)] == [
        ("ring", {Shard(2)}, (Shard(2),))
    ]
    (ring,) = rings(op, 2)
    inside = rule_inside(op.graph, 0, ring, 2, 2)
    assert inside is not None and inside.name == "ring/2" and set(inside.inputs) == {Shard(2, 2)}
    # 12 keys do not divide over 8 ranks.
    assert rule_inside(op.graph, 0, ring, 2, 4) is None and rings(op, 8) == []


def test_attention_with_dropout_has_no_ring() -> None:
    assert rings(attention(8, 8, dropout_p=0.1), 2) == []


def test_a_causal_op_takes_as_long_as_its_last_rows() -> None:
    for causal, load in ((True, 2.0), (False, 1.0)):
        op = attention(8, 8, is_causal=causal)
        by_name = {r.name: r for r in (*region_rules(op.graph, (2,))[0][0], *rings(op, 2))}
        assert by_name["s"].load == by_name["ring"].load == load
        assert by_name["h"].load == 1.0
