"""Rows of a sharded buffer, written and read by ranks that each have some of the indices."""

import pytest
import torch
from support.graphs.ops import mesh_of
from support.processes.ranks import ThreadMesh, run_on_simulated_ranks
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ops.distributed_index import put_rows, take_rows
from meshfold.sharding.indices import ShardDigits, shard_indices_of
from meshfold.sharding.slicing import local_indices

SIZE, ROWS, WIDTH = 24, 40, 3
DIGITS: dict[str, ShardDigits] = {
    "one axis": (("dp", 1, 0),),
    "in blocks": (("dp", 3, 0),),
    "two axes": (("dp", 1, 0), ("tp", 2, 0)),
    "the inner axis first": (("dp", 4, 0), ("tp", 1, 0)),
}
INDICES = {
    "mixed": torch.arange(ROWS) * 7 % SIZE,
    "all to one rank": torch.full((ROWS,), 5),
    "from the end": -1 - torch.arange(ROWS) * 5 % SIZE,
}


def whole_tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (SIZE, 2, WIDTH), (ROWS, WIDTH)
    buffer, rows = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shape)
    return buffer, rows


@pytest.mark.parametrize("digits", DIGITS)
@pytest.mark.parametrize("index", INDICES)
def test_rows_reach_their_places_and_gradients_come_back(digits: str, index: str) -> None:
    buffer, rows = whole_tensors()
    first, second = INDICES[index], torch.arange(ROWS) % 2
    whole = [t.clone().requires_grad_() for t in (buffer, rows)]
    filled = whole[0].index_put((first, second), 2.0 * whole[1], accumulate=True)
    taken = filled[first, second]
    gradients = torch.autograd.grad((taken * rows).sum(), whole)

    def body(mesh: RankMesh) -> list[tuple[Tensor, Tensor]]:
        places = shard_indices_of(mesh, DIGITS[digits])
        held = local_indices(SIZE, places, mesh.device)
        # Indices are cut over both axes, whichever of them the buffer knows.
        mine = torch.arange(ROWS).chunk(mesh.mesh.num_ranks)[mesh.rank]
        indices = [first[mine], second[mine]]
        local = [buffer[held].requires_grad_(), rows[mine].requires_grad_()]
        with torch.enable_grad():
            put = put_rows(
                StepContext(mesh), local[0], indices, local[1], True, 2.0, SIZE, DIGITS[digits]
            )
            got = take_rows(StepContext(mesh), put, indices, SIZE, DIGITS[digits])
            found = torch.autograd.grad((got * rows[mine]).sum(), local)
        return [
            (put.detach(), filled.detach()[held]),
            (got.detach(), taken.detach()[mine]),
            (found[0], gradients[0][held]),
            (found[1], gradients[1][mine]),
        ]

    mesh = mesh_of(4) if len(DIGITS[digits]) == 1 else mesh_of(2, 2)
    for pairs in run_on_simulated_ranks(mesh, body):
        for made, expected in pairs:
            torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


def test_what_is_put_without_adding_replaces_what_was_there() -> None:
    buffer, rows = whole_tensors()
    index = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))
    expected = buffer[:, 0].index_put((index,), rows[:SIZE])

    def body(mesh: RankMesh) -> Tensor:
        own, mine = (t.chunk(4)[mesh.rank] for t in (torch.arange(SIZE), index))
        source = rows[:SIZE].chunk(4)[mesh.rank]
        digits = (("dp", 1, 0),)
        return put_rows(StepContext(mesh), buffer[own, 0], [mine], source, False, 1, SIZE, digits)

    assert torch.equal(torch.cat(run_on_simulated_ranks(mesh_of(4), body)), expected)


def test_an_index_beyond_the_rows_is_an_error() -> None:
    def body(mesh: RankMesh) -> Tensor:
        return take_rows(
            StepContext(mesh), torch.ones(2, 1), [torch.tensor([0, 9, 8])], 8, (("dp", 1, 0),)
        )

    with pytest.raises(IndexError, match="2 indices are beyond the 8 rows"):
        run_on_simulated_ranks(mesh_of(4), body)


def test_nothing_is_gathered() -> None:
    buffer, rows = whole_tensors()

    def body(mesh: RankMesh) -> set[str]:
        assert isinstance(mesh, ThreadMesh)
        mine = torch.arange(ROWS).chunk(4)[mesh.rank]
        own = torch.arange(SIZE).chunk(4)[mesh.rank]
        take_rows(StepContext(mesh), buffer[own], [mine % SIZE], SIZE, (("dp", 1, 0),))
        return {kind for kind, _ in mesh.log}

    assert run_on_simulated_ranks(mesh_of(4), body) == [{"all_to_all", "exchange"}] * 4
