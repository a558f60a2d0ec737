import dataclasses
import itertools

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from support.search.runs import brute_force_s, random_type, run_problems, tight_problem

from meshfold.passes.run.chain import close_conversions
from meshfold.passes.run.problem import (
    LayerType,
    NothingFaster,
    NothingFits,
    Run,
    RunPlan,
    RunProblem,
)
from meshfold.passes.run.search import NODE_CAP, price_blocks, solve_runs


def solved(problem: RunProblem) -> RunPlan:
    plan = solve_runs(problem)
    assert isinstance(plan, RunPlan)
    return plan


@settings(max_examples=300)
@given(problem=run_problems())
def test_plan_is_the_best_of_all(problem: RunProblem) -> None:
    plan = solve_runs(problem)
    best_s = brute_force_s(problem)
    if isinstance(plan, NothingFits):
        assert best_s == np.inf
        assert plan == NothingFits(problem.least_bytes, problem.budget_bytes or 0)
        return
    assert plan.time_s == pytest.approx(best_s, rel=1e-12)
    assert problem.budget_bytes is not None and plan.memory_bytes <= problem.budget_bytes
    assert (plan.time_s, plan.conversion_s, plan.memory_bytes) == price_blocks(problem, plan.blocks)
    assert plan.gap == 0 and not plan.capped
    assert 0 <= plan.gap_before and plan.dual_s <= plan.time_s
    assert [sum(count.values()) for count in plan.counts(len(problem.runs))] == [
        run.count for run in problem.runs
    ]
    assert [block.run for block in plan.blocks] == sorted(block.run for block in plan.blocks)


def solver_optimum_s(problem: RunProblem) -> float:
    """HiGHS on one binary per (layer, strategy) and flows between the layouts of neighbours."""
    layers = [run.layer_type for run in problem.runs for _ in range(run.count)]
    assert problem.conversion_s is not None and problem.budget_bytes is not None
    closed = close_conversions(problem.conversion_s)
    size = len(closed)
    starts = np.concatenate(([0], np.cumsum([len(t.strategies) for t in layers])))
    num_picks, num_links = int(starts[-1]), (len(layers) - 1) * size * size
    # HiGHS works to 1e-7 absolutely: milliseconds and megabytes keep that harmless.
    costs = np.concatenate([t.time_s for t in layers] + [closed.ravel()] * (len(layers) - 1)) * 1e3
    rows: list[np.ndarray] = []
    sums: list[float] = []

    def row() -> np.ndarray:
        rows.append(np.zeros(num_picks + num_links))
        return rows[-1]

    for i, layer in enumerate(layers):
        row()[starts[i] : starts[i + 1]] = 1
        sums.append(1)
        assert layer.layouts is not None
        for x, side in itertools.product(range(size), (0, 1)):
            if i - 1 + side < 0 or i + side >= len(layers):
                continue
            line = row()
            sums.append(0)
            line[starts[i] : starts[i + 1]] = layer.layouts == x
            links = num_picks + (i - 1 + side) * size * size + np.arange(size * size)
            line[links.reshape(size, size)[x] if side else links.reshape(size, size)[:, x]] -= 1
    memory = np.concatenate([t.memory_bytes for t in layers] + [np.zeros(num_links)]) / 1e6
    free = (problem.budget_bytes - problem.fixed_bytes) / 1e6
    result = milp(
        costs,
        constraints=[
            LinearConstraint(scipy.sparse.csr_array(np.array(rows)), sums, sums),
            LinearConstraint(memory[None, :], -np.inf, free),
        ],
        integrality=np.concatenate((np.ones(num_picks), np.zeros(num_links))),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-9},
    )
    assert result.status == 0
    return float(result.fun) / 1e3


