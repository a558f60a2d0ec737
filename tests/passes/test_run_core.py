import numpy as np
import pytest
from hypothesis import given, settings
from support_runs import brute_force_parts, part_lists

from meshfold.passes.run import core as run_core
from meshfold.passes.run.core import SUM_OF_TIMES, CoreResult, MaxOfForms, Part, Support, close_core
from meshfold.passes.run.hull import lower_hull


def close(parts: list[Part], budget_bytes: int, node_cap: int = 10**6) -> CoreResult:
    hulls = tuple(lower_hull(part.measures[0], part.memory_bytes) for part in parts)
    support = Support(np.ones(1), 0.0, hulls)
    return close_core(parts, support, SUM_OF_TIMES, budget_bytes, node_cap=node_cap)


@settings(max_examples=200)
@given(case=part_lists(1))
def test_counts_are_the_best_of_all(case: tuple[list[Part], int]) -> None:
    parts, budget = case
    result = close(parts, budget)
    best_s = brute_force_parts(parts, SUM_OF_TIMES, budget)
    assert result.plan is not None and not result.capped
    assert result.plan.value_s == pytest.approx(best_s, rel=1e-12)
    assert result.plan.memory_bytes <= budget
    assert [int(c.sum()) for c in result.plan.counts] == [part.count for part in parts]
    assert result.dual_s <= best_s * (1 + 1e-12)
    assert result.first_s >= best_s * (1 - 1e-12)


@given(case=part_lists(1))
def test_merging_by_dominance_finds_the_same(case: tuple[list[Part], int]) -> None:
    parts, budget = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_core, "MOST_LISTED", 1)
        merged = close(parts, budget)
    best_s = brute_force_parts(parts, SUM_OF_TIMES, budget)
    assert merged.plan is not None and not merged.capped
    assert merged.plan.value_s == pytest.approx(best_s, rel=1e-12)


def test_mix_of_hull_ends_not_an_end() -> None:
    # Two strategies, room for 3 of 8 layers to be fast: an end would be all slow.
    part = Part(8, np.array([[2.0, 1.0]]), np.array([10, 20]))
    result = close([part], 115)
    assert result.plan is not None
    assert result.plan.counts[0].tolist() == [5, 3]
    assert result.plan.value_s == 13.0
    assert result.dual_s == pytest.approx(12.5)


def test_memory_equal_to_the_budget_fits_and_one_byte_less_does_not() -> None:
    big = 2**40
    part = Part(2, np.array([[2.0, 1.0]]), np.array([big, big + 1]))
    exact, short = close([part], 2 * big + 2), close([part], 2 * big + 1)
    assert exact.plan is not None and exact.plan.counts[0].tolist() == [0, 2]
    assert short.plan is not None and short.plan.counts[0].tolist() == [1, 1]


def test_ties_go_to_fewest_strategies() -> None:
    # A + C and B + B take the same time and memory.
    part = Part(2, np.array([[1.0, 2.0, 3.0]]), np.array([10, 6, 2]))
    result = close([part], 12)
    assert result.plan is not None
    assert result.plan.counts[0].tolist() == [0, 2, 0]


def test_cap_is_reported_and_keeps_a_plan_that_fits() -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(100, 1000, 30)
    part = Part(20, (1e4 / memory * rng.uniform(1, 1.2, 30))[None, :], memory)
    full, capped = close([part], 7777), close([part], 7777, node_cap=2)
    assert not full.capped and capped.capped
    assert full.plan is not None and capped.plan is not None
    assert capped.plan.memory_bytes <= 7777
    assert capped.dual_s < full.plan.value_s <= capped.plan.value_s


def test_nothing_as_good_as_the_incumbent() -> None:
    part = Part(2, np.array([[2.0, 1.0]]), np.array([1, 2]))
    support = Support(np.ones(1), 0.0, (lower_hull(part.measures[0], part.memory_bytes),))
    close_it = [
        close_core([part], support, SUM_OF_TIMES, 3, incumbent_s=limit_s, node_cap=100).plan
        for limit_s in (2.9, 3.0)
    ]
    assert close_it[0] is None
    assert close_it[1] is not None and close_it[1].value_s == 3.0


def test_effort_does_not_depend_on_the_number_of_layers() -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(10**8, 10**9, 50)
    times = 1e7 / memory * rng.uniform(1, 1.5, 50)
    nodes = []
    for count in (96, 100_000):
        result = close([Part(count, times[None, :], memory)], count * 300_000_001)
        assert not result.capped
        nodes.append(result.nodes)
    assert max(nodes) < 400


def test_value_is_the_largest_form() -> None:
    objective = MaxOfForms(((1.0, 0.0), (0.0, 2.0)), (5.0, 0.0))
    assert objective.value((1.0, 2.0)) == 6.0
    assert objective.value((1.0, 4.0)) == 8.0
