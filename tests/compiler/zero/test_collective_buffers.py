"""Groups in one flat buffer: their columns unsharded, their shards."""

import torch

from meshfold.zero.collective_buffers import CollectiveBuffer, consecutive_ranges


def test_ranges_follow_each_other() -> None:
    assert consecutive_ranges([2, 0, 3]) == ((0, 2), (2, 2), (2, 5))


def test_groups_have_columns_of_their_own() -> None:
    buffer = CollectiveBuffer(2, [((0, 0), 3), ((1, 0), 2)])
    flat = torch.arange(buffer.numel)
    assert buffer.columns(flat, (0, 0)).tolist() == [[0, 1, 2], [5, 6, 7]]
    assert buffer.columns(flat, (1, 0)).tolist() == [[3, 4], [8, 9]]
    assert buffer.shards(flat[:5], (1, 0)).tolist() == [3, 4]
