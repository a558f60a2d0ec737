"""Plans under a budget of memory: what a step of their program takes is never above it."""

import pytest
import torch
from measuring.budgets import MECHANISMS, Draw, Models, Outcome, drawn, outcome, summary

LEAST_ERROR = -0.02
"""Of a prediction, relative to what is counted: bytes that the model of memory does not know."""


def test_draws_have_every_mechanism_and_repeat() -> None:
    draws = drawn(2 * len(MECHANISMS), seed=3)
    assert draws == drawn(2 * len(MECHANISMS), seed=3) != drawn(2 * len(MECHANISMS), seed=4)
    assert {draw.mechanism for draw in draws} == set(MECHANISMS)
    assert all(draw.num_ranks >= MECHANISMS[draw.mechanism][0] for draw in draws)


def test_a_summary_counts_what_is_above_its_budget() -> None:
    draw = Draw("llama", "zero 3", 2, 0.5)
    of = [Outcome(draw, "", 100, predicted, 100) for predicted in (90, 110)]
    _, line = summary([*of, Outcome(draw, "", 99, 100, 100)])
    assert line.split() == ["zero", "3", "3", "+0.00%", "-10.00%", "+10.00%", "1"]


@pytest.mark.slow(60)
def test_random_plans_are_in_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    models = Models()
    found = [x for draw in drawn(len(MECHANISMS)) if (x := outcome(draw, models)) is not None]
    assert len(found) > len(MECHANISMS) // 2
    assert all(x.fits for x in found), [x for x in found if not x.fits]
    assert all(x.error >= LEAST_ERROR for x in found), found
