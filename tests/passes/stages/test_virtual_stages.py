"""Interleaved stages against brute force over all divisions and strategies; memory; the
certificate."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from support.search.stages import (
    all_boundaries,
    allowed_schedules,
    brute_force_s,
    deep_problem,
    default_schedules,
    interleaved_schedules,
    layer_costs,
    search_stages,
    seeds,
)

from meshfold.cost_models.pipeline.actions import Pass
from meshfold.cost_models.pipeline.makespan import StageTimes, simulate_actions
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.errors import OptionError
from meshfold.passes.stages.problem import LayerRun, StageProblem
from meshfold.passes.stages.solved import step_ends_s
from meshfold.passes.stages.virtual_stage_solver import VirtualStageSolver
from meshfold.passes.stages.virtual_stages import VirtualStageSearch, even_divisions

ROUNDING = 1e-9

ROOMY = 900
"""Bytes per device under which a deep problem has room for several virtual stages."""


def interleaved_problem(seed):
    """4 to 6 layers of up to 3 types on 2 devices, or 6 on 3, with every feature now and then."""
    draws = np.random.default_rng(seed)
    types = [
        layer_costs(f"t{i}", draws, 2, sync=seed % 5 == 0, transient=12 * (seed % 4 == 0))
        for i in range(int(draws.integers(1, 4)))
    ]
    rest = int(draws.integers(4, 7)) - len(types)
    counts = 1 + draws.multinomial(rest, [1 / len(types)] * len(types))
    num_layers = int(counts.sum())
    p = 3 if num_layers == 6 and seed % 2 else 2
    return StageProblem.build(
        tuple(LayerRun(layer, int(n)) for layer, n in zip(types, counts, strict=True)),
        num_stages=p,
        num_microbatches=p * int(draws.integers(1, 4)),
        memory_bytes=draws.integers(60, 320, p),
        hop_s=draws.integers(0, 6, num_layers - 1) * (seed % 3 > 0),
        resident_bytes=draws.integers(0, 4, num_layers) * (seed % 7 == 0),
    )


@settings(max_examples=25)
@given(seeds)
def test_brute_force(seed):
    certified(seed)


@settings(max_examples=25)
@given(seeds)
def test_only_slower_divisions_are_left_unsolved(seed):
    problem = interleaved_problem(seed)
    for schedule in interleaved_schedules(problem):
        solver = VirtualStageSolver(problem, schedule)
        steps_s = {}
        for boundaries in all_boundaries(problem.num_layers, schedule.num_stages):
            stages = solver.stages(boundaries)
            if stages is not None:
                hop_s = problem.hop_s[[stage.first for stage in stages[1:]]]
                steps_s[boundaries] = float(step_ends_s(schedule, stages, hop_s).max())
        beat_s = float(np.median(list(steps_s.values()))) if steps_s else 0.0
        for boundaries, step_s in steps_s.items():
            is_left = VirtualStageSolver(problem, schedule).stages(boundaries, beat_s) is None
            assert not is_left or step_s >= beat_s * (1 - ROUNDING)
            assert solver.stages(boundaries, step_s * (1 + ROUNDING)) is not None


def about_a_layer_a_stage(seed):
    """A problem whose stages have a layer each but for two, and its schedule."""
    draws = np.random.default_rng(seed)
    p, v = [(4, 4), (8, 4), (8, 2), (4, 8)][seed % 4]
    num_layers, m = p * v + int(draws.integers(0, 3)), p * int(draws.integers(1, 4))
    runs = (
        LayerRun(layer_costs("embedding", draws, 3), 1),
        LayerRun(layer_costs("layer", draws, 6, sync=seed % 3 == 0), num_layers - 2),
        LayerRun(layer_costs("head", draws, 3), 1),
    )
    memory_bytes, hop_s = int(draws.integers(60, 90 * v)), float(draws.integers(0, 3))
    problem = StageProblem.build(
        runs, num_stages=p, num_microbatches=m, memory_bytes=memory_bytes, hop_s=hop_s
    )
    return problem, Schedule(ScheduleKind.INTERLEAVED, p, m, v)


@pytest.mark.parametrize("seed", [48, 49, 57, 95, 129, 150, 191, *range(12)])
def test_no_layers_that_are_all_alike_are_faster(seed):
    """In even stages, where the search starts."""
    problem, schedule = about_a_layer_a_stage(seed)
    search = VirtualStageSearch(problem, schedule)
    search.find(np.inf)
    first, layer, last = problem.runs
    (*_, even) = even_divisions(np.ones(problem.num_layers), schedule.num_stages)
    for at in range(len(layer.layer.strategies)):
        runs = (first, replace(layer, layer=layer.layer.only(at)), last)
        stages = VirtualStageSolver(replace(problem, runs=runs), schedule).stages(even)
        if stages is not None:
            hop_s = problem.hop_s[[stage.first for stage in stages[1:]]]
            step_s = float(step_ends_s(schedule, stages, hop_s).max())
            assert search.step_s <= step_s * (1 + ROUNDING)


def test_more_divisions_are_never_slower_and_often_faster():
    """And what they find fits, takes what it says, and is not below the bound."""
    gains = []
    for seed in range(0, 24, 4):
        problem, schedule = about_a_layer_a_stage(seed)
        search, again = (VirtualStageSearch(problem, schedule) for _ in range(2))
        search.find(np.inf)
        first_s = search.step_s
        search.find_further(8)
        again.find(np.inf)
        again.find_further(8)
        assert again.step_s == search.step_s
        if not np.isfinite(first_s):
            continue
        plan = search.plan(search.proven_s, capped=False)
        hop_s = problem.hop_s[[stage.first for stage in plan.stages[1:]]]
        step_s = float(step_ends_s(schedule, plan.stages, hop_s).max())
        assert search.bound_s * (1 - ROUNDING) <= plan.step_s <= first_s
        assert plan.step_s == pytest.approx(step_s, rel=1e-12)
        for i, order in enumerate(schedule.actions()):
            assert peak_bytes(problem, plan.stages, order) <= problem.memory_bytes[i]
        gains.append(first_s / plan.step_s)
    assert len(gains) > 2
    assert max(gains) > 1


@pytest.mark.slow
@settings(max_examples=300)
@given(seeds)
def test_brute_force_on_many(seed):
    certified(seed)


def certified(seed):
    """Interleaved alone: the bound holds, the plan is real, the gap is that between them."""
    problem = interleaved_problem(seed)
    schedules = interleaved_schedules(problem)
    best_s = brute_force_s(problem, schedules)
    plan = search_stages(problem, schedules)
    if plan is None:
        return
    assert best_s < np.inf
    assert 0 <= plan.gap <= plan.gap_before
    assert plan.lower_bound_s <= best_s * (1 + ROUNDING)
    assert plan.step_s >= best_s * (1 - ROUNDING)


@pytest.mark.slow
@settings(max_examples=100)
@given(seeds)
def test_brute_force_among_all_schedules(seed):
    problem = interleaved_problem(seed)
    schedules = [*allowed_schedules(problem), *interleaved_schedules(problem)]
    best_s = brute_force_s(problem, schedules)
    plan = search_stages(problem, schedules)
    if plan is not None:
        assert plan.gap >= 0
        assert plan.lower_bound_s <= best_s * (1 + ROUNDING)
        assert plan.step_s >= best_s * (1 - ROUNDING)


@settings(max_examples=100)
@given(seeds)
def test_plan_is_what_it_says(seed):
    """Step and memory follow from the strategies of the stages, moment by moment."""
    problem = interleaved_problem(seed)
    schedules = interleaved_schedules(problem)
    plan = search_stages(problem, [schedules[seed % len(schedules)]])
    if plan is None:
        return
    p = problem.num_devices
    times = StageTimes.build(
        [stage.forward_s for stage in plan.stages],
        [stage.backward_s for stage in plan.stages],
        hop_s=problem.hop_s[[stage.first for stage in plan.stages[1:]]],
    )
    ends = simulate_actions(plan.schedule.actions(), times)
    late_s = [sum(stage.sync_s for stage in plan.stages[i::p]) for i in range(p)]
    assert plan.step_s == pytest.approx(max(ends + late_s), rel=1e-12)
    for i, order in enumerate(plan.schedule.actions()):
        assert plan.memory_bytes[i] == peak_bytes(problem, plan.stages, order)
        assert plan.memory_bytes[i] <= problem.memory_bytes[i]


def peak_bytes(problem, stages, order):
    """What a device needs at its fullest, action by action."""
    own = sorted({action.stage for action in order})
    states, transients, each = 0, [], {}
    for s in own:
        each[s] = int(problem.resident_bytes[stages[s].first])
        for block in stages[s].blocks:
            costs = problem.runs[block.run].layer
            at = costs.strategies.index(block.strategy)
            states += block.count * int(costs.state_bytes[at])
            each[s] += block.count * int(costs.activation_bytes[at])
            transients.append(int(costs.transient_bytes[at]))
    held = peak = 0
    for action in order:
        held += each[action.stage] if action.kind is Pass.FORWARD else -each[action.stage]
        peak = max(peak, held)
    return states + peak + max(transients)


def test_chunks_shrink_the_bubble():
    """Four microbatches on four devices: most of the step of one stage each is bubble."""
    problem = deep_problem(m=4, memory_bytes=ROOMY)
    plan = search_stages(problem)
    alone = search_stages(
        problem, [s for s in default_schedules(problem) if s.num_virtual_stages == 1]
    )
    assert plan.schedule.kind is ScheduleKind.INTERLEAVED
    assert len(plan.stages) == 4 * plan.schedule.num_virtual_stages
    assert plan.step_s < 0.85 * alone.step_s


def test_transfers_are_paid_for_every_chunk():
    """Slow links turn the choice round: v times as many hops cost more than the bubble."""
    slow = search_stages(deep_problem(m=8, hop_s=40.0, memory_bytes=ROOMY))
    assert slow.schedule.num_virtual_stages == 1


@pytest.mark.slow
def test_more_memory_and_faster_links_are_never_slower_than_the_gap_allows():
    before = None
    for memory in range(300, 1300, 100):
        plan = search_stages(deep_problem(memory_bytes=memory), None)
        if plan is None:
            assert before is None
            continue
        if before is not None:
            assert plan.step_s <= before * (1 + plan.gap + ROUNDING)
        before = plan.step_s
    assert before is not None
    for slow, fast in ((4.0, 1.0), (1.0, 0.0)):
        plan = search_stages(deep_problem(hop_s=fast, memory_bytes=ROOMY))
        slower = search_stages(deep_problem(hop_s=slow, memory_bytes=ROOMY))
        assert plan.step_s <= slower.step_s * (1 + plan.gap + ROUNDING)


def test_no_division_fits():
    schedules = [Schedule(ScheduleKind.INTERLEAVED, 4, 16, 2)]
    assert search_stages(deep_problem(memory_bytes=30), schedules) is None


def test_more_stages_than_layers_are_named():
    with pytest.raises(OptionError, match="more stages than 6 layers"):
        search_stages(
            deep_problem(6, memory_bytes=ROOMY), [Schedule(ScheduleKind.INTERLEAVED, 4, 16, 2)]
        )


def test_the_search_finds_most_of_the_best_plans():
    """The bound alone would also hold for a search that finds nothing."""
    found = []
    for seed in range(40):
        problem = interleaved_problem(seed)
        schedules = interleaved_schedules(problem)
        best_s = brute_force_s(problem, schedules)
        if best_s < np.inf:
            plan = search_stages(problem, schedules)
            found.append(np.inf if plan is None else plan.step_s / best_s)
    assert len(found) > 20
    assert np.isfinite(found).all()
    assert np.mean(np.array(found) < 1 + ROUNDING) > 0.7
    assert np.mean(found) < 1.02