@pytest.mark.parametrize(
    ("counts", "num_layouts", "share"),
    [((8,), 1, 0.15), ((10,), 3, 0.2), ((1, 8, 1), 2, 0.1), ((6, 6), 2, 0.3), ((5, 5), 1, 0.05)],
)
def test_equals_the_solver(counts: tuple[int, ...], num_layouts: int, share: float) -> None:
    rng = np.random.default_rng(len(counts) + num_layouts)
    runs = tuple(Run(random_type(rng, f"t{i}", 8, num_layouts), n) for i, n in enumerate(counts))
    conversion_s = rng.uniform(0, 0.002, (num_layouts, num_layouts))
    problem = tight_problem(runs, share, conversion_s)
    assert solved(problem).time_s == pytest.approx(solver_optimum_s(problem), rel=1e-7)


@settings(max_examples=60)
@given(problem=run_problems(), extra=st.lists(st.integers(0, 9), min_size=2, max_size=5))
def test_more_memory_is_never_slower(problem: RunProblem, extra: list[int]) -> None:
    budgets = itertools.accumulate(extra, initial=problem.least_bytes)
    plans = [solved(dataclasses.replace(problem, budget_bytes=budget)) for budget in budgets]
    times = [plan.time_s for plan in plans]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(times))
    duals = [plan.dual_s for plan in plans]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(duals))


def test_more_memory_is_never_slower_in_deep_runs() -> None:
    rng = np.random.default_rng(5)
    runs = (Run(random_type(rng, "layer", 24, 2), 96),)
    conversion_s = np.array([[0.0, 0.003], [0.001, 0.0]])
    times = [
        solved(tight_problem(runs, share, conversion_s)).time_s for share in np.linspace(0, 0.3, 40)
    ]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(times))


