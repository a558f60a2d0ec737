"""Emission of ops: readable nodes, arguments bound per instance, refusals. Numbers are checked by
tests/passes/rules/test_table.py."""

import operator

import pytest
import torch
from support.graphs.ops import SingleOp, mesh_of
from support.graphs.tensors import real, whole
from torch import fx

from meshfold.codegen.emit.op import emit_op
from meshfold.codegen.emit.op_context import OpContext
from meshfold.errors import UnsupportedOpError
from meshfold.ir.op_graph import Arg, Hole, Op, OpGraph, Ref, Slot, SlotKind, Symbol, Value
from meshfold.passes.rules.table import region_rules, typing_of


def nodes_of(op: SingleOp, *rules: str) -> list[fx.Node]:
    """The call nodes of an op under one rule per axis of 2 ranks."""
    (typing,) = [t for t in op.typings(*[2] * len(rules)) if t.rules == rules]
    module = op.emitted(typing, mesh_of(*[2] * len(rules)))
    return [n for n in module.graph.nodes if n.op == "call_function"]


def names(nodes: list[fx.Node]) -> list[str]:
    return [n.name for n in nodes]


def test_a_plain_rule_is_the_torch_op_on_local_sizes() -> None:
    (node,) = nodes_of(SingleOp("aten.view.default", real(4, 6, 12), [24, 12]), "d0")
    assert node.target is torch.ops.aten.view.default
    assert node.args[1] == [12, 12]


def test_chunks_are_taken_from_the_list() -> None:
    nodes = nodes_of(SingleOp("aten.split.Tensor", real(4, 12), 6, 1), "d1/2")
    assert names(nodes) == ["split_tensor", "getitem", "getitem_1"]
    assert nodes[1].target is operator.getitem


def test_a_mean_over_a_sharded_dim_is_divided_by_its_axes() -> None:
    nodes = nodes_of(SingleOp("aten.mean.dim", real(4, 12), [1]), "d0", "d1")
    assert names(nodes) == ["mean_dim", "divide_by_ranks"]
    assert nodes[1].args[2] == ("tp",)


def test_two_axes_meet_in_one_cross_entropy() -> None:
    op = SingleOp("aten.cross_entropy_loss.default", real(8, 12), whole(12, 8))
    (node,) = nodes_of(op, "d0", "v")
    assert node.args[-3:] == (12, (("tp", 1, 0),), ("dp",))


def test_attention_is_the_torch_op_unless_heads_or_rows_need_more() -> None:
    name = "aten.scaled_dot_product_attention.default"
    query, key = real(2, 4, 4, 3), real(2, 1, 4, 3)
    plain = SingleOp(name, query, query, query, None, 0.0, True)
    assert names(nodes_of(plain, "h")) == ["scaled_dot_product_attention_default"]
    assert names(nodes_of(plain, "s")) == ["attention"]
    one_key_head = SingleOp(name, query, key, key, None, 0.0, True, enable_gqa=True)
    assert names(nodes_of(one_key_head, "h")) == ["scaled_dot_product_attention_default"]


def test_evaluation_draws_nothing() -> None:
    assert names(nodes_of(SingleOp("aten.dropout.default", real(4, 4), 0.5, False), "d0")) == [
        "dropout_default"
    ]


def graph_of(target: str, *args: Arg, **kwargs: Arg) -> OpGraph:
    value = Value((4, 4), "float64", True)
    op = Op(target, args, tuple(kwargs.items()), (1,))
    return OpGraph((Slot(SlotKind.VALUE),), (value, value), (op,), (1,))


def emitted(op_graph: OpGraph) -> fx.Graph:
    mesh = mesh_of(2)
    graph = fx.Graph()
    context_node, x, hole = (graph.placeholder(n) for n in ("context", "x", "hole"))
    rules = region_rules(op_graph, (2,))[0][0]
    typing = typing_of(op_graph, 0, (rules[0],))
    graph.output(emit_op(OpContext(graph, context_node, op_graph, 0, typing, [x], mesh, 0, [hole])))
    return graph


def test_floats_of_an_instance_devices_and_dtypes() -> None:
    symbols: dict[str, Arg] = {
        "device": Symbol("device", "cuda"),
        "dtype": Symbol("dtype", "float32"),
        "layout": Symbol("layout", "strided"),
    }
    graph = emitted(graph_of("aten.full_like.default", Ref(0), Hole(0), **symbols))
    node = next(n for n in graph.nodes if n.name == "full_like_default")
    assert str(node.args[1]) == "hole"
    device = node.kwargs["device"]
    assert isinstance(device, fx.Node) and device.target is getattr
    assert node.kwargs["dtype"] == torch.float32
    assert node.kwargs["layout"] == torch.strided


@pytest.mark.parametrize("target", ["aten.bernoulli.default", "aten.rand_like.default"])
def test_random_numbers_that_ranks_would_not_agree_on_are_refused(target: str) -> None:
    with pytest.raises(UnsupportedOpError, match=f"{target} draws random numbers") as caught:
        emitted(graph_of(target, Ref(0)))
    assert caught.value.op == target


def test_an_op_that_torch_lacks_is_named() -> None:
    with pytest.raises(UnsupportedOpError, match="aten.no_such.default"):
        emitted(graph_of("aten.no_such.default", Ref(0)))
