import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from support.search.runs import random_type

from meshfold.passes.run.hull import (
    lower_hull,
    lp_values,
    relaxed_point,
    steepest_edges,
    sum_hulls,
    undominated,
)


def test_undominated_keeps_the_first_of_equals_and_orders_by_memory() -> None:
    times = np.array([3.0, 1.0, 3.0, 2.0, 2.0])
    memory = np.array([1, 9, 1, 5, 6])
    assert undominated(times, memory).tolist() == [0, 3, 1]


def test_hull_leaves_out_points_on_and_above_its_edges() -> None:
    hull = lower_hull([8.0, 6.0, 4.0, 7.0, 1.0], [0, 1, 2, 1, 5])
    assert hull.memory_bytes.tolist() == [0, 2, 5]
    assert hull.time_s.tolist() == [8.0, 4.0, 1.0]
    assert hull.strategies.tolist() == [0, 2, 4]


def test_hull_is_read_at_many_budgets_and_layer_counts_at_once() -> None:
    hull = lower_hull([8.0, 4.0, 1.0], [0, 2, 5])
    assert hull.time_at_s([-1, 0, 1, 2, 5, 99]).tolist() == [np.inf, 8.0, 6.0, 4.0, 1.0, 1.0]
    assert hull.time_at_s([[0], [6]], [1, 3]).tolist() == [[8.0, 24.0], [1.0, 12.0]]
    assert hull.time_at_s([-1, 0], 0).tolist() == [np.inf, 0.0]


def test_price_is_the_slope_at_the_budget() -> None:
    hull = lower_hull([8.0, 4.0, 1.0], [0, 2, 5])
    assert [hull.price_at(m) for m in (-1, 0, 1, 2, 5)] == [0.0, 2.0, 2.0, 1.0, 0.0]


def test_hull_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one strategy"):
        lower_hull([], [])
    with pytest.raises(ValueError, match="one time and one memory"):
        lower_hull([1.0, 2.0], [1])


def test_sum_of_hulls_takes_the_steepest_edges_first() -> None:
    slow, steep = lower_hull([5.0, 4.0], [0, 1]), lower_hull([9.0, 3.0], [1, 3])
    assert steepest_edges([slow, steep])[0].tolist() == [1, 0]
    total = sum_hulls([slow, steep], [2, 3])
    assert total.memory_bytes.tolist() == [3, 9, 11]
    assert total.time_s.tolist() == [37.0, 19.0, 17.0]
    assert sum_hulls([slow, steep], [0, 1]).time_s.tolist() == [9.0, 3.0]


def test_relaxed_point_splits_one_type() -> None:
    hulls = [lower_hull([5.0, 4.0], [0, 1]), lower_hull([9.0, 3.0], [1, 3])]
    point = relaxed_point(hulls, [2, 3], 6)
    assert (point.vertices, point.between, point.moved_layers) == ((0, 0), 1, 1.5)
    assert point.price == 3.0
    assert relaxed_point(hulls, [2, 3], 11).between == -1


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_bound_is_the_linear_program(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    types = [random_type(rng, "t", int(rng.integers(1, 8))) for _ in range(3)]
    counts = rng.integers(1, 40, 3)
    # The solver works to 1e-7 absolutely: milliseconds and gigabytes keep its numbers near 1.
    memory = [t.memory_bytes / 1e9 for t in types]
    least = sum(n * m.min() for n, m in zip(counts, memory, strict=True))
    most = sum(n * m.max() for n, m in zip(counts, memory, strict=True))
    budget = least + share * (most - least)
    rows = np.zeros((3, sum(len(m) for m in memory)))
    first = 0
    for row, m in zip(rows, memory, strict=True):
        row[first : first + len(m)] = 1
        first += len(m)
    exact = linprog(
        np.concatenate([t.time_s for t in types]) * 1e3,
        A_ub=np.concatenate(memory)[None, :],
        b_ub=[budget + 1e-9],
        A_eq=rows,
        b_eq=counts,
    )
    bound = lp_values(
        [(t.time_s, t.memory_bytes, int(n)) for t, n in zip(types, counts, strict=True)],
        budget * 1e9 + 1,
    )
    assert float(bound) * 1e3 == pytest.approx(exact.fun, rel=1e-6)
