"""Random plans under budgets of memory: which are drawn, and what is said of them."""

from measuring.budgets import MECHANISMS, Draw, Outcome, drawn, summary


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
