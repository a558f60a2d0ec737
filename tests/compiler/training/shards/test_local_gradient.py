"""Loops as people write them: right, or refused in one line."""

from typing import Any

import pytest
import torch
from support.processes.agreement import model
from support.processes.habits import BETWEEN, OPTIMIZERS, losses
from support.processes.pool import Pools

from meshfold.errors import OptionError
from meshfold.training.shards.local_gradient import LocalGradient, local_tensor, mark_gradient

SLOW = pytest.mark.slow
PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 4, "zero": 0},
    "zero3": {"dp": 4, "zero": 3},
    "tp": {"dp": 2, "tp": 2, "zero": 0},
}
LOOPS = [(name, "nothing") for name in OPTIMIZERS] + [("SGD", name) for name in BETWEEN]
READS_SHARDS = {
    *((name, "nothing") for name in ("Adafactor", "Muon", "Adafactor of transformers", "LBFGS")),
    *(("SGD", name) for name in BETWEEN if "norm" in name and "model." not in name),
}
"""What reads several numbers of a gradient at once."""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "pins", [pytest.param("dp", marks=SLOW), "zero3", pytest.param("tp", marks=SLOW)]
)
def test_a_loop_is_right_or_refused(pools: Pools, pins: str) -> None:
    found = pools.run(4, "support.processes.habits:compiled_losses", PINS[pins], LOOPS)
    for k, loop in enumerate(LOOPS):
        expected = losses(model(), *loop)
        for rank in found:
            if isinstance(rank[k], str):
                assert loop in READS_SHARDS and pins != "dp", (loop, rank[k])
                assert "\n" not in rank[k] and "model.clip_grad_norm_" in rank[k]
            else:
                assert rank[k] == pytest.approx(expected, rel=2e-4), loop


@pytest.mark.multiprocess
@pytest.mark.parametrize("pins", ["zero3", pytest.param("dp", marks=SLOW)])
def test_wrappers_that_distribute_are_refused(pools: Pools, pins: str) -> None:
    for lines in pools.run(4, "support.processes.habits:wrapped", PINS[pins]):
        for name, line in lines.items():
            assert "around a compiled model" in line and "\n" not in line, name


REFUSED = {
    "norm": lambda g: g.norm(),
    "torch.norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "_foreach_norm": lambda g: torch._foreach_norm([g]),
    "sum": lambda g: g.sum(),
    "mean of a row": lambda g: g.square().mean(-1),
    "max": lambda g: g.abs().max(),
    "matmul": lambda g: g @ g.T,
    "matmul from the left": lambda g: torch.eye(2) @ g,
    "mm": lambda g: torch.mm(g, g),
    "einsum": lambda g: torch.einsum("ij,kj->ik", g, g),
    "all": lambda g: torch.isfinite(g).all(),
    "sort": lambda g: g.sort(),
    "svd": torch.linalg.svd,
}
ALLOWED = {
    "add": lambda g: g + 1,
    "maximum": lambda g: torch.maximum(g, g),
    "max of two": lambda g: torch.max(g, g),
    "lerp": lambda g: torch.zeros(2, 2).lerp_(g, 0.5),
    "foreach": lambda g: torch._foreach_mul([g], 2.0)[0],
    "clamp": lambda g: g.clamp(-1, 1),
    "shape": lambda g: g.reshape(4).view(2, 2),
    "numbers": lambda g: torch.tensor(g.tolist()),
    "clone": lambda g: g.detach().clone(),
    "cast": lambda g: g.double().float(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_several_numbers_is_refused(name: str) -> None:
    gradient = torch.ones(2, 2).as_subclass(LocalGradient)
    with pytest.raises(OptionError, match="of which this rank holds a shard"):
        REFUSED[name](gradient)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_works_number_by_number_is_that_of_the_plain_tensor(name: str) -> None:
    plain = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    found = ALLOWED[name](plain.clone().as_subclass(LocalGradient))
    assert torch.equal(local_tensor(found), ALLOWED[name](plain.clone()))


def test_a_gradient_is_marked_in_place_and_prints() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    mark_gradient(parameter)
    assert parameter.grad is None
    parameter.sum().backward()
    before = parameter.grad
    mark_gradient(parameter)
    assert isinstance(parameter.grad, LocalGradient)
    assert parameter.grad.data_ptr() == before.data_ptr()
    assert repr(parameter.grad) == "LocalGradient(tensor([1., 1., 1.]))"
    parameter.sum().backward()
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    assert isinstance(parameter.grad, LocalGradient)
