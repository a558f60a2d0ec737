"""Which schedules of several virtual stages are searched, and what is said of the others."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.hugging_face import BATCH, tiny_model
from support.search.stages import brute_force_s, layer_costs

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.pipeline.schedules import V_ORDERS, Schedule, ScheduleKind
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.pipeline import interleaved
from meshfold.passes.pipeline.bounds import KernelSums
from meshfold.passes.pipeline.interleaved import (
    INTERLEAVED,
    V_SCHEDULES,
    InterleavedOutcome,
    even_step_s,
    fluid_estimate_s,
    search_interleaved,
)
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.virtual_stages import VirtualStageSearch
from meshfold.report.search import proof_text

LAUNCH_S = 0.5


def chain(
    num_layers: int = 8, num_microbatches: int = 4, memory_bytes: int = 1000, weight_s: float = 0.0
) -> StageProblem:
    layer = LayerCosts.build(
        "layer",
        ("s",),
        forward_s=1.0,
        backward_s=2.0,
        weight_s=weight_s,
        state_bytes=1,
        activation_bytes=1,
    )
    return StageProblem.build(
        (LayerRun(layer, num_layers),),
        num_stages=2,
        num_microbatches=num_microbatches,
        memory_bytes=memory_bytes,
    )


def kernels(problem: StageProblem) -> KernelSums:
    """Of a chain with one strategy."""
    sums = (
        sum(run.count * float(getattr(run.layer, name)[0]) for run in problem.runs)
        for name in ("forward_s", "total_s", "weight_s")
    )
    return KernelSums(*sums)


def degrees(problem: StageProblem, *, is_priced: bool = True) -> Any:
    of = SimpleNamespace(chain=problem)
    return SimpleNamespace(
        kernels=kernels(problem),
        is_typed=is_priced,
        is_priced=is_priced,
        has_replicas=False,
        problem=of,
    )


def schedule(
    virtual_stages: int, num_microbatches: int = 4, kind: ScheduleKind = ScheduleKind.INTERLEAVED
) -> Schedule:
    return Schedule(kind, 2, num_microbatches, num_virtual_stages=virtual_stages)


def search(
    problem: StageProblem, schedules: list[Schedule], beat_s: float, *, is_priced: bool = True
) -> InterleavedOutcome:
    of = {7: degrees(problem, is_priced=is_priced)}
    return search_interleaved(of, {7: schedules}, beat_s, LAUNCH_S)


def estimate_s(problem: StageProblem, of: Schedule) -> float:
    return max(fluid_estimate_s(problem, of, kernels(problem)), even_step_s(problem, of, {}))


def test_the_estimate_of_even_stages_is_their_step() -> None:
    problem = chain()
    # 4 layers a device, 4 microbatches, and half a stage of 4 layers to fill and drain.
    assert estimate_s(problem, schedule(2)) == pytest.approx(4 * 12 + 6)
    assert estimate_s(problem, schedule(4)) == pytest.approx(4 * 12 + 3)
    # 8 layers in 6 parts, 4 on either device: a part of 2 layers is a layer more to fill with.
    assert estimate_s(problem, schedule(3)) == pytest.approx(4 * 12 + 4 + 3)
    assert estimate_s(chain(memory_bytes=4), schedule(2)) == np.inf


@pytest.mark.parametrize("kind", [ScheduleKind.INTERLEAVED_ZERO_BUBBLE, *V_ORDERS])
def test_split_backwards_fill_their_gaps(kind: ScheduleKind) -> None:
    """A third each, forward, input gradients, weight gradients: half a forward of 4 layers."""
    problem = chain(num_microbatches=8, weight_s=1.0)
    of = schedule(2, 8, kind)
    assert estimate_s(problem, of) == pytest.approx(8 * 12 + 2)
    found = VirtualStageSearch(problem, of)
    found.find(np.inf)
    assert found.step_s == pytest.approx(8 * 12 + 2)


def test_the_fastest_is_found_and_the_bound_covers_what_was_tried() -> None:
    found = search(chain(), [schedule(v) for v in (4, 2, 3)], 60.0)
    number, plan = found.found[0]
    assert number == 7 and plan.schedule == schedule(4)
    assert plan.step_s == pytest.approx(4 * 12 + 3)
    assert plan.lower_bound_s <= plan.step_s and not found.left_out
    step_s = plan.step_s + LAUNCH_S
    assert len(found.searches) == 1  # the others are proven to take longer
    assert 48.0 <= found.bound_s(step_s) <= step_s


def test_a_v_wins_where_layers_do_not_divide_into_more() -> None:
    kinds = schedule(2), schedule(2, kind=ScheduleKind.ZBV)
    found = search(chain(4, weight_s=1.0), list(kinds), 1000.0)
    assert found.found[0][1].schedule == kinds[1] and not found.left_out


def test_what_bounds_rule_out_is_not_left_out() -> None:
    """The kernels take 4 * 24 / 2 s, with the launch 48.5."""
    two = [schedule(2), schedule(2, kind=ScheduleKind.ZBV)]
    found = search(chain(), two, 40.0)
    assert found.found == () and found.searches == () and found.left_out == {}
    assert search(chain(), two, 48.6).left_out == {INTERLEAVED: 1, V_SCHEDULES: 1}


def test_plans_close_to_the_best_are_found_too() -> None:
    """66.5 s with two, 64.5 with four, of which 63.5 are proven."""
    schedules = [schedule(v) for v in (2, 4)]
    assert len(search(chain(10, weight_s=1.0), schedules, 66.0).found) == 2
    none = search(chain(10, weight_s=1.0), schedules, 63.7)  # nothing to gain
    assert none.found == () and none.searches == () and none.bound_s(63.7) == 63.7


def test_only_so_many_are_tried_and_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "MOST_TRIED", 0)
    two = [schedule(2), schedule(2, kind=ScheduleKind.ZBV)]
    assert search(chain(), two, 1000.0).left_out == {INTERLEAVED: 1, V_SCHEDULES: 1}
    monkeypatch.setattr(interleaved, "MOST_TRIED", 3)
    monkeypatch.setattr(interleaved, "MOST_PRICED", 0)
    found = search(chain(), [schedule(2)], 1000.0, is_priced=False)
    assert found.searches == () and found.left_out == {INTERLEAVED: 1}


def test_a_plan_far_above_its_estimate_speaks_for_its_degrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same order, and of as many passes of a microbatch."""
    tried: list[Schedule] = []

    class Slow:
        bound_s, proven_s, step_s = 0.0, 0.0, 200.0

        def __init__(self, _: StageProblem, schedule: Schedule) -> None:
            tried.append(schedule)

        def find(self, _: float) -> None:
            """Finds what takes 200 s, four times what is estimated."""

        def find_further(self, _: int) -> None:
            """Finds nothing faster."""

        def plan(self, *_: float, capped: bool) -> None:
            """Nothing is asked about it."""

    monkeypatch.setattr(interleaved, "VirtualStageSearch", Slow)
    split = [schedule(v, kind=ScheduleKind.INTERLEAVED_ZERO_BUBBLE) for v in (2, 4)]
    fused, in_a_v = [schedule(v) for v in (2, 3, 4)], schedule(2, kind=ScheduleKind.ZBV)
    found = search(chain(weight_s=1.0), [*fused, *split, in_a_v], 60.0)
    kinds = [of.kind for of in tried]
    assert len(kinds) == len(set(kinds)) == 3 and found.found == ()
    assert found.left_out == {INTERLEAVED: 3}
    tried.clear()
    search(chain(weight_s=1.0), fused, 300.0)
    assert len(tried) == 3, "what is close to the best plan may win as simulated"


