"""ShardIndices of ranks on sharded dims, beyond their end, too."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.ops import mesh_of
from support.processes.ranks import run_on_simulated_ranks

from meshfold.distributed.step_context import StepContext
from meshfold.sharding.indices import ShardDigits, key_heads_of, shard_indices_of_microbatch
from meshfold.sharding.slicing import local_indices, shard

DP, TP = 2, 3


def places(
    num_heads: int, digits: ShardDigits, num_key_heads: int, key_digits: ShardDigits
) -> list[list[int]]:
    found = run_on_simulated_ranks(
        mesh_of(4), lambda mesh: key_heads_of(mesh, num_heads, digits, num_key_heads, key_digits)
    )
    return [place.tolist() for place in found]


def test_query_heads_find_their_key_heads() -> None:
    assert places(8, (("dp", 1, 0),), 4, (("dp", 1, 0),)) == [[0, 0]] * 4
    assert places(8, (("dp", 1, 0),), 2, ()) == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_padding_takes_a_key_head_that_is_there() -> None:
    """Two or three query heads on four ranks."""
    assert places(2, (("dp", 1, 1),), 1, ()) == [[0]] * 4
    assert places(6, (("dp", 1, 2),), 3, ()) == [[0, 0], [1, 1], [2, 2], [2, 2]]


@given(
    blocks=st.integers(1, 3),
    parts=st.integers(1, 4),
    heads=st.sampled_from([0, 3, 6]),
    microbatch=st.integers(0, 3),
    rank=st.integers(0, DP * TP - 1),
    own_parts=st.booleans(),
    is_cut=st.booleans(),
)
def test_a_microbatch_holds_rows_of_the_whole_batch(
    blocks: int,
    parts: int,
    heads: int,
    microbatch: int,
    rank: int,
    own_parts: bool,
    is_cut: bool,
) -> None:
    """A dim of [blocks, batch, heads]: the batch cut into microbatches and over dp (or gathered
    again), heads over tp."""
    mesh, number = mesh_of(DP, TP), microbatch % parts
    dp, tp = mesh.coords(rank)
    batch = parts * DP * 2
    rows = torch.arange(blocks * batch * max(heads, 1)).reshape(blocks, batch, -1)

    def of_rank(own: int) -> torch.Tensor:
        if own_parts:
            return shard(shard(rows, 1, 1, DP, own), 1, 1, parts, number)
        return shard(shard(rows, 1, 1, parts, number), 1, 1, DP, own)

    held = of_rank(dp) if is_cut else torch.cat([of_rank(k) for k in range(DP)], 1)
    digits: ShardDigits = (("dp", blocks, 0),) if is_cut else ()
    if heads:
        held = shard(held, 2, 1, TP, tp)
        digits += (("tp", blocks * batch // parts, 0),)
    rank_mesh: Any = SimpleNamespace(
        size=lambda axes: {"dp": DP, "tp": TP}[axes[0]],
        coord=lambda axis: {"dp": dp, "tp": tp}[axis],
    )
    context = StepContext(rank_mesh, microbatch=number, slices_own_batch=own_parts)
    places = shard_indices_of_microbatch(context, digits, blocks, parts)
    assert local_indices(rows.numel(), places, torch.device("cpu")).equal(held.flatten())
