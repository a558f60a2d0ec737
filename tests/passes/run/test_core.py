import numpy as np
import pytest
from hypothesis import given, settings
from support.search.runs import Group, group_lists, least_over_counts

from meshfold.passes.run import core as run_core
from meshfold.passes.run.core import CoreResult, LayerGroup, close_core
from meshfold.passes.run.hull import lower_hull


def group_of(count: int, times: object, memory: np.ndarray) -> LayerGroup:
    time_s = np.array(times, float)
    return LayerGroup(count, time_s, memory, lower_hull(time_s, memory))


def groups_of(groups: list[Group]) -> list[LayerGroup]:
    return [group_of(count, measures[0], memory) for count, measures, memory in groups]


def close(groups: list[LayerGroup], budget_bytes: int, node_cap: int = 10**6) -> CoreResult:
    return close_core(groups, budget_bytes, node_cap=node_cap)


@settings(max_examples=200)
@given(case=group_lists(1))
def test_counts_are_the_best_of_all(case: tuple[list[Group], int]) -> None:
    groups, budget = case
    result = close(groups_of(groups), budget)
    best_s = least_over_counts(groups, lambda z: float(z[0]), budget)
    assert result.plan is not None and not result.capped
    assert result.plan.time_s == pytest.approx(best_s, rel=1e-12)
    assert result.plan.memory_bytes <= budget
    assert [int(c.sum()) for c in result.plan.counts] == [count for count, _, _ in groups]
    assert result.dual_s <= best_s * (1 + 1e-12)
    assert result.first_s >= best_s * (1 - 1e-12)


@given(case=group_lists(1))
def test_merging_by_dominance_finds_the_same(case: tuple[list[Group], int]) -> None:
    groups, budget = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_core, "MOST_LISTED", 1)
        merged = close(groups_of(groups), budget)
    best_s = least_over_counts(groups, lambda z: float(z[0]), budget)
    assert merged.plan is not None and not merged.capped
    assert merged.plan.time_s == pytest.approx(best_s, rel=1e-12)


def test_mix_of_hull_ends_not_an_end() -> None:
    # Two strategies, room for 3 of 8 layers to be fast: an end would be all slow.
    group = group_of(8, [2.0, 1.0], np.array([10, 20]))
    result = close([group], 115)
    assert result.plan is not None
    assert result.plan.counts[0].tolist() == [5, 3]
    assert result.plan.time_s == 13.0
    assert result.dual_s == pytest.approx(12.5)


def test_memory_equal_to_the_budget_fits_and_one_byte_less_does_not() -> None:
    big = 2**40
    group = group_of(2, [2.0, 1.0], np.array([big, big + 1]))
    exact, short = close([group], 2 * big + 2), close([group], 2 * big + 1)
    assert exact.plan is not None and exact.plan.counts[0].tolist() == [0, 2]
    assert short.plan is not None and short.plan.counts[0].tolist() == [1, 1]


def test_ties_go_to_fewest_strategies() -> None:
    # A + C and B + B take the same time and memory.
    group = group_of(2, [1.0, 2.0, 3.0], np.array([10, 6, 2]))
    result = close([group], 12)
    assert result.plan is not None
    assert result.plan.counts[0].tolist() == [0, 2, 0]


def test_cap_is_reported_and_keeps_a_plan_that_fits() -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(100, 1000, 30)
    group = group_of(20, 1e4 / memory * rng.uniform(1, 1.2, 30), memory)
    full, capped = close([group], 7777), close([group], 7777, node_cap=2)
    assert not full.capped and capped.capped
    assert full.plan is not None and capped.plan is not None
    assert capped.plan.memory_bytes <= 7777
    assert capped.dual_s < full.plan.time_s <= capped.plan.time_s


def test_nothing_as_good_as_the_incumbent() -> None:
    group = group_of(2, [2.0, 1.0], np.array([1, 2]))
    close_it = [
        close_core([group], 3, incumbent_s=limit_s, node_cap=100).plan for limit_s in (2.9, 3.0)
    ]
    assert close_it[0] is None
    assert close_it[1] is not None and close_it[1].time_s == 3.0


def test_effort_does_not_depend_on_the_number_of_layers() -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(10**8, 10**9, 50)
    times = 1e7 / memory * rng.uniform(1, 1.5, 50)
    nodes = []
    for count in (96, 100_000):
        result = close([group_of(count, times, memory)], count * 300_000_001)
        assert not result.capped
        nodes.append(result.nodes)
    assert max(nodes) < 400
