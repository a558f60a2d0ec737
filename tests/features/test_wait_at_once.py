"""A runner without overlap: nothing is in flight while it computes, the numbers are the same."""

from functools import partial

import pytest
import torch
from support.programs.events import eager
from support.programs.memory import EmittedStep

from meshfold.ir.strategy import UniformStrategy
from meshfold.runtime.runner import ProgramRunner


def step_of(strategy: UniformStrategy, *, waits_at_once: bool) -> tuple[list[torch.Tensor], int]:
    """(gradients, most collectives that were in flight at once)."""
    case = eager("llama", strategy)
    step = EmittedStep(case.model, case.captured, case.program, case.batch)
    mesh = step.runner.mesh
    constants = case.captured.constants
    step.runner = ProgramRunner(case.program, mesh, constants, waits_at_once=waits_at_once)
    flying, most = 0, 0

    def start(plain, *arguments):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        return plain(*arguments)

    def wait(plain, x):
        nonlocal flying
        flying -= 1
        return plain(x)

    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_in_place"):
        setattr(mesh, f"start_{name}", partial(start, getattr(mesh, f"start_{name}")))
    mesh.wait = partial(wait, mesh.wait)
    step.forward().backward()
    assert flying == 0
    return [p.grad for p in step.parameters.values()], most


@pytest.mark.parametrize(
    "strategy",
    [UniformStrategy(dp=4), UniformStrategy(dp=4, zero=3)],
    ids=lambda strategy: strategy.label,
)
def test_waiting_at_once_changes_order_alone(strategy: UniformStrategy) -> None:
    overlapped, many = step_of(strategy, waits_at_once=False)
    waited, one = step_of(strategy, waits_at_once=True)
    assert many > 1 and one == 1
    assert all(torch.equal(a, b) for a, b in zip(overlapped, waited, strict=True))
