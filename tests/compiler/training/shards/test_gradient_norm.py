"""The norm of all gradients, whatever is sharded where."""

import math
from functools import cache

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.programs.local_programs import Rank, emit_uniform, gradients, on_ranks, stack_model
from torch import Tensor, nn

import meshfold
from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.mesh import Mesh
from meshfold.ir.strategy import UniformStrategy
from meshfold.training.shards.gradient_norm import sharded_axes, total_norm
from meshfold.validation.float64_mode import float64_everywhere

STRATEGIES = [
    UniformStrategy(),
    UniformStrategy(dp=2),
    UniformStrategy(dp=2, zero=2),
    UniformStrategy(dp=4, zero=3),
    UniformStrategy(dp=2, tp=2),
    UniformStrategy(dp=2, tp=2, zero=3, sequence_parallel=True),
]


@cache
def example(family: str) -> tuple[nn.Module, dict[str, Tensor], Captured, dict[str, Tensor]]:
    model, batch = tiny_model(family)
    with float64_everywhere():
        return model, batch, capture(model, batch), gradients(model, batch)


# gpt2 ties its embedding to its head; no dim of "uneven" divides by four, so shards are padded, and
# none by two, so tp has nothing to cut.
@pytest.mark.parametrize(
    ("family", "strategy"),
    [("gpt2", s) for s in STRATEGIES] + [("uneven", s) for s in STRATEGIES if s.tp == 1],
    ids=lambda x: x if isinstance(x, str) else x.label,
)
def test_norms_are_those_of_one_process(family: str, strategy: UniformStrategy) -> None:
    model, batch, captured, right = example(family)
    program = emit_uniform(captured, strategy, len(batch["labels"]))
    everything = torch.cat([g.reshape(-1) for g in right.values()])

    def norms(rank: Rank) -> list[float]:
        rank.loss(batch).backward()
        mine = {name: p.grad for name, p in rank.parameters.items() if p.grad is not None}
        sharded = sharded_axes(program)
        return [float(total_norm(mine, sharded, rank.mesh, p)) for p in (2.0, 1.0, math.inf)]

    expected = [float(torch.linalg.vector_norm(everything, p)) for p in (2.0, 1.0, math.inf)]
    for found in on_ranks(model, captured, program, norms):
        assert found == pytest.approx(expected, rel=1e-12)


def test_narrow_gradients_are_summed_in_wide_numbers() -> None:
    class OneRank:
        device = torch.device("cpu")
        mesh = Mesh(())

    gradient = torch.full((4096,), 0.125, dtype=torch.bfloat16)
    norm = total_norm({"w": gradient}, {"w": frozenset()}, OneRank(), 2.0)  # type: ignore[arg-type]
    assert norm.item() == 8.0


def test_clipping_says_what_it_cannot_do() -> None:
    model, batch = stack_model()
    compiled = meshfold.compile(model, "local-cpux1", batch)
    compiled.train_step(batch)
    with pytest.raises(OptionError, match="norm_type 0: a norm is of order above 0"):
        compiled.clip_grad_norm_(1.0, norm_type=0)
    next(compiled.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan; look for what"):
        compiled.clip_grad_norm_(1.0, error_if_nonfinite=True)
    plan = meshfold.compile(model, "local-cpux2", batch)
    with pytest.raises(MeshfoldError, match="runs on 2 processes and there is no process group"):
        plan.clip_grad_norm_(1.0)


def test_a_model_without_gradients_has_norm_zero() -> None:
    model, batch, captured, _ = example("gpt2")
    program = emit_uniform(captured, UniformStrategy(dp=2, zero=3), len(batch["labels"]))

    def norm(rank: Rank) -> float:
        return float(total_norm({}, sharded_axes(program), rank.mesh, 2.0))

    assert on_ranks(model, captured, program, norm) == [0.0, 0.0]