@given(problem=run_problems(), seed=st.integers(0, 1000))
def test_order_of_strategies_changes_nothing(problem: RunProblem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shuffled: dict[int, LayerType] = {}
    for run in problem.runs:
        layer = run.layer_type
        order = rng.permutation(len(layer.strategies))
        assert layer.layouts is not None
        shuffled[id(layer)] = LayerType(
            layer.name,
            tuple(layer.strategies[i] for i in order),
            layer.time_s[order],
            layer.memory_bytes[order],
            layer.layouts[order],
        )
    runs = tuple(Run(shuffled[id(run.layer_type)], run.count) for run in problem.runs)
    plans = [solve_runs(problem), solve_runs(dataclasses.replace(problem, runs=runs))]
    texts = []
    for plan in plans:
        if isinstance(plan, RunPlan):
            blocks = tuple(dataclasses.replace(block, strategy=0) for block in plan.blocks)
            plan = dataclasses.replace(plan, blocks=blocks)
        texts.append(repr(plan))
    assert texts[0] == texts[1]


def test_conversion_is_paid_once_per_change_in_its_direction() -> None:
    fast = LayerType(
        "t", ("wide", "small"), np.array([1.0, 2.0]), np.array([10, 1]), np.array([0, 1])
    )
    conversion_s = np.array([[0.0, 0.25], [0.125, 0.0]])
    plan = solved(RunProblem((Run(fast, 6),), 33, 0, conversion_s))
    assert [(block.name, block.count) for block in plan.blocks] == [("small", 3), ("wide", 3)]
    assert plan.conversion_s == 0.125
    assert plan.time_s == 3 * 2.0 + 3 * 1.0 + 0.125
    # A run before it in layout 0 makes the other order cheaper: out once instead of in twice.
    ends = LayerType("e", ("only",), np.array([0.5]), np.array([0]), np.array([0]))
    plan = solved(RunProblem((Run(ends, 1), Run(fast, 6)), 33, 0, conversion_s))
    assert [(block.name, block.count) for block in plan.blocks] == [
        ("only", 1),
        ("wide", 3),
        ("small", 3),
    ]
    assert plan.time_s == 0.5 + 9.0 + 0.25


def test_a_conversion_dearer_than_what_it_saves_is_not_made() -> None:
    layer = LayerType(
        "t", ("wide", "small"), np.array([1.0, 2.0]), np.array([10, 1]), np.array([0, 1])
    )
    plan = solved(RunProblem((Run(layer, 6),), 33, 0, np.full((2, 2), 3.5)))
    assert plan.counts(1) == ({"small": 6},)


def test_unlimited_memory_takes_the_fastest_and_says_what_it_needs() -> None:
    layer = LayerType("t", ("a", "b"), np.array([1.0, 2.0]), np.array([10, 1]))
    plan = solved(RunProblem((Run(layer, 1000),), None, 7))
    assert plan.counts(1) == ({"a": 1000},)
    assert (plan.time_s, plan.memory_bytes, plan.gap_before) == (1000.0, 10_007, 0.0)


def test_too_little_memory_names_the_least() -> None:
    layer = LayerType("t", ("a", "b"), np.array([1.0, 2.0]), np.array([10, 3]))
    problem = RunProblem((Run(layer, 4),), 18, 7)
    assert solve_runs(problem) == NothingFits(least_bytes=19, budget_bytes=18)
    plan = solved(dataclasses.replace(problem, budget_bytes=19))
    assert plan.memory_bytes == 19


def test_gap_before_is_of_the_rounded_relaxation() -> None:
    # Slow 3 s / 0 bytes, fast 1 s / 4 bytes, room for 1.5 fast layers of 2; both "mid" fit exactly.
    layer = LayerType("t", ("fast", "mid", "slow"), np.array([1.0, 1.75, 3.0]), np.array([4, 3, 0]))
    plan = solved(RunProblem((Run(layer, 2),), 6))
    assert plan.counts(1) == ({"mid": 2},)
    assert (plan.dual_s, plan.gap) == (3.0, 0.0)
    assert plan.gap_before == pytest.approx((4.0 - 3.0) / 3.0)


def test_cap_keeps_a_plan_with_an_honest_gap() -> None:
    rng = np.random.default_rng(8)
    runs = tuple(Run(random_type(rng, f"t{i}", 40, 3), 9) for i in range(3))
    problem = tight_problem(runs, 0.2, rng.uniform(0, 0.002, (3, 3)))
    capped, full = solve_runs(problem, node_cap=1), solved(problem)
    assert isinstance(capped, RunPlan) and capped.capped and not full.capped
    assert capped.memory_bytes <= (problem.budget_bytes or 0)
    assert capped.gap >= (capped.time_s - full.time_s) / full.time_s
    assert capped.gap > 0 == full.gap


@pytest.mark.parametrize("count", [8, 1000])
def test_effort_is_flat_in_depth(count: int) -> None:
    rng = np.random.default_rng(4)
    runs = (
        Run(random_type(rng, "embedding", 8, 3), 1),
        Run(random_type(rng, "layer", 50, 3), count),
        Run(random_type(rng, "head", 8, 3), 1),
    )
    plan = solved(tight_problem(runs, 0.25, rng.uniform(0, 0.01, (3, 3))))
    assert plan.nodes < 300
    assert sum(plan.counts(3)[1].values()) == count


@settings(max_examples=150)
@given(
    problem=run_problems(),
    share=st.sampled_from((0.5, 0.9, 1.0, 1.2)),
    node_cap=st.sampled_from((1, NODE_CAP)),
)
def test_beside_an_incumbent_the_best_plan_or_a_bound(
    problem: RunProblem, share: float, node_cap: int
) -> None:
    best_s = brute_force_s(problem)
    if best_s == np.inf:
        return
    incumbent_s = share * best_s
    plan = solve_runs(problem, node_cap=node_cap, incumbent_s=incumbent_s)
    if isinstance(plan, NothingFaster):
        assert plan.lower_s <= best_s * (1 + 1e-12)
        assert share < 1.0 or node_cap == 1
        return
    assert isinstance(plan, RunPlan)
    if node_cap > 1 and share >= 1.0:
        assert plan.time_s == pytest.approx(best_s, rel=1e-12)
