"""Models that take gradients inside of forward: every plan computes what one process does."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step, one_process
from torch import Tensor, nn
from torch.nn import functional as F

import meshfold
from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

BATCH, WIDTH = 4, 8
STRATEGIES = [
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(tp=2, sequence_parallel=True),
    UniformStrategy(dp=2, tp=2),
]


class Physics(nn.Module):
    """Burgers' equation: first and second derivatives of the network by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(2, WIDTH), nn.Tanh()),
            *(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        ones = torch.ones_like(u)
        (slope,) = torch.autograd.grad(u, x, ones, create_graph=True)
        (second,) = torch.autograd.grad(slope[:, :1], x, ones, create_graph=True)
        residual = slope[:, 1:] + u * slope[:, :1] - 0.01 * second[:, :1]
        return residual.square().mean()


class Critic(nn.Module):
    """A critic of images under a penalty on its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, WIDTH, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten()
        )
        self.norm, self.head = nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.flip(0).lerp(x, 0.3).requires_grad_(True)
        scores = self.head(self.norm(self.body(mixed)))
        (slope,) = torch.autograd.grad(scores.sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.head(self.norm(self.body(x))).mean() + 10 * penalty


class Adapted(nn.Module):
    """The loss of weights after a step on the other half of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            found = torch.func.functional_call(self.net, weights, (x,))
            return F.cross_entropy(found, torch.tensor([0, 1, 3, 2]))

        weights = dict(self.net.named_parameters())
        slopes = torch.func.grad(loss)(weights)
        return loss({name: w - 0.5 * slopes[name] for name, w in weights.items()})


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "physics": (Physics, (BATCH, 2)),
    "critic": (Critic, (BATCH, 2, WIDTH)),
    "adapted": (Adapted, (BATCH, 2)),
}


def make(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    new, shape = MODELS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new().double(), {"x": torch.randn(*shape, dtype=torch.float64)}


@cache
def captured(kind: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = make(kind)
    with float64_everywhere():
        return model, batch, capture(model, batch)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_compute_what_one_process_computes(kind: str, strategy: UniformStrategy) -> None:
    model, batch, found = captured(kind)
    program = emit_uniform(found, strategy, BATCH)
    for errors in errors_of_a_step(model, batch, found, program):
        assert set(errors) == {"loss", *dict(model.named_parameters())}
        assert all(error < 1e-12 for error in errors.values())


def test_a_batch_may_require_the_gradient_that_forward_takes() -> None:
    model, batch = make("physics")
    right, gradients = one_process(model, {"x": batch["x"].clone()})
    with float64_everywhere():
        compiled = meshfold.compile(model, "local-cpux1", batch)
        loss = compiled(x=batch["x"].requires_grad_())
        loss.backward()
    assert torch.allclose(loss, right, rtol=1e-12)
    found = dict(compiled.named_parameters())
    assert all(torch.allclose(found[n].grad, g, atol=1e-13) for n, g in gradients.items())
    assert batch["x"].grad is None
