"""Prices of passes are a mix of chains that exist, whatever the solver says."""

import numpy as np
import pytest

from meshfold.cost_models.pipeline.actions import Pass
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.passes.stages import pass_prices
from meshfold.passes.stages.pass_prices import PriceProblem, priced_mix


def problem(num_stages, p):
    """One layer in every stage, of 1 s forward and 2 s backward; hops of 0.5 s."""
    ones = np.ones(num_stages)
    seconds = {Pass.FORWARD: ones, Pass.BACKWARD: 2 * ones, Pass.WEIGHT_GRADIENT: 0 * ones}
    return PriceProblem(
        np.arange(num_stages), seconds, np.zeros((p, num_stages)), np.full(num_stages - 1, 0.5),
        (np.zeros((0, num_stages)), np.zeros(0)), (np.eye(num_stages), ones),
    )  # fmt: skip


def test_the_mix_is_as_long_as_the_step():
    """1F1B of two stages and two microbatches: F F, hop, on the second F B F B, hop, B."""
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 2, 2)
    mix = priced_mix(schedule.actions(), problem(2, 2))
    seconds = mix.passes[Pass.FORWARD].sum() + 2 * mix.passes[Pass.BACKWARD].sum()
    assert mix.ends.sum() == pytest.approx(1)
    assert seconds + 0.5 * mix.hops.sum() == pytest.approx(1 + 0.5 + 6 + 0.5 + 2)


@pytest.mark.parametrize("kind", [ScheduleKind.INTERLEAVED, ScheduleKind.ZBV])
@pytest.mark.parametrize("seed", range(3))
def test_any_prices_are_a_mix_of_chains(monkeypatch, kind, seed):
    """Every chain begins with the first forward of stage 0 and goes down and up the stages: of each
    kind of transfer as many as lead from the first stage to where it turns."""
    draws = np.random.default_rng(seed)

    def drawn(passes, arcs, last, problem):
        return draws.random(len(arcs.after)), draws.random(len(last))

    monkeypatch.setattr(pass_prices, "_prices", drawn)
    schedule = Schedule(kind, 2, 4, 2)
    mix = priced_mix(schedule.actions(), problem(4, 2))
    assert mix.ends.sum() == pytest.approx(1)
    assert all((shares >= 0).all() for shares in mix.passes.values())
    assert mix.passes[Pass.FORWARD][0] >= 1 - 1e-12


def test_a_solver_without_an_answer_gives_no_mix(monkeypatch):
    monkeypatch.setattr(pass_prices, "_prices", lambda *_: None)
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 2, 2)
    assert priced_mix(schedule.actions(), problem(2, 2)) is None
