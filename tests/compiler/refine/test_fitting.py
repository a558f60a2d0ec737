"""What is emitted fits the budget, whatever the search counted."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.programs.schedules import captured_family

from meshfold.api import plan_captured
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.shared_work import SharedWork
from meshfold.refine.program_events import with_program_events

PROBE = OpProber()
SPEC = resolve_cluster("local-cpu", 4)
LARGE = "1GB"
CASES: dict[str, dict[str, Any]] = {
    "free": {"microbatches": 1},
    "dp": {"dp": 4, "microbatches": 1},
    "zero 3": {"dp": 4, "zero": 3, "microbatches": 1},
    "tp": {"tp": 4, "sp": 1, "microbatches": 1},
    "large buckets": {"microbatches": 1, "reduce_bucket_bytes": LARGE},
}


@cache
def shared(family: str) -> SharedWork:
    return SharedWork()


def planned(family: str, pins: dict[str, Any], budget: int | None, mode: Any = "auto") -> Plan:
    options = CompileOptions(pins=pins, memory_bytes=budget, mode=mode, allow_offload=False)
    of = captured_family(family), family, SPEC, options
    return plan_captured(*of, probe=PROBE, shared=shared(family))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "dp"),
        *(pytest.param("llama", name, marks=pytest.mark.slow(3)) for name in CASES if name != "dp"),
        pytest.param("bert", "zero 3", marks=pytest.mark.slow(2)),
    ],
)
def test_the_program_of_a_plan_fits_its_budget_and_has_the_peak_that_it_prints(
    family: str, name: str
) -> None:
    rng = random.Random(name)
    mode = rng.choice(["auto", "scheduled"])
    ample = planned(family, CASES[name], None, mode).memory
    found = []
    for share in [1.0, rng.uniform(0.8, 1.0), rng.uniform(0.5, 0.8)]:
        budget = ample.reserve + round(share * (ample.peak - ample.reserve))
        try:
            plan = planned(family, CASES[name], budget, mode)
        except InfeasibleError as error:
            assert error.available_bytes in (0, budget) and "\n" not in str(error)
            continue
        found.append(plan)
        assert plan.memory.capacity == budget and plan.memory.fits
        assert plan.simulated is not None and plan.simulated.peak_bytes <= plan.memory.peak
        if plan.memory.emitted:
            assert plan.simulated.peak_bytes == plan.memory.peak
        # What is emitted is what was simulated, and of that peak.
        again = with_program_events(plan, captured_family(family).graph)
        assert again.memory == plan.memory and again.events == plan.events
    assert found


def test_what_does_not_fit_as_emitted_is_replaced_or_refused_in_one_line() -> None:
    pins = {"dp": 4, "zero": 2, "microbatches": 1}
    large = {**pins, "reduce_bucket_bytes": LARGE, "allgather_bucket_bytes": LARGE}
    ample = planned("llama", large, None)
    budget = ample.memory.peak - 1
    assert budget > ample.memory.peak - ample.memory.emitted
    replaced = planned("llama", large, budget)
    assert replaced.memory.fits and replaced.memory.capacity == budget
    assert replaced.step_s > ample.step_s
    assert "was ahead as the search counts memory; emitted it needs" in replaced.notes[-1]
    assert replaced.search.lower_bound_s <= replaced.time.step_s
    fixed = {**large, "recompute": "none"}
    with pytest.raises(InfeasibleError, match="no program fits in .* as it is emitted") as refused:
        planned("llama", fixed, budget)
    assert refused.value.available_bytes == budget < refused.value.required_bytes
    assert "\n" not in str(refused.value)


def test_a_budget_that_is_ample_is_searched_once() -> None:
    plan = planned("llama", CASES["dp"], None)
    assert not any("as the search counts" in note for note in plan.notes)
    assert replace(plan.memory, capacity=plan.memory.peak).fits
