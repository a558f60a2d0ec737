"""What a plan does for its memory budget, and the price of each of it: differences of searches."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
from support.processes.offload import cluster_with_hosts
from support.search.stack_plans import stack_plan

from meshfold.ir.plan import Plan
from meshfold.passes.pipeline.interleaved import NUM_STARTS
from meshfold.passes.planner import find
from meshfold.passes.planner.chunked_loss import fitting
from meshfold.passes.planner.memory_prices import (
    MOST_SEARCHES,
    RECOMPUTE,
    UNLIMITED_BYTES,
    ZERO,
    MemoryPrice,
    memory_prices,
    regions_of,
    why_it_fits,
)
from meshfold.passes.planner.shared_work import SharedWork


def found(memory_bytes: int | None = None, **given) -> Plan:
    return stack_plan(cluster_with_hosts(2), memory_bytes=memory_bytes, **given)


@cache
def free() -> Plan:
    return found(UNLIMITED_BYTES)


def tight_bytes() -> int:
    """A budget in which the plan without a limit does not fit."""
    return int(0.75 * free().memory.peak)


def made(step_s: float, capacity: int, peak: int, **changes) -> Plan:
    """The free plan with a step and a peak, of whose layers all differ in `changes`."""
    plan = free()
    memory = replace(plan.memory, reserve=0, capacity=capacity)
    time = replace(plan.time, optimizer_s=0.0)
    return replace(
        plan,
        simulated=None,
        time=replace(time, forward_s=time.forward_s + step_s - time.step_s),
        memory=replace(memory, reserve=peak - memory.peak),
        regions=tuple(
            replace(region, strategy=replace(region.strategy, **{"zero": 0, **changes}))
            for region in plan.regions
        ),
    )


def frontier(plans: Mapping[int, Plan], asked: list[int]):
    """The plan of the largest budget that is in `plans` and no larger than the one asked for."""

    def plan_in(num_bytes: int) -> Plan:
        asked.append(num_bytes)
        return plans[max(at for at in plans if at <= num_bytes)]

    return plan_in


GB = 10**9


def test_prices_of_a_frontier_computed_by_hand() -> None:
    tight = made(1.3, 10 * GB, 10 * GB, zero=3, recompute="full")
    middle = made(1.1, 20 * GB, 18 * GB, recompute="full")
    whole = made(1.0, UNLIMITED_BYTES, 30 * GB)
    asked: list[int] = []
    best, prices = memory_prices(
        tight, frontier({10 * GB: tight, 18 * GB: middle, 30 * GB: whole}, asked)
    )
    assert best is whole
    assert asked == [UNLIMITED_BYTES, 20 * GB]  # half way to what the free plan needs
    assert prices == (
        MemoryPrice((ZERO,), pytest.approx(0.2)),
        MemoryPrice((RECOMPUTE,), pytest.approx(0.1)),
    )
    note = why_it_fits(tight, frontier({10 * GB: tight, 18 * GB: middle, 30 * GB: whole}, []))
    n = len(regions_of(tight))
    assert note == (
        f"fits because: ZeRO 3 in {n} of {n} layers (+20.0%); full recomputation in {n} of {n} "
        f"layers (+10.0%); in all +30.0% on the step of {whole.strategy.label}, the best plan on "
        "devices of any memory, which needs 30.0 GB"
    )


def test_what_cannot_be_told_apart_has_one_price_after_so_many_searches() -> None:
    tight = made(1.5, 10 * GB, 10 * GB, recompute="selective", offload="optimizer")
    whole = made(1.0, UNLIMITED_BYTES, 30 * GB)
    asked: list[int] = []
    _, (price,) = memory_prices(tight, frontier({10 * GB: tight, 29 * GB: whole}, asked))
    assert price.mechanisms == ("offload", "recompute") and price.share == pytest.approx(0.5)
    assert len(asked) == 1 + MOST_SEARCHES
    free_only = frontier({0: tight, 29 * GB: whole}, asked := [])
    _, (price,) = memory_prices(tight, free_only, 0)
    assert asked == [UNLIMITED_BYTES] and price.share == pytest.approx(0.5)
    assert " together (+50.0%)" in why_it_fits(tight, frontier({0: tight, 29 * GB: whole}, []))


def test_what_costs_less_than_a_hundredth_of_a_step_is_not_told_apart() -> None:
    tight = made(1.009, 10 * GB, 10 * GB, zero=3, recompute="full")
    whole = made(1.0, UNLIMITED_BYTES, 30 * GB)
    _, (price,) = memory_prices(tight, frontier({0: tight, 30 * GB: whole}, asked := []))
    assert asked == [UNLIMITED_BYTES]
    assert price.mechanisms == (RECOMPUTE, ZERO) and price.share == pytest.approx(0.009)


def test_degrees_that_only_a_plan_in_between_changes_are_not_said_to_be_others() -> None:
    tight = made(1.3, 10 * GB, 10 * GB, zero=3, recompute="full")
    middle = made(1.1, 20 * GB, 18 * GB, recompute="full")
    middle = replace(middle, strategy=replace(middle.strategy, microbatches=4))
    whole = made(1.0, UNLIMITED_BYTES, 30 * GB)
    note = why_it_fits(tight, frontier({0: tight, 18 * GB: middle, 30 * GB: whole}, []))
    n = len(regions_of(tight))
    assert f"full recomputation in {n} of {n} layers and degrees together (+10.0%)" in note
    assert f"ZeRO 3 in {n} of {n} layers and degrees together (+20.0%)" in note
    assert "instead of" not in note


def test_budgets_in_between_are_searched_without_what_the_plan_does_not_need(monkeypatch) -> None:
    asked = []

    def recorded(request, plans_of):
        asked.append(request)
        return fitting(request, plans_of)

    monkeypatch.setattr(find, "fitting", recorded)
    plan = found(tight_bytes(), prices_memory=True)
    assert asked[0].num_starts == NUM_STARTS and "offload" not in asked[0].options.pins
    assert all(r.num_starts == 0 and r.options.pins["offload"] == "none" for r in asked[1:])
    assert len(asked) > 1 and "offload" not in plan.pins


def test_a_search_that_finds_worse_with_more_memory_does_not_make_a_price_negative() -> None:
    tight = made(1.2, 10 * GB, 10 * GB, recompute="full")
    worse = made(1.4, 20 * GB, 18 * GB, offload="optimizer")
    whole = made(1.0, UNLIMITED_BYTES, 30 * GB, offload="activations")
    _, prices = memory_prices(tight, frontier({0: tight, 18 * GB: worse, 30 * GB: whole}, []))
    assert all(price.share >= 0 for price in prices)
    assert sum(price.share for price in prices) == pytest.approx(0.2)


def test_prices_add_up_to_what_two_searches_differ_by() -> None:
    shared = SharedWork()
    plan = found(tight_bytes(), shared=shared)
    best, prices = memory_prices(plan, lambda num_bytes: found(num_bytes, shared=shared))
    assert best == free()
    total = plan.step_s / best.step_s - 1
    assert sum(price.share for price in prices) == pytest.approx(total) and total > 0


def test_a_plan_is_told_what_its_budget_costs_where_that_is_asked() -> None:
    plenty = found(UNLIMITED_BYTES, prices_memory=True)
    assert plenty.notes[-1].startswith("the budget costs nothing: ")
    tight, plain = found(tight_bytes(), prices_memory=True), found(tight_bytes())
    assert tight.notes[-1].startswith("fits because: ")
    assert plain == replace(tight, notes=tight.notes[:-1])
