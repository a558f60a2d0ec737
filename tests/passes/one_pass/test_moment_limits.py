"""Layers under limits of bytes at several moments: found counts keep them, and stay near the best
there are."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshfold.passes.one_pass.moment_limits import LayerChoices, counts_within, least_s

BYTES = st.integers(0, 40)


@st.composite
def layer_choices(draw: st.DrawFn) -> LayerChoices:
    """A few candidates, each with its seconds and its bytes at three moments."""
    row = st.tuples(st.integers(1, 50), BYTES, BYTES, BYTES)
    time_s, *needs = np.array(draw(st.lists(row, min_size=1, max_size=4)), np.int64).T
    return LayerChoices(draw(st.integers(1, 4)), time_s.astype(float), np.stack(needs))


def every_count(group: LayerChoices) -> list[np.ndarray]:
    """All ways to give the layers of a group candidates."""
    size = len(group.time_s)
    picks = itertools.combinations_with_replacement(range(size), group.count)
    return [np.bincount(pick, minlength=size) for pick in picks]


def best_by_brute_force_s(groups: list[LayerChoices], limits: list[int]) -> float:
    """Infinite where nothing fits."""
    best = np.inf
    for counts in itertools.product(*(every_count(g) for g in groups)):
        of = list(zip(groups, counts, strict=True))
        if np.all(sum(g.needs @ n for g, n in of) <= np.array(limits)):
            best = min(best, sum(float(n @ g.time_s) for g, n in of))
    return best


GROUPS = st.lists(layer_choices(), min_size=1, max_size=2)
LIMITS = st.lists(st.integers(1, 250), min_size=3, max_size=3)


@given(GROUPS, LIMITS)
def test_counts_keep_the_limits_and_are_near_the_best(
    groups: list[LayerChoices], limits: list[int]
) -> None:
    """No faster than brute force, and slower by less than what three layers, which the relaxation
    may part, differ by."""
    found, best_s = counts_within(groups, limits), best_by_brute_force_s(groups, limits)
    if found is None:
        return
    of = list(zip(groups, found, strict=True))
    assert [int(n.sum()) for n in found] == [g.count for g in groups]
    assert all(n.min() >= 0 for n in found)
    assert np.all(sum(g.needs @ n for g, n in of) <= np.array(limits))
    time_s = sum(float(n @ g.time_s) for g, n in of)
    spread_s = max(float(np.ptp(g.time_s)) for g in groups)
    assert best_s <= time_s <= best_s + 3 * spread_s


@given(GROUPS, LIMITS)
def test_nothing_is_below_the_bound(groups: list[LayerChoices], limits: list[int]) -> None:
    best_s = best_by_brute_force_s(groups, limits)
    assert least_s(groups, limits) <= best_s * (1 + 1e-9)


def drawn(rng: np.random.Generator) -> list[LayerChoices]:
    groups = []
    for size in rng.integers(2, 5, 2):
        count, time_s = int(rng.integers(2, 6)), rng.integers(1, 50, size).astype(float)
        groups.append(LayerChoices(count, time_s, rng.integers(0, 40, (3, size))))
    return groups


def test_of_many_draws_few_lose_anything() -> None:
    """Where brute force finds a plan, nearly always the same one is found."""
    rng = np.random.default_rng(0)
    lost, missed, num = [], 0, 0
    for _ in range(300):
        groups = drawn(rng)
        layers = sum(g.count for g in groups)
        limits = [int(x) for x in rng.integers(8, 30, 3) * layers]
        best_s = best_by_brute_force_s(groups, limits)
        if not np.isfinite(best_s):
            assert counts_within(groups, limits) is None
            continue
        num += 1
        found = counts_within(groups, limits)
        if found is None:
            missed += 1
            continue
        time_s = sum(float(n @ g.time_s) for g, n in zip(groups, found, strict=True))
        lost.append(time_s / best_s - 1)
    assert num > 100 and missed <= 0.02 * num
    assert np.mean(lost) < 1e-3 and max(lost) < 0.05


def test_recomputation_helps_one_moment_and_the_host_both() -> None:
    """32 layers: activations of 10 that recomputation saves for 3 s, states of 9 that the host
    takes, too, for 20 s more. In 150 and 270 bytes 17 layers recompute, and 2 of them move."""
    group = LayerChoices(
        32, np.array([10.0, 13.0, 33.0]), np.array([[10, 0, 0], [9, 9, 0]], np.int64)
    )
    (found,) = counts_within([group], [150, 270]) or [np.zeros(3)]
    assert found.tolist() == [15, 15, 2]


def test_of_equal_candidates_the_first_is_kept() -> None:
    group = LayerChoices(1, np.ones(3), np.array([[2, 2, 3], [2, 2, 2]]))
    assert group.undominated().tolist() == [0]


def test_nothing_fits() -> None:
    group = LayerChoices(2, np.array([1.0]), np.array([[3], [1]]))
    for limits in ([5, 9], [9, 0], [9, 1]):
        assert counts_within([group], limits) is None
    assert least_s([group], [5, 9]) == 0.0
    assert counts_within([group], [6, 2]) is not None
