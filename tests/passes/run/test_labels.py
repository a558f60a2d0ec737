import numpy as np
import pytest
from hypothesis import given, settings
from support.search.runs import brute_force_s, random_type, run_problems, tight_problem

from meshfold.passes.run import search as run_search
from meshfold.passes.run.problem import LayerType, NothingFits, Run, RunPlan, RunProblem
from meshfold.passes.run.search import solve_runs


@settings(max_examples=200)
@given(problem=run_problems())
def test_labels_find_the_best_plan_of_every_chain(problem: RunProblem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_search, "MAX_COUNTED", 0)
        plan = solve_runs(problem)
    best_s = brute_force_s(problem)
    if isinstance(plan, NothingFits):
        assert best_s == np.inf
        return
    assert plan.time_s == pytest.approx(best_s, rel=1e-12)
    assert not plan.capped and plan.gap == 0
    assert plan.dual_s <= best_s * (1 + 1e-12)


@pytest.mark.parametrize("num_layouts", [1, 3])
def test_a_thousand_different_layers(num_layouts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    runs = tuple(Run(random_type(rng, f"t{i}", 6, num_layouts), 1) for i in range(1000))
    conversion_s = rng.uniform(0, 0.001, (num_layouts, num_layouts))
    problem = tight_problem(runs, 0.2, conversion_s)
    monkeypatch.setattr(run_search, "LABEL_CAP", 60_000)
    plan = solve_runs(problem)
    assert not isinstance(plan, NothingFits)
    assert problem.budget_bytes is not None and plan.memory_bytes <= problem.budget_bytes
    assert [block.run for block in plan.blocks] == list(range(1000))
    assert plan.dual_s <= plan.time_s <= plan.dual_s * 1.0001
    assert plan.gap <= plan.gap_before


def test_dropped_labels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    runs = tuple(Run(random_type(rng, f"t{i}", 12), 1) for i in range(40))
    problem = tight_problem(runs, 0.2)
    full = solve_runs(problem)
    monkeypatch.setattr(run_search, "LABEL_CAP", 80)
    capped = solve_runs(problem)
    assert not isinstance(capped, NothingFits) and not isinstance(full, NothingFits)
    assert capped.capped and not full.capped
    assert full.gap == 0
    assert capped.gap >= (capped.time_s - full.time_s) / full.time_s
    assert capped.gap == pytest.approx((capped.time_s - capped.dual_s) / capped.dual_s)


@pytest.mark.parametrize("seed", range(10))
def test_without_a_limit_every_layer_is_at_its_fastest(seed: int) -> None:
    """Seconds of many sizes: sums of them are rounded otherwise in one order than in another."""
    rng = np.random.default_rng(seed)
    layers = [
        LayerType(
            f"layer {k}",
            ("a", "b", "c"),
            rng.random(3) * 10.0 ** rng.integers(-6, 3),
            rng.integers(1, 100, 3),
        )
        for k in range(400)
    ]
    found = solve_runs(RunProblem(tuple(Run(layer, 1) for layer in layers)))
    assert isinstance(found, RunPlan)
    assert found.time_s == pytest.approx(sum(x.time_s.min() for x in layers), rel=1e-9)
    assert not found.capped