def test_few_microbatches_are_worth_no_region_search() -> None:
    of = schedule(2, 1, ScheduleKind.ZBV)
    found = search(chain(num_microbatches=1), [of], 1000.0, is_priced=False)
    assert found.searches == () and found.left_out == {V_SCHEDULES: 1}
    assert search(chain(num_microbatches=1), [of], 1000.0).left_out == {}


def test_what_is_too_long_to_simulate_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "MOST_PASSES", 16)
    found = search(chain(), [schedule(2), schedule(4)], 1000.0)
    assert [plan.schedule for _, plan in found.found] == [schedule(2)]
    assert found.left_out == {INTERLEAVED: 1}


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_no_division_is_below_what_is_proven(seed: int) -> None:
    """Every division of four to six layers, two strategies each, brute force."""
    draws = np.random.default_rng(seed)
    kind = (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, *V_ORDERS)[seed % 3]
    layers = [layer_costs(f"t{i}", draws, 2, sync=seed % 5 == 0) for i in range(2)]
    problem = StageProblem.build(
        tuple(LayerRun(layer, int(draws.integers(2, 4))) for layer in layers),
        num_stages=2,
        num_microbatches=2 * int(draws.integers(1, 4)),
        memory_bytes=draws.integers(60, 320, 2),
        hop_s=float(draws.integers(0, 4)),
    )
    of = schedule(2, problem.num_microbatches, kind)
    best_s = brute_force_s(problem, [of])
    found = search(problem, [of], 1e9)
    for _, plan in found.found:
        assert best_s * (1 - 1e-9) <= plan.step_s
        bound_s = found.bound_s(plan.step_s + LAUNCH_S)
        assert bound_s <= (best_s + LAUNCH_S) * (1 + 1e-9)


def test_what_is_left_out_is_no_leaf_of_the_tree() -> None:
    found = find_plan_for(
        capture(*tiny_model("llama", layers=4)).graph,
        resolve_cluster("dgx-a100-80", 4),
        CompileOptions(pins={"pp": 2, "microbatches": 2}),
        model_name="llama",
        batch_size=BATCH,
        probe=OpProber(),
    )
    search = found.search
    assert search.num_leaves >= sum(search.pruned.values())
    assert INTERLEAVED not in search.pruned and V_SCHEDULES not in search.pruned
    assert all(count > 0 for count in search.left_out.values())
    text = proof_text(found)
    assert all(f"{name} ({count:,})" in text for name, count in search.left_out.items())
