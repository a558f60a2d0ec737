"""The best plans in several settings."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.plans import example_plan

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.report.plan_rows import PlanRow, Setting
from meshfold.studies.captured_models import CapturedModels
from meshfold.studies.plan_rows import Point, plan_rows

GB = 10**9


class Budgets(CapturedModels):
    """Finds, by budget in GB, a plan of that step and peak, and writes down what was asked."""

    def __init__(self, plans: Mapping[int, tuple[float, int]]) -> None:
        self.plans, self.asked = plans, list[int]()

    def plan(self, cluster: ClusterSpec, options: CompileOptions, **_: object) -> Plan:
        assert options.memory_bytes is not None
        self.asked.append(options.memory_bytes // GB)
        if self.asked[-1] not in self.plans:
            raise InfeasibleError(f"{self.asked[-1]} GB", binding_constraint="memory")
        step_s, peak = self.plans[self.asked[-1]]
        plan = example_plan()
        memory = replace(plan.memory, capacity=options.memory_bytes, reserve=0)
        return replace(
            plan,
            simulated=None,
            time=replace(plan.time, forward_s=plan.time.forward_s + step_s - plan.time.step_s),
            memory=replace(memory, reserve=peak * GB - memory.peak),
        )

    def rows(self, *budgets: int) -> tuple[PlanRow, ...]:
        spec = resolve_cluster("local-cpux2")
        asked = [Point(spec, Setting(2, 4, memory_bytes=budget * GB)) for budget in budgets]
        return plan_rows(self, asked, CompileOptions(), lambda *_: None)


def test_a_plan_is_the_best_in_every_smaller_budget_that_it_fits() -> None:
    models = Budgets({80: (1.0, 50), 40: (1.5, 38)})
    rows = models.rows(20, 40, 60, 80)
    assert models.asked == [80, 40, 20]
    steps = [row.figures.step_s if row.figures else None for row in rows]
    assert steps == [None, pytest.approx(1.5), pytest.approx(1.0), pytest.approx(1.0)]
    assert [row.setting.memory_bytes for row in rows] == [20 * GB, 40 * GB, 60 * GB, 80 * GB]


def test_a_plan_fits_in_every_larger_budget() -> None:
    models = Budgets({80: (1.6, 70), 40: (1.5, 38)})
    low, middle, high = models.rows(40, 60, 80)
    assert models.asked == [80, 60, 40]
    assert low.figures and middle.figures and high.figures
    assert low.figures.step_s == middle.figures.step_s == high.figures.step_s
    assert low.figures.gap is not None and middle.figures.gap is high.figures.gap is None
    assert (middle.setting.memory_bytes, high.setting.memory_bytes) == (60 * GB, 80 * GB)


@given(
    st.dictionaries(
        st.integers(1, 12), st.tuples(st.floats(1, 9), st.integers(1, 12)), max_size=8
    ).map(lambda plans: {b: (step, min(peak, b)) for b, (step, peak) in plans.items()})
)
def test_no_step_is_longer_with_more_memory_and_none_exceeds_its_budget(plans) -> None:
    plans = {13: (1.0, 13), **plans}
    rows = Budgets(plans).rows(*range(1, 14))
    steps = [row.figures.step_s if row.figures else float("inf") for row in rows]
    assert steps == sorted(steps, reverse=True)
    for row in rows:
        assert row.figures is None or row.figures.peak_bytes <= row.setting.memory_bytes


class Models(CapturedModels):
    """Has one plan for every setting but those with errors, and writes down what was asked."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors, self.asked = errors, list[tuple[int, int | None, int | None]]()

    def plan(self, cluster: ClusterSpec, options: CompileOptions, **sizes: object) -> Plan:
        batch = sizes["batch"]
        assert batch is None or isinstance(batch, int)
        self.asked.append((cluster.num_devices, batch, options.memory_bytes))
        if batch in self.errors:
            raise self.errors[batch]
        return example_plan()


def points(*batches: int) -> list[Point]:
    spec = resolve_cluster("local-cpux2")
    return [Point(spec, Setting(2, batch, memory_bytes=batch)) for batch in batches]


def test_a_row_per_point_with_a_plan_or_a_reason() -> None:
    models = Models({4: InfeasibleError("too little", binding_constraint="memory")})
    told: list[tuple[int, int]] = []
    options = CompileOptions(memory_bytes=10)
    rows = plan_rows(models, points(4, 8), options, lambda k, n: told.append((k, n)))
    assert models.asked == [(2, 8, 8), (2, 4, 4)] and told == [(0, 2), (1, 2)]
    assert (rows[0].figures, rows[0].refusal, rows[0].setting.batch) == (None, "too little", 4)
    assert rows[1].figures is not None and rows[1].figures.strategy == "dp2 x tp4+sp, zero3"
    assert rows[1].setting == Setting(8, 16, 4096, 40 * 2**30)


def test_what_is_wrong_everywhere_is_raised() -> None:
    same = {4: OptionError("no such rule"), 8: OptionError("no such rule")}
    with pytest.raises(OptionError, match="no such rule"):
        plan_rows(Models(same), points(4, 8), CompileOptions(), lambda *_: None)
    other = {**same, 8: OptionError("another")}
    assert len(plan_rows(Models(other), points(4, 8), CompileOptions(), lambda *_: None)) == 2
