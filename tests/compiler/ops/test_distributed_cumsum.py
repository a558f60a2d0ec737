"""Cumulative sums over ranks."""

import pytest
import torch
from support.graphs.ops import mesh_of
from support.processes.ranks import run_on_simulated_ranks
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ops.distributed_cumsum import cumsum
from meshfold.sharding.indices import ShardDigits, shard_indices_of
from meshfold.sharding.slicing import local_indices

SIZE = 24
DIGITS: dict[str, ShardDigits] = {
    "one axis": (("dp", 1, 0),),
    "in blocks": (("dp", 3, 0),),
    "two axes": (("dp", 1, 0), ("tp", 2, 0)),
    "the inner axis first": (("dp", 6, 0), ("tp", 1, 0)),
}


@pytest.mark.parametrize("digits", DIGITS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_adds_what_those_before_it_hold(digits: str, dim: int) -> None:
    shape = (SIZE, 2) if dim == 0 else (2, SIZE)
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    whole = x.clone().requires_grad_()
    expected = whole.cumsum(dim)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), whole)

    def body(mesh: RankMesh) -> list[tuple[Tensor, Tensor]]:
        held = local_indices(SIZE, shard_indices_of(mesh, DIGITS[digits]), mesh.device)
        local = x.index_select(dim, held).requires_grad_()
        with torch.enable_grad():
            made = cumsum(StepContext(mesh), local, dim, None, SIZE, DIGITS[digits])
            (back,) = torch.autograd.grad((made * weights.index_select(dim, held)).sum(), local)
        wanted = (t.detach().index_select(dim, held) for t in (expected, gradient))
        return list(zip((made.detach(), back), wanted, strict=True))

    mesh = mesh_of(4) if len(DIGITS[digits]) == 1 else mesh_of(2, 2)
    for pairs in run_on_simulated_ranks(mesh, body):
        for made, right in pairs:
            torch.testing.assert_close(made, right, rtol=0, atol=1e-12)


def test_flags_are_counted_and_a_dtype_is_kept() -> None:
    x = torch.arange(SIZE) % 3 == 0

    def body(mesh: RankMesh) -> tuple[Tensor, Tensor]:
        mine, digits = x.chunk(4)[mesh.rank], (("dp", 1, 0),)
        return (
            cumsum(StepContext(mesh), mine, 0, None, SIZE, digits),
            cumsum(StepContext(mesh), mine, 0, torch.float32, SIZE, digits),
        )

    results = run_on_simulated_ranks(mesh_of(4), body)
    assert torch.equal(torch.cat([counts for counts, _ in results]), x.cumsum(0))
    assert torch.equal(torch.cat([sums for _, sums in results]), x.cumsum(0, dtype=torch.float32))
