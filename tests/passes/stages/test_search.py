"""Stage search against brute force over all divisions, strategies and schedules; its
certificate."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search.stages import (
    all_boundaries,
    allowed_schedules,
    brute_force_s,
    deep_problem,
    default_schedules,
    kept_bytes,
    random_problem,
    search_stages,
    seeds,
)

from meshfold.cost_models.pipeline.makespan import StageTimes, simulate_actions
from meshfold.cost_models.pipeline.schedules import (
    Schedule,
    ScheduleKind,
    measured_in_flight,
    resident_by_virtual_stage,
)
from meshfold.errors import OptionError
from meshfold.passes.stages import search as stage_search
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.schedules import offered_schedules

ROUNDING = 1e-9


def with_any_warm_up(num_devices: int, num_microbatches: int, num_layers: int) -> list[Schedule]:
    """1F1B as it is offered where it is not pinned, which leaves the least warm-up alone."""
    offered = offered_schedules(num_devices, num_microbatches, num_layers)
    return [s for s in offered if s.kind is ScheduleKind.ONE_F_ONE_B]


@settings(max_examples=300)
@given(seeds, st.booleans())
def test_brute_force(seed, all_schedules):
    problem = random_problem(seed)
    schedules = allowed_schedules(problem)
    if not all_schedules:
        schedules = [schedules[seed % len(schedules)]]
    best_s = brute_force_s(problem, schedules)
    plan = search_stages(problem, schedules)
    if plan is None:
        assert best_s == np.inf
        return
    assert 0 <= plan.gap <= plan.gap_before
    assert plan.lower_bound_s <= best_s * (1 + ROUNDING)
    assert plan.step_s >= best_s * (1 - ROUNDING)


@settings(max_examples=200)
@given(
    seeds,
    st.sampled_from(
        [(n, None) for n in (1, 2, 4)] + [(stage_search.MAX_SOLVED, x) for x in (0.05, 0.2)]
    ),
)
def test_a_search_that_stops_early_proves_no_more_than_it_knows(seed, options):
    problem = random_problem(seed)
    schedules = allowed_schedules(problem)
    max_solved, tolerance = options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_search, "MAX_SOLVED", max_solved)
        plan = search_stages(problem, schedules, tolerance=tolerance)
    if plan is not None:
        best_s = brute_force_s(problem, schedules)
        assert plan.lower_bound_s <= best_s * (1 + ROUNDING)
        assert plan.step_s <= best_s * (1 + plan.gap + ROUNDING)


@settings(max_examples=100)
@given(seeds)
def test_plan_is_what_it_says(seed):
    """Times, memory and in-flight numbers of the stages follow from their strategies; several
    stages on a device are held to the same in test_virtual_stages."""
    problem = random_problem(seed)
    plan = search_stages(
        problem, [s for s in default_schedules(problem) if s.num_virtual_stages == 1]
    )
    if plan is None:
        return
    held = measured_in_flight(plan.schedule.actions())
    moments = resident_by_virtual_stage(plan.schedule, weights_apart=True)
    for i, stage in enumerate(plan.stages):
        transient, kept = 0, [n[0] * int(problem.resident_bytes[stage.first]) for n in moments[i]]
        forward_s = sync_s = 0.0
        for block in stage.blocks:
            costs = problem.runs[block.run].layer
            at = costs.strategies.index(block.strategy)
            forward_s += block.count * costs.forward_s[at]
            sync_s += block.count * costs.sync_s[at]
            each = costs.activation_bytes[at], costs.put_off_bytes[at]
            passes = [kept_bytes(ns, each, costs.update_bytes[at]) for ns in moments[i]]
            kept = [
                now + block.count * (costs.state_bytes[at] + x)
                for now, x in zip(kept, passes, strict=True)
            ]
            transient = max(transient, int(costs.transient_bytes[at]))
        assert stage.in_flight == held[i]
        assert (stage.forward_s, stage.sync_s) == pytest.approx((forward_s, sync_s))
        assert stage.memory_bytes == max(kept) + transient <= problem.memory_bytes[i]
        placed = [(block.run, block.count) for block in stage.blocks]
        counts = {run: sum(n for r, n in placed if r == run) for run, _ in placed}
        assert tuple(counts.items()) == problem.run_slices(stage.first, stage.end)
    times = StageTimes.build(
        [stage.forward_s for stage in plan.stages],
        [stage.backward_s for stage in plan.stages],
        weight_s=[stage.weight_s for stage in plan.stages],
        hop_s=problem.hop_s[[stage.first for stage in plan.stages[1:]]],
    )
    ends = simulate_actions(plan.schedule.actions(), times)
    step_s = max(ends + [stage.sync_s for stage in plan.stages])
    assert plan.step_s == pytest.approx(step_s, rel=1e-12)


@pytest.mark.parametrize("m, most", [(4, 0.05), (8, 0.005), (32, 0.001)])
def test_gap_closes(m, most):
    schedules = with_any_warm_up(4, m, 32)
    plan = search_stages(deep_problem(m=m), schedules)
    assert plan.gap <= most
    assert not plan.capped


@pytest.mark.slow
def test_more_memory_is_never_slower_than_the_gap_allows():
    before = None
    for memory in range(300, 700, 20):
        plan = search_stages(deep_problem(memory_bytes=memory))
        if plan is None:
            assert before is None
            continue
        if before is not None:
            assert plan.step_s <= before * (1 + plan.gap + ROUNDING)
        before = plan.step_s
    assert before is not None


@pytest.mark.slow
def test_faster_links_and_devices_are_never_slower_than_the_gap_allows():
    for slow, fast in (
        (deep_problem(hop_s=4.0), deep_problem(hop_s=1.0)),
        (deep_problem(hop_s=1.0), deep_problem()),
        (deep_problem(scale=1.5), deep_problem()),
    ):
        plan = search_stages(fast)
        assert plan.step_s <= search_stages(slow).step_s * (1 + plan.gap + ROUNDING)


def test_transfers_make_the_warm_up_deeper():
    roomy = 10_000
    every = with_any_warm_up(4, 64, 32)
    still = search_stages(deep_problem(m=64, memory_bytes=roomy), every)
    moving = search_stages(deep_problem(m=64, memory_bytes=roomy, hop_s=5.0), every)
    fixed = [Schedule(ScheduleKind.ONE_F_ONE_B, 4, 64)]
    shallow = search_stages(deep_problem(m=64, memory_bytes=roomy, hop_s=5.0), fixed)
    assert moving.schedule.extra_warm_up > 0
    assert still.step_s <= moving.step_s < shallow.step_s


def uniform(name, seconds, *, state=10, activation=1):
    return LayerCosts.build(
        name,
        ("only",),
        forward_s=seconds,
        backward_s=2 * seconds,
        state_bytes=state,
        activation_bytes=activation,
    )


def layers_per_stage(plan):
    return [stage.end - stage.first for stage in plan.stages]


def test_heavy_head_and_embedding_get_fewer_layers_beside_them():
    layer = uniform("layer", 1.0)
    runs = (
        LayerRun(uniform("embedding", 3.0), 1),
        LayerRun(layer, 23),
        LayerRun(uniform("head", 6.0), 1),
    )
    problem = StageProblem.build(runs, num_stages=4, num_microbatches=64, memory_bytes=10_000)
    plan = search_stages(problem, with_any_warm_up(4, 64, 25))
    assert layers_per_stage(plan) == [6, 8, 8, 3]
    assert plan.step_s == pytest.approx((64 + 3) * 24, rel=1e-12)
    assert plan.gap <= ROUNDING


@pytest.mark.parametrize(
    ("embedding", "head", "num_layers", "p", "expected"),
    [(4.0, 0.0, 8, 3, [1, 4, 4]), (0.0, 4.0, 8, 3, [4, 4, 1]), (0.0, 0.0, 7, 3, [3, 2, 2])],
    ids=["embedding", "head", "seven layers"],
)
def test_uneven_splits_are_the_best_of_all(embedding, head, num_layers, p, expected):
    """A heavy first or last stage, and 7 layers on 3 stages, against every division."""
    runs = [LayerRun(uniform("layer", 1.0), num_layers)]
    runs = [LayerRun(uniform("embedding", embedding), 1)] * (embedding > 0) + runs
    runs += [LayerRun(uniform("head", head), 1)] * (head > 0)
    problem = StageProblem.build(
        tuple(runs), num_stages=p, num_microbatches=12, memory_bytes=10_000
    )
    schedules = with_any_warm_up(p, 12, problem.num_layers)
    plan = search_stages(problem, schedules)
    assert layers_per_stage(plan) == expected
    assert plan.step_s == pytest.approx(brute_force_s(problem, schedules), rel=1e-12)
    every = default_schedules(problem)
    best_s = brute_force_s(problem, every)
    plan = search_stages(problem, every)
    assert plan.lower_bound_s <= best_s * (1 + ROUNDING)
    assert plan.step_s == pytest.approx(best_s, rel=1e-12)


def test_more_microbatches_never_cost_more_than_the_gap_allows():
    """The same batch in more, smaller microbatches whose passes take less in proportion."""
    before_s = np.inf
    for m in (8, 16, 32, 64):
        seconds = {"embedding": 3.0, "layer": 1.0, "head": 6.0}
        runs = tuple(
            LayerRun(uniform(name, s * 64 / m), 23 if name == "layer" else 1)
            for name, s in seconds.items()
        )
        problem = StageProblem.build(
            runs, num_stages=4, num_microbatches=m, memory_bytes=10_000, hop_s=6.4 / m
        )
        plan = search_stages(problem)
        assert plan.step_s <= before_s * (1 + plan.gap + ROUNDING)
        before_s = plan.step_s


def test_memory_moves_layers_to_later_stages():
    """Early stages hold more microbatches, so the budget caps their layers, not the time."""
    problem = StageProblem.build(
        (LayerRun(uniform("layer", 1.0, state=0, activation=10), 12),),
        num_stages=3,
        num_microbatches=6,
        memory_bytes=90,
    )
    plan = search_stages(problem, [Schedule(ScheduleKind.ONE_F_ONE_B, 3, 6)])
    assert [stage.in_flight for stage in plan.stages] == [3, 2, 1]
    assert layers_per_stage(plan)[0] == 3
    assert plan.memory_bytes[0] == 90


def test_encoder_output_is_resident_on_the_stages_after_it():
    """Divisions inside the decoder carry the encoder's output: it is resident and
    transferred."""
    runs = (LayerRun(uniform("encoder", 1.0), 6), LayerRun(uniform("decoder", 1.0), 6))
    held = np.where(np.arange(12) > 6, 20, 0)
    schedules = [Schedule(ScheduleKind.ONE_F_ONE_B, 3, 6)]
    built = {"num_stages": 3, "num_microbatches": 6, "memory_bytes": [100, 100, 65]}
    free = search_stages(StageProblem.build(runs, **built), schedules)
    plan = search_stages(StageProblem.build(runs, **built, resident_bytes=held), schedules)
    assert layers_per_stage(free) == [4, 4, 4]
    best_s = brute_force_s(StageProblem.build(runs, **built, resident_bytes=held), schedules)
    assert plan.step_s == pytest.approx(best_s)
    assert plan.stages[2].memory_bytes == 20 + 11 * layers_per_stage(plan)[2]


def test_shuffled_strategies_and_schedules_give_the_same_plan():
    draws = np.random.default_rng(3)
    for seed in range(20):
        problem = random_problem(seed)
        schedules = allowed_schedules(problem)
        plan = search_stages(problem, schedules)
        shuffled = tuple(LayerRun(_shuffled(run.layer, draws), run.count) for run in problem.runs)
        draws.shuffle(schedules)
        again = search_stages(replace(problem, runs=shuffled), schedules)
        assert (plan is None) == (again is None)
        if plan is not None:
            assert plan == again


def _shuffled(layer, draws):
    order = draws.permutation(len(layer.strategies))
    columns = ("forward_s", "backward_s", "weight_s", "sync_s")
    columns += ("state_bytes", "activation_bytes", "transient_bytes")
    columns += ("put_off_bytes", "update_bytes")
    tables = {key: getattr(layer, key)[order] for key in columns}
    return LayerCosts.build(layer.name, tuple(layer.strategies[s] for s in order), **tables)


def test_a_cap_is_reported(monkeypatch):
    monkeypatch.setattr(stage_search, "MAX_SOLVED", 1)
    plan = search_stages(deep_problem(m=4), tolerance=0.0)
    assert plan.capped and plan.gap >= 0


def test_a_plan_that_loses_a_layer_cannot_be_built():
    plan = search_stages(deep_problem())
    short = replace(plan.stages[1], first=plan.stages[1].first, end=plan.stages[1].end)
    with pytest.raises(ValueError, match="exactly once"):
        replace(plan, stages=(short, *plan.stages[1:]))
    with pytest.raises(ValueError, match="exactly once"):
        replace(plan, num_layers=plan.num_layers + 1)
    with pytest.raises(ValueError, match="strategies for"):
        replace(plan.stages[0], end=plan.stages[0].end + 1)
    with pytest.raises(ValueError, match="over their memory"):
        replace(plan, budgets_bytes=(1,) * 4)
    assert isinstance(plan, PipelinePlan)


def test_wrong_input_is_named():
    layer = uniform("layer", 1.0)
    with pytest.raises(OptionError, match="cannot be divided into 3 stages"):
        StageProblem.build((LayerRun(layer, 2),), num_stages=3, num_microbatches=1, memory_bytes=1)
    with pytest.raises(OptionError, match="one value for each"):
        StageProblem.build(
            (LayerRun(layer, 2),), num_stages=2, num_microbatches=1, memory_bytes=[1, 2, 3]
        )
    with pytest.raises(OptionError, match="whole numbers"):
        uniform("layer", 1.0, state=0.5)
    with pytest.raises(OptionError, match="negative"):
        uniform("layer", -1.0)
    with pytest.raises(OptionError, match="does not fit 4 devices"):
        search_stages(deep_problem(), [Schedule(ScheduleKind.GPIPE, 3, 16)])


def test_brute_force_helper_sees_every_division():
    assert len(list(all_boundaries(6, 3))) == 10
