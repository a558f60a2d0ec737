"""Buckets: what goes into them, and the copies in and out."""

import torch

from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.spmd import REPLICATE, Layout, parse_layout
from meshfold.passes.price.parameter_groups import changed_axes
from meshfold.sharding.layout import shard_of
from meshfold.zero.parameter_group import GroupBuffers, GroupMember, ParameterGroup

MESH = Mesh((MeshAxis("dp", 2), MeshAxis("tp", 2)))


def member(slot: int, shape: tuple[int, ...], stored: str, used: str) -> GroupMember:
    before, after = parse_layout(stored), parse_layout(used)
    return GroupMember(slot, f"p{slot}", shape, before, after, changed_axes(before, after)[1])


def local(x: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    return shard_of(x, layout, MESH.sizes, MESH.coords(rank))


def test_a_gather_bucket_round_trips_through_flat_buffers() -> None:
    members = (
        member(0, (8, 4), "S0/2,S0", "R,S0"),
        member(1, (6,), "S0,I", "R,I"),
        member(2, (4, 12), "S0,S1/3", "R,S1/3"),
    )
    group = ParameterGroup((0,), "float64", True, members)
    buffers = GroupBuffers(group, MESH.sizes)
    wholes = [torch.randn(m.shape, dtype=torch.float64) for m in members]

    def shards(rank: int) -> list[torch.Tensor]:
        return [local(x, m.stored, rank) for x, m in zip(wholes, members, strict=True)]

    for group in MESH.groups(("dp",)):
        parts = [buffers.pack_shards(shards(rank)) for rank in group]
        gathered = buffers.unpack_unsharded(torch.stack(parts))
        for x, m, whole in zip(wholes, members, gathered, strict=True):
            kept = tuple(t if t != REPLICATE else parse_layout("I")[0] for t in m.used)
            assert torch.equal(whole, local(x, kept, group[0]))
        flat = torch.empty(buffers.unsharded_numel, dtype=torch.float64)
        buffers.write_gradients(gathered, flat.view(buffers.num_shards, -1))
        assert torch.equal(flat, torch.cat(parts)), "a reduce-scatter hands every rank its shards"
        for rank, part in zip(group, flat.chunk(2), strict=True):
            for shard, back in zip(shards(rank), buffers.unpack_shards(part), strict=True):
                assert torch.equal(shard, back)


def test_a_missing_gradient_is_zero() -> None:
    members = (member(0, (4,), "I,I", "R,I"), member(1, (2, 2), "I,I", "R,I"))
    buffers = GroupBuffers(ParameterGroup((), "float32", True, members), MESH.sizes)
    rows = torch.full((1, 10), 7.0)
    buffers.write_gradients([None, torch.ones(2, 2)], rows[:, 1:9])
    assert rows.tolist() == [[7, 0, 0, 0, 0, 1, 1, 1, 1, 7]]
    # Added, it leaves what is there; the others are added in the dtype of the buffer.
    fine = torch.full((2, 2), 2**-10, dtype=torch.float64)
    buffers.write_gradients([None, fine], rows[:, 1:9], adds=True)
    buffers.write_gradients([torch.ones(4, dtype=torch.bfloat16), None], rows[:, 1:9], adds=True)
    assert rows.tolist() == [[7, 1, 1, 1, 1, *[1 + 2**-10] * 4, 7]]
    assert buffers.group.reduce == (0,)


def test_a_bucket_of_one_member_in_rows_needs_no_copy() -> None:
    buffers = GroupBuffers(
        ParameterGroup((0,), "float32", True, (member(0, (8, 4), "S0,I", "R,I"),)), MESH.sizes
    )
    flat = torch.arange(32.0)
    (whole,) = buffers.unpack_unsharded(flat.view(2, -1))
    assert whole.shape == (8, 4) and whole.data_ptr() == flat.data_ptr()
    shard = torch.ones(4, 4)
    assert buffers.pack_shards([shard]).data_ptr() == shard.data_ptr()


def test_where_a_member_is_in_memory_does_not_depend_on_what_is_beside_it() -> None:
    """One row per shard could be a view of a shared buffer. What autograd notes of a parameter in
    the forward is read in one that is gathered with others, or alone, in the backward."""
    alone = GroupBuffers(
        ParameterGroup((0,), "float32", True, (member(0, (2, 3, 4), "S0,I", "R,I"),)), MESH.sizes
    )
    shared = torch.arange(40.0).view(2, -1)
    (whole,) = alone.unpack_unsharded(shared[:, 5:17])
    assert torch.equal(whole, shared[:, 5:17].reshape(2, 3, 4))
    assert whole.is_contiguous() and whole.storage_offset() == 0
