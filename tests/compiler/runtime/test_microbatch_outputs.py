"""Outputs of microbatches, put together as those of the batch."""

import torch

from meshfold.ir.spmd import INVARIANT, PARTIAL, Shard
from meshfold.runtime.microbatch_outputs import MicrobatchOutputs

BATCH = torch.arange(24.0).reshape(8, 3)


def test_samples_are_joined_in_order_and_summands_added_up() -> None:
    outputs = MicrobatchOutputs([Shard(0), Shard(1), PARTIAL, INVARIANT], 1)
    for j in (1, 0):
        rows = BATCH[4 * j : 4 * j + 4]
        outputs.add(j, [rows, rows.T, rows.sum(), torch.ones(2)])
    rows, columns, total, same = outputs.whole()
    assert torch.equal(rows, BATCH) and torch.equal(columns, BATCH.T)
    assert total == BATCH.sum() and torch.equal(same, torch.ones(2))


def test_microbatches_of_slices_come_in_the_order_of_the_batch() -> None:
    """Two ranks have four rows each; microbatch j of both has rows 2j, 2j + 1 of each slice."""
    outputs = MicrobatchOutputs([Shard(0)], 2)
    slices = BATCH.split(4)
    for j in range(2):
        outputs.add(j, [torch.cat([part[2 * j : 2 * j + 2] for part in slices])])
    assert torch.equal(outputs.whole()[0], BATCH)
