"""Layers under two budgets of bytes: found counts fit, and stay near the best there are."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshfold.passes.one_pass.step_limit import LayerChoices, counts_within

BYTES = st.integers(0, 40)


@st.composite
def layer_choices(draw: st.DrawFn) -> LayerChoices:
    """A few candidates, each with its figures."""
    rows = draw(st.lists(st.tuples(st.integers(1, 50), BYTES, BYTES), min_size=1, max_size=4))
    time_s, backward, step = np.array(rows, np.int64).T
    return LayerChoices(draw(st.integers(1, 4)), time_s.astype(float), backward, step)


def every_count(group: LayerChoices) -> list[np.ndarray]:
    """All ways to give the layers of a group candidates."""
    size = len(group.time_s)
    picks = itertools.combinations_with_replacement(range(size), group.count)
    return [np.bincount(pick, minlength=size) for pick in picks]


def least_s(groups: list[LayerChoices], backward: int, step: int) -> float:
    """By brute force; infinite where nothing fits."""
    best = np.inf
    for counts in itertools.product(*(every_count(g) for g in groups)):
        of = list(zip(groups, counts, strict=True))
        if sum(int(n @ g.backward_bytes) for g, n in of) > backward:
            continue
        if sum(int(n @ g.step_bytes) for g, n in of) <= step:
            best = min(best, sum(float(n @ g.time_s) for g, n in of))
    return best


@given(st.lists(layer_choices(), min_size=1, max_size=2), st.integers(1, 200), st.integers(1, 200))
def test_counts_fit_and_are_near_the_best(
    groups: list[LayerChoices], backward: int, step: int
) -> None:
    """What is found fits both budgets; it is no faster than brute force, and slower by no more
    than the layers that the relaxation parts, two at most."""
    found = counts_within(groups, backward, step)
    best_s = least_s(groups, backward, step)
    if found is None:
        return
    of = list(zip(groups, found, strict=True))
    assert [int(n.sum()) for n in found] == [g.count for g in groups]
    assert sum(int(n @ g.backward_bytes) for g, n in of) <= backward
    assert sum(int(n @ g.step_bytes) for g, n in of) <= step
    time_s = sum(float(n @ g.time_s) for g, n in of)
    spread_s = max(float(np.ptp(g.time_s)) for g in groups)
    assert best_s <= time_s <= best_s + 2 * spread_s


def test_many_layers_lose_nothing_that_matters() -> None:
    """32 layers: activations of 10 that recomputation saves for 3 s, states of 9 that the host
    takes for 20 s. In 150 and 270 bytes the relaxation recomputes 17 layers and moves 2."""
    group = LayerChoices(
        32,
        np.array([10.0, 13.0, 33.0]),
        np.array([10, 0, 0]),
        np.array([9, 9, 0]),
    )
    (found,) = counts_within([group], 150, 270) or [np.zeros(3)]
    assert found.tolist() == [15, 15, 2]


def test_of_equal_candidates_the_first_is_kept() -> None:
    same = np.array([1.0, 1.0, 1.0]), np.array([2, 2, 3]), np.array([2, 2, 2])
    assert LayerChoices(1, *same).undominated().tolist() == [0]


def test_nothing_fits() -> None:
    group = LayerChoices(2, np.array([1.0]), np.array([3]), np.array([1]))
    assert counts_within([group], 5, 9) is None
    assert counts_within([group], 9, 0) is None
