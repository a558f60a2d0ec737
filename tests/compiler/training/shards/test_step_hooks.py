"""Hooks of parameters where a step has several microbatches."""

from typing import Any

import pytest
import torch
from support.processes.agreement import model
from support.processes.habits import losses
from support.processes.pool import Pools
from torch import Tensor, nn

from meshfold.training.shards.local_shard import LocalShard
from meshfold.training.shards.step_hooks import StepHooks

LOOPS = [
    ("SGD", "hooks that clamp"),
    ("SGD", "hooks that take norms"),
    ("by hand", "nothing"),
    ("LAMB", "nothing"),
]
PINS: dict[str, dict[str, Any]] = {
    "microbatches": {"dp": 4, "zero": 0, "microbatches": 2},
    "zero3": {"dp": 4, "zero": 3, "microbatches": 2},
    "stages": {"pp": 2, "dp": 2, "zero": 0, "microbatches": 2},
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("pins", ["microbatches", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_loop_with_hooks_is_right_or_refused(pools: Pools, pins: str) -> None:
    for rank in pools.run(4, "support.processes.habits:compiled_losses", PINS[pins], LOOPS):
        for loop, found in zip(LOOPS, rank, strict=True):
            reads = loop[0] == "LAMB" or loop[1] == "hooks that take norms"
            if reads and pins == "zero3":
                assert "of which this rank holds a shard" in found
            else:
                assert found == pytest.approx(losses(model(), *loop), rel=2e-4), loop


@pytest.mark.multiprocess
def test_in_stages_too_and_whole_parameters_have_norms(pools: Pools) -> None:
    for rank in pools.run(4, "support.processes.habits:compiled_losses", PINS["stages"], LOOPS):
        for loop, found in zip(LOOPS, rank, strict=True):
            if loop[1] == "hooks that take norms":  # clipping would see this stage alone
                assert "of which this rank holds a shard, or a stage's" in found
            else:
                assert found == pytest.approx(losses(model(), *loop), rel=2e-4), loop


def _step(parameter: Tensor, value: float) -> None:
    for _ in range(2):  # microbatches
        (parameter * value).sum().backward()


def test_a_hook_sees_the_gradient_of_the_step_once() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    hooks = StepHooks({"first": first, "second": second}, frozenset({"first"}))
    seen: list[Tensor] = []
    handle = first.register_hook(lambda g: seen.append(g) or g.clamp(max=1.0))
    after: list[Tensor] = []
    second.register_post_accumulate_grad_hook(after.append)
    with hooks.around_step():
        _step(first, 3.0)
        _step(second, 2.0)
        assert not seen and not after
    assert len(seen) == 1 and isinstance(seen[0], LocalShard)
    assert first.grad.as_subclass(Tensor).tolist() == [1.0, 1.0]
    assert after == [second] and second.grad.tolist() == [4.0, 4.0]
    with hooks.around_step():
        _step(first, 0.25)  # another step adds up
    assert first.grad.as_subclass(Tensor).tolist() == [1.5, 1.5]
    assert second.grad.tolist() == [4.0, 4.0] and len(after) == 1  # none in this step
    handle.remove()
    with hooks.around_step():
        _step(first, 3.0)
    assert first.grad.as_subclass(Tensor).tolist() == [7.5, 7.5]


def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    parameter = nn.Parameter(torch.ones(2))
    hooks = StepHooks({"p": parameter}, frozenset())
    parameter.register_hook(lambda g: g * 0)
    parameter.grad = before = torch.full((2,), 5.0)
    with pytest.raises(RuntimeError, match="in the middle"), hooks.around_step():
        _step(parameter, 1.0)
        raise RuntimeError("in the middle")
    assert parameter.grad is before


def test_an_optimizer_in_the_hook_takes_the_gradient_with_it() -> None:
    parameter = nn.Parameter(torch.ones(2))
    hooks = StepHooks({"p": parameter}, frozenset())
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def step(p: Tensor) -> None:
        optimizer.step()
        p.grad = None

    parameter.register_post_accumulate_grad_hook(step)
    with hooks.around_step():
        _step(parameter, 0.25)
    assert parameter.tolist() == [0.5, 0.5] and parameter.grad is None
