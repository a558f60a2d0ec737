"""Loops as people write them: right, or refused in one line."""

import copy
import io
from typing import Any

import pytest
import torch
from support.processes.agreement import model
from support.processes.habits import BETWEEN, OPTIMIZERS, losses
from support.processes.pool import Pools
from torch.optim import optimizer

from meshfold.errors import OptionError
from meshfold.training.shards.local_shard import (
    LocalShard,
    local_parameter,
    local_tensor,
    mark_gradient,
)

SLOW = pytest.mark.slow
PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 4, "zero": 0},
    "zero3": {"dp": 4, "zero": 3},
    "tp": {"dp": 2, "tp": 2, "zero": 0},
}
LOOPS = [(name, "nothing") for name in OPTIMIZERS] + [("SGD", name) for name in BETWEEN]
READS_SHARDS = {
    *((name, "nothing") for name in ("Adafactor", "Muon", "Adafactor of transformers", "LBFGS")),
    ("LAMB", "nothing"),
    *(("SGD", name) for name in BETWEEN if "norm" in name and "model." not in name),
    ("SGD", "skip what is not finite"),
}
"""What reads several numbers of a parameter or gradient at once."""
DRAWS = {("SGD", "noise"), ("SGD", "initialise")}
"""Ranks that hold other shards would draw other numbers, or the same."""


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
                assert loop in READS_SHARDS | DRAWS and pins != "dp", (loop, rank[k])
                wants = "before meshfold.compile" if loop in DRAWS else "model.clip_grad_norm_"
                assert "\n" not in rank[k] and wants in rank[k]
            else:
                assert pins == "dp" or loop not in READS_SHARDS | DRAWS, loop
                assert rank[k] == pytest.approx(expected, rel=2e-4), loop


@pytest.mark.multiprocess
@pytest.mark.parametrize("pins", ["zero3", pytest.param("dp", marks=SLOW)])
def test_wrappers_that_distribute_are_refused(pools: Pools, pins: str) -> None:
    for lines in pools.run(4, "support.processes.habits:wrapped", PINS[pins]):
        for name, line in lines.items():
            assert "\n" not in line, name
            # fully_shard cuts a shard once more before it marks the module.
            cuts = name == "fully_shard" and "of which this rank holds a shard" in line
            assert cuts or "around a compiled model" in line, name


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
    "a row by its number": lambda g: g[0],
    "rows set by their numbers": lambda g: g.__setitem__(slice(0, 1), 0.0),
    "numbers that leave torch": lambda g: g.tolist(),
    "numpy": lambda g: g.numpy(),
    "parts": lambda g: g.chunk(2),
    "a loss": lambda g: torch.nn.functional.mse_loss(g, g),
    "of what is made of it": lambda g: (g * 2 + 1).sum(),
    "where it is not zero": lambda g: torch.where(g),
    "equal": lambda g: torch.equal(g, g),
    "an op that is called by its name": lambda g: torch.ops.aten.sum.default(g),
}
RANDOM = {
    "normal_": lambda g: g.normal_(),
    "randn_like": torch.randn_like,
    "xavier_uniform_": torch.nn.init.xavier_uniform_,
    "trunc_normal_": torch.nn.init.trunc_normal_,
    "dropout": torch.nn.functional.dropout,
    "rrelu": torch.nn.functional.rrelu,
}
ALLOWED = {
    "add": lambda g: g + 1,
    "maximum": lambda g: torch.maximum(g, g),
    "max of two": lambda g: torch.max(g, g),
    "lerp": lambda g: torch.zeros(2, 2).lerp_(g, 0.5),
    "foreach": lambda g: torch._foreach_mul([g], 2.0)[0],
    "clamp": lambda g: g.clamp(-1, 1),
    "shape": lambda g: g.reshape(4).view(2, 2),
    "clone": lambda g: g.detach().clone(),
    "cast": lambda g: g.double().float(),
    "as a vector": lambda g: torch.nn.utils.parameters_to_vector([g]),
    "all of it": lambda g: g[...][:, :].neg(),
    "a mask": lambda g: g[g > 0],
    "zeros by a mask": lambda g: g.__setitem__(g > 0, 0.0) or g,
    "where": lambda g: torch.where(g > 0, g, 0.0),
    "memory like it": lambda g: torch.zeros_like(g),
    "initialised alike": torch.nn.init.ones_,
    "an op that is called by its name": lambda g: torch.ops.aten.mul.Tensor(g, g),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_several_numbers_is_refused(name: str) -> None:
    gradient = torch.ones(2, 2).as_subclass(LocalShard)
    with pytest.raises(OptionError, match="of which this rank holds a shard"):
        REFUSED[name](gradient)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_works_number_by_number_is_that_of_the_plain_tensor(name: str) -> None:
    plain = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    found = ALLOWED[name](plain.clone().as_subclass(LocalShard))
    assert torch.equal(local_tensor(found), ALLOWED[name](plain.clone()))


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="every rank would draw its own"):
        RANDOM[name](torch.ones(2, 2).as_subclass(LocalShard))


def test_what_changes_a_tensor_in_place_gives_that_tensor() -> None:
    gradient, plain = torch.ones(3).as_subclass(LocalShard), torch.nn.Parameter(torch.ones(3))
    before = plain
    with torch.no_grad():
        plain -= gradient
        assert plain is before and plain.sub_(gradient) is before
        assert torch.sub(plain, gradient, out=before.data) is not None
        (foreach,) = torch._foreach_add([before], [gradient])
        assert torch._foreach_mul_([before], [gradient])[0] is before
    assert isinstance(foreach, LocalShard)
    assert plain.tolist() == [-2.0, -2.0, -2.0]


def test_a_parameter_is_one_for_modules_optimizers_and_copies() -> None:
    parameter = local_parameter(torch.ones(3), requires_grad=True)
    module = torch.nn.Module()
    module.weight = parameter
    assert dict(module.named_parameters()) == {"weight": parameter} and parameter.is_leaf
    parameter.grad = torch.full((3,), 2.0)
    copied = copy.deepcopy(module).weight
    assert isinstance(copied, LocalShard) and isinstance(copied, torch.nn.Parameter)
    assert local_tensor(copied.grad).tolist() == [2.0] * 3 and copied.requires_grad
    # One kernel for all parameters, where torch would take one for plain ones.
    assert LocalShard in optimizer._foreach_supported_types
    saved = io.BytesIO()
    torch.save(copied, saved)
    saved.seek(0)
    assert type(torch.load(saved)) is torch.nn.Parameter


def test_what_is_made_new_is_no_shard() -> None:
    shard_of_two = torch.ones(2).as_subclass(LocalShard)
    assert type(shard_of_two.new_zeros(())) is torch.Tensor
    assert float(shard_of_two.new_tensor([1.0, 2.0]).sum()) == 3.0
    assert float(torch.ones(1).as_subclass(LocalShard)) == 1.0


def test_a_gradient_is_marked_in_place_and_prints() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    mark_gradient(parameter)
    assert parameter.grad is None
    parameter.sum().backward()
    before = parameter.grad
    mark_gradient(parameter)
    assert isinstance(parameter.grad, LocalShard)
    assert parameter.grad.data_ptr() == before.data_ptr()
    assert repr(parameter.grad) == "LocalShard(tensor([1., 1., 1.]))"
    parameter.sum().backward()
    assert local_tensor(parameter.grad).tolist() == [2.0, 2.0, 2.0]
    assert isinstance(parameter.grad, LocalShard)
