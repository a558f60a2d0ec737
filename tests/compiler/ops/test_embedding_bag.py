"""Bags of rows against torch's own, and by hand."""

import pytest
import torch
from torch.nn import functional

from meshfold.ops.embedding_bag import MODES, bags

TABLE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])


def test_sums_means_and_maxima_by_hand() -> None:
    ids = torch.tensor([[0, 1], [2, 2]])
    assert bags(TABLE, ids, mode=0).tolist() == [[4.0, 6.0], [10.0, 14.0]]
    assert bags(TABLE, ids, mode=1).tolist() == [[2.0, 3.0], [5.0, 7.0]]
    assert bags(TABLE, ids, mode=2).tolist() == [[3.0, 4.0], [5.0, 7.0]]
    assert bags(TABLE, ids, mode=1, padding_idx=1).tolist() == [[1.0, 2.0], [5.0, 7.0]]


def test_a_bag_without_rows_is_zero() -> None:
    found = bags(TABLE, torch.tensor([0, 2]), torch.tensor([0, 0, 2]), include_last_offset=True)
    assert found.tolist() == [[0.0, 0.0], [6.0, 9.0]]


@pytest.mark.parametrize("mode", range(len(MODES)))
def test_the_op_is_torchs(mode: int) -> None:
    ids, offsets = torch.tensor([2, 0, 1, 1]), torch.tensor([0, 3])
    table = TABLE.double().requires_grad_()
    found = torch.ops.meshfold.embedding_bag(table, ids, offsets, None, mode, False, -1)
    expected = functional.embedding_bag(ids, table, offsets, mode=MODES[mode])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (own,) = torch.autograd.grad(found.square().sum(), table)
    (other,) = torch.autograd.grad(expected.square().sum(), table)
    torch.testing.assert_close(own, other, rtol=0, atol=0)
