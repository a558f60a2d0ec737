"""Arguments that depend on sharded dims, before and after; everything else stays as it is."""

import sys

import pytest
from support.graphs.ops import SingleOp
from support.graphs.tensors import real

from meshfold.ir.op_graph import Arg, Ref
from meshfold.passes.rules.localize import localize
from meshfold.passes.rules.ops.collective_matmul import MATMUL_REDUCE_SCATTER
from meshfold.passes.rules.table import typing_of

CASES: list[tuple[SingleOp, str, tuple[Arg, ...]]] = [
    (SingleOp("aten.view.default", real(4, 6, 24), [24, -1]), "d0", (Ref(0), (12, 24))),
    (SingleOp("aten.view.default", real(4, 6, 24), [24, -1]), "I", (Ref(0), (24, 24))),
    (SingleOp("aten.expand.default", real(4, 1), [-1, 6]), "d1", (Ref(0), (4, 3))),
    (SingleOp("aten.unflatten.int", real(4, 6), -1, [3, 2]), "d0", (Ref(0), -1, (3, 2))),
    (SingleOp("aten.unflatten.int", real(4, 12), -1, [6, 2]), "d1", (Ref(0), -1, (3, 2))),
    (SingleOp("aten.split.Tensor", real(4, 12), 6, 1), "d1/2", (Ref(0), 3, 1)),
    (SingleOp("aten.split.Tensor", real(4, 12), 5, 1), "d0", (Ref(0), 5, 1)),
    (SingleOp("aten.split_with_sizes.default", real(12), [6, 6]), "d0/2", (Ref(0), (3, 3))),
    (SingleOp("aten.slice.Tensor", real(4, 12), 0, 0, 4), "d0", (Ref(0), 0, 0, sys.maxsize)),
    (SingleOp("aten.slice.Tensor", real(4, 12), 1, 0, 8, 2), "d0", (Ref(0), 1, 0, 8, 2)),
    (SingleOp("aten.slice.Tensor", real(4, 12)), "d0", (Ref(0),)),
    (SingleOp("aten.relu.default", real(4, 12)), "d0", (Ref(0),)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].target}-{c[1]}")
def test_positional_arguments(case: tuple[SingleOp, str, tuple[Arg, ...]]) -> None:
    op, name, expected = case
    (rule,) = [r for r in op.axis_rules(2) if r.name == name]
    assert localize(op.graph, 0, typing_of(op.graph, 0, (rule,)), (2,)) == (expected, ())


def test_keyword_arguments() -> None:
    op = SingleOp("aten.repeat_interleave.self_int", real(4, 6), 3, 1, output_size=18)
    (rule,) = [r for r in op.axis_rules(2) if r.name == "d1"]
    _, kwargs = localize(op.graph, 0, typing_of(op.graph, 0, (rule,)), (2,))
    assert kwargs == (("output_size", 9),)


def test_two_axes() -> None:
    op = SingleOp("aten.view.default", real(4, 6, 24), [24, -1])
    rules = {r.name: r for r in op.axis_rules(2)}
    typing = typing_of(op.graph, 0, (rules["d0"], rules["d1"]))
    args, _ = localize(op.graph, 0, typing, (2, 2))
    assert args == (Ref(0), (12, 12))


@pytest.mark.parametrize(
    ("rows", "blocks"), [("d0", 1), ("d0/4", 2), ("I", 2)], ids=["above", "below", "not sharded"]
)
def test_blocks_of_rows_in_a_ring_are_those_of_a_rank(rows: str, blocks: int) -> None:
    """Two blocks of rows, which the first axis shards above them or below."""
    op = SingleOp(MATMUL_REDUCE_SCATTER, real(16, 6), real(4, 6), None, 0, [2, 1], False, 1)
    (typing,) = [t for t in op.typings(2, 2) if t.rules == (rows, "ring/2")]
    args, _ = localize(op.graph, 0, typing, (2, 2))
    assert args[4] == (blocks, 1)


def test_blocks_without_a_ring_are_those_of_all_rows() -> None:
    op = SingleOp(MATMUL_REDUCE_SCATTER, real(16, 6), real(4, 6), None, 0, [2, 1], False, 1)
    (typing,) = [t for t in op.typings(2, 2) if t.rules == ("d0", "I")]
    assert localize(op.graph, 0, typing, (2, 2)) == (op.graph.ops[0].args, ())
