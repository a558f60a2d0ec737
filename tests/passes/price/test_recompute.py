"""What is recomputed: the tables against autograd, and prefixes of graphs by hand."""

from dataclasses import replace

import pytest
import torch
from support.graphs.op_graphs import GraphBuilder, mlp, three_heads
from support.graphs.ops import mesh_of, whole_typing
from support.graphs.samples import SAMPLES, Sample
from support.programs.memory import EchoMesh

from meshfold.distributed.step_context import StepContext
from meshfold.ir.op_graph import OpGraph, Ref
from meshfold.passes.price.recompute import (
    KEEPS_NOTHING,
    KEEPS_OPERANDS,
    RecomputedPrefix,
    recomputed_prefix,
)

LISTED = [s for s in SAMPLES if f"aten.{s[0]}" in KEEPS_NOTHING | KEEPS_OPERANDS]


def test_every_listed_op_has_a_sample() -> None:
    assert {f"aten.{name}" for name, _ in LISTED} == KEEPS_NOTHING | KEEPS_OPERANDS


@pytest.mark.parametrize("sample", LISTED, ids=[name for name, _ in LISTED])
def test_the_tables_say_what_autograd_keeps(sample: Sample) -> None:
    name, make = sample
    op = make()
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    mesh = mesh_of(1)
    module = op.emitted(whole_typing(op, 1), mesh)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(StepContext(EchoMesh(mesh, 0, torch.device("cpu"))), *op.tensors)
    operands = {t.untyped_storage().data_ptr() for t in op.tensors}
    assert set(kept) <= (set() if f"aten.{name}" in KEEPS_NOTHING else operands)
    # Sharded, they are the same op on smaller tensors, or on views of them.
    assert {rule.local for rule in op.axis_rules(2)} <= {"plain", "reshape", "valid_rows"}


def test_a_product_at_the_end_is_prepared_but_not_run() -> None:
    # linear, relu, linear: the last keeps its operands.
    assert recomputed_prefix(mlp()) == RecomputedPrefix(num_ops=2, num_prepared=3)
    # The sum behind it keeps nothing.
    assert recomputed_prefix(mlp(residual=True)) == RecomputedPrefix(num_ops=2, num_prepared=3)
    # Of three products the last one.
    assert recomputed_prefix(three_heads()) == RecomputedPrefix(num_ops=3, num_prepared=4)


def test_an_op_that_saves_its_result_is_recomputed() -> None:
    b = GraphBuilder()
    x = b.slot(4, 8)
    assert recomputed_prefix(b.build(b.add(b.relu(x), x))) == RecomputedPrefix(1, 1)


def test_an_unlisted_op_counts_as_if_it_saved_its_result() -> None:
    b = GraphBuilder()
    x = b.slot(4, 8)
    assert recomputed_prefix(
        b.build(b.op("cumsum.default", (Ref(b.relu(x)), 0), (4, 8)))
    ) == RecomputedPrefix(2, 2)


def test_nothing_is_recomputed_where_nothing_is_saved() -> None:
    b = GraphBuilder()
    x = b.slot(4, 8)
    assert recomputed_prefix(b.build(b.add(x, x))) == RecomputedPrefix(0, 0)
    graph = mlp()
    values = tuple(replace(v, requires_grad=False) for v in graph.values)
    assert recomputed_prefix(
        OpGraph(graph.slots, values, graph.ops, graph.outputs)
    ) == RecomputedPrefix(0, 0)
