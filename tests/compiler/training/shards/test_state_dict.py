"""Layouts in which state is saved, and what load refuses. Round trips are in test_end_to_end."""

import pytest
import torch
from support.processes.ranks import run_on_simulated_ranks
from torch.distributed.tensor import Replicate, Shard

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.errors import OptionError
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.spmd import is_legal, parse_layout
from meshfold.sharding.layout import shard_of
from meshfold.torch_compat.dtensor import checkpoint_layout, drop_axes, placements_of
from meshfold.training.shards.state_dict import StateExchange, StoredTensor

MESH = Mesh((MeshAxis("dp", 2), MeshAxis("tp", 2)))


@pytest.mark.parametrize(
    ("stored", "saved"),
    [
        ("I,S0", "I,S0"),
        ("S0,S1", "S0,S1"),
        ("S0,S0/2", "S0,S0/2"),  # left to right, as DTensor nests
        ("S0/2,S0", "S0/2,S0"),  # right to left, as fully_shard does
        ("I,S1/3", "I,S1"),  # fused qkv: three pieces a rank
        ("S0/6,S0/3", "S0,S0/2"),
        ("S0/4,S0", "S0,S0/2"),
    ],
)
def test_every_rank_saves_one_consecutive_piece(stored: str, saved: str) -> None:
    found = checkpoint_layout(parse_layout(stored), MESH.sizes)
    assert found == parse_layout(saved)
    assert checkpoint_layout(found, MESH.sizes) == found
    assert is_legal((24, 24), found, MESH.sizes)
    x = torch.arange(24 * 24).reshape(24, 24)
    for rank in range(4):
        part = shard_of(x, found, MESH.sizes, MESH.coords(rank))
        rows, columns = part[:, 0] // 24, part[0] % 24
        assert torch.all(rows.diff() == 1) and torch.all(columns.diff() == 1)


def test_placements_say_the_layout_to_dtensor() -> None:
    assert placements_of(parse_layout("I,S1"), MESH.sizes) == (Replicate(), Shard(1))
    strided, plain = placements_of(parse_layout("S0/2,S0"), MESH.sizes)
    assert plain == Shard(0)
    assert (strided.dim, strided.split_factor) == (0, 2)  # type: ignore[attr-defined]


def test_axes_of_one_rank_are_left_out() -> None:
    assert drop_axes(parse_layout("S0,I,R"), (2, 1, 4)) == (parse_layout("S0,R"), (2, 4))


@pytest.mark.parametrize("layout", ["S0/6,S0/3", "I,S1/3", "S0,S1", "S0+,S1/3"])
def test_full_tensors_come_back_whole(layout: str) -> None:
    stored = {"w": StoredTensor((24, 24), parse_layout(layout))}
    whole = torch.arange(24.0 * 24).reshape(24, 24)

    def body(mesh: RankMesh) -> bool:
        exchange = StateExchange(mesh, stored)
        local = exchange.inside("w", whole)
        return torch.equal(exchange.full("w", local), whole)

    assert all(run_on_simulated_ranks(MESH, body))


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    stored = {"w": StoredTensor((24, 24), parse_layout("S0,I"))}

    def body(mesh: RankMesh) -> None:
        with pytest.raises(
            OptionError, match=r"w has shape \[24, 24\], the state given \[12, 24\]"
        ):
            StateExchange(mesh, stored).inside("w", torch.zeros(12, 24))

    run_on_simulated_ranks(MESH, body)
