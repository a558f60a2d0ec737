"""Which dims of bags may be sharded. That each rule is right is tested with all others, in
tests/passes/rules/test_table.py."""

import pytest
import torch
from support.graphs.ops import SingleOp
from support.graphs.tensors import real, whole

from meshfold.ir.spmd import PARTIAL, Shard

OFFSETS = torch.tensor([0, 3, 5, 20])


@pytest.mark.parametrize(("mode", "dims"), [(0, {0, 1}), (1, {0, 1}), (2, {1})])
def test_rows_are_shared_where_bags_add_up(mode: int, dims: set[int]) -> None:
    op = SingleOp("meshfold.embedding_bag.default", real(24, 12), whole(24, 4, 5), None, None, mode)
    rules = op.axis_rules(2)
    assert {r.inputs[0].dim for r in rules if r.inputs[0].is_shard} == dims
    by_rows = [r for r in rules if r.inputs[0].is_shard and r.inputs[0].dim == 0]
    assert all(r.outputs == (PARTIAL,) for r in by_rows)


def test_bags_are_shared_where_they_are_rows_of_ids() -> None:
    rows = SingleOp("meshfold.embedding_bag.default", real(24, 12), whole(24, 4, 5))
    runs = SingleOp("meshfold.embedding_bag.default", real(24, 12), whole(24, 20), OFFSETS)
    for op, is_shared in ((rows, True), (runs, False)):
        assert any(r.inputs[1] == Shard(0) for r in op.axis_rules(2)) == is_shared
