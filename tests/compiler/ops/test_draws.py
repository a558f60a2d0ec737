"""Draws by size alone: as torch draws them, or alike everywhere. Shards are met in the gate of the
rules (tests/passes/rules/test_table.py)."""

import pytest
import torch
from support.graphs.ops import mesh_of
from support.processes.ranks import run_on_simulated_ranks
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ops.draws import alike_draw, local_draw
from meshfold.ops.registry import torch_target

CPU = torch.device("cpu")
KINDS = ("uniform", "normal")


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_draws_anew_unless_it_draws_alike(kind: str) -> None:
    op = torch_target(f"meshfold.{kind}.default")
    first, second = (op([40, 50], torch.float32, CPU) for _ in range(2))
    assert first.shape == (40, 50) and first.dtype == torch.float32 and not first.equal(second)
    alike = op([4, 6], torch.float64, CPU, alike=True)
    assert alike.equal(op([4, 6], torch.float64, CPU, alike=True))
    assert alike.equal(alike_draw(kind, [4, 6], torch.float64, CPU))
    assert op([4, 6], torch.float16, torch.device("meta")).shape == (4, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_steps_instances_and_ops_draw_differently(kind: str) -> None:
    def body(mesh: RankMesh) -> list[Tensor]:
        sites = [((0, 0), (0, 0)), ((1, 0), (0, 0)), ((0, 1), (0, 0)), ((0, 0), (1, 0))]
        return [
            local_draw(
                *(StepContext(mesh, rng), kind, torch.float64, site, (4, 6), ((), ()), (0, 1, 1))
            )
            for rng, site in [*sites, ((0, 0), (0, 1))]
        ]

    (found,) = run_on_simulated_ranks(mesh_of(1), body)
    for k, one in enumerate(found):
        assert not any(one.equal(other) for other in found[k + 1 :])


def test_ranks_draw_their_shards_of_one_tensor() -> None:
    digits = ((("dp", 1, 0),), (("tp", 2, 0),))

    def body(mesh: RankMesh) -> Tensor:
        context = StepContext(mesh)
        return local_draw(context, "normal", torch.float64, (0, 0), (4, 8), digits, (0, 1, 1))

    (whole,) = run_on_simulated_ranks(
        mesh_of(1),
        lambda mesh: local_draw(
            *(StepContext(mesh), "normal", torch.float64, (0, 0), (4, 8), ((), ()), (0, 1, 1))
        ),
    )
    blocks = whole.unflatten(1, (2, 4))
    for rank, part in enumerate(run_on_simulated_ranks(mesh_of(2, 2), body)):
        dp, tp = divmod(rank, 2)
        rows = slice(2 * dp, 2 * dp + 2)
        assert part.equal(blocks[rows, :, 2 * tp : 2 * tp + 2].reshape(2, 4))
