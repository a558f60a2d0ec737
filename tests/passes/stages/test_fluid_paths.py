"""The bound from chains of passes, against every division that the search could try."""

import numpy as np
import pytest
from hypothesis import given, settings
from support.search.stages import all_boundaries, layer_costs, seeds

from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.passes.stages import fluid_paths
from meshfold.passes.stages.fluid_paths import fluid_paths_bound_s
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.solved import stage_times, step_ends_s
from meshfold.passes.stages.virtual_stage_bounds import least_transients, virtual_stage_bound_s
from meshfold.passes.stages.virtual_stage_solver import VirtualStageSolver
from meshfold.passes.stages.virtual_stages import VirtualStageSearch

KINDS = (
    ScheduleKind.INTERLEAVED,
    ScheduleKind.INTERLEAVED_ZERO_BUBBLE,
    ScheduleKind.ZBV,
    ScheduleKind.DUALPIPEV,
)


def drawn(seed, like=None):
    """(problem, schedule): 5 to 8 layers of up to 3 types on 2 devices, each schedule with
    transients and without. like: the schedule."""
    draws = np.random.default_rng(seed)
    types = [
        layer_costs(f"t{i}", draws, 2, sync=seed % 3 == 0, transient=60 * (seed // 4 % 2))
        for i in range(int(draws.integers(1, 4)))
    ]
    rest = int(draws.integers(5, 9)) - len(types)
    counts = 1 + draws.multinomial(rest, [1 / len(types)] * len(types))
    num_layers = int(counts.sum())
    problem = StageProblem.build(
        tuple(LayerRun(layer, int(n)) for layer, n in zip(types, counts, strict=True)),
        num_stages=2,
        num_microbatches=like.num_microbatches if like else 2 * int(draws.integers(2, 4)),
        memory_bytes=draws.integers(80, 320, 2),
        hop_s=draws.integers(0, 6, num_layers - 1) * (seed % 2),
        resident_bytes=draws.integers(0, 6, num_layers) * (seed % 5 == 0),
    )
    schedule = Schedule(KINDS[seed % len(KINDS)], 2, problem.num_microbatches, 2)
    return problem, like or schedule


def solved(problem, schedule):
    """(step, stages) of every division that fits."""
    solver = VirtualStageSolver(problem, schedule)
    divisions = map(solver.stages, all_boundaries(problem.num_layers, schedule.num_stages))
    pipelines = [stages for stages in divisions if stages is not None]
    return [(step_of(problem, schedule, stages), stages) for stages in pipelines]


def step_of(problem, schedule, stages):
    hop_s = problem.hop_s[[stage.first for stage in stages[1:]]]
    return float(step_ends_s(schedule, stages, hop_s).max())


def times_of(problem, stages):
    return stage_times(stages, problem.hop_s[[stage.first for stage in stages[1:]]])


@settings(max_examples=60)
@given(seeds)
def test_no_division_is_below_the_bound(seed):
    problem, schedule = drawn(seed)
    pipelines = solved(problem, schedule)
    if not pipelines:
        return
    best_s = min(step_s for step_s, _ in pipelines)
    some_s, stages = pipelines[seed % len(pipelines)]
    times = times_of(problem, stages)
    without_limit_s = fluid_paths_bound_s(problem, schedule, times, np.inf, 0.0)
    assert without_limit_s <= best_s * (1 + 1e-9)
    bound_s = fluid_paths_bound_s(problem, schedule, times, some_s, 0.0)
    assert min(bound_s, some_s) <= best_s * (1 + 1e-9)


@settings(max_examples=60)
@given(seeds)
def test_what_is_proven_without_a_plan(seed):
    """Of a schedule of which none was found, or looked for."""
    problem, schedule = drawn(seed)
    best_s = min((step_s for step_s, _ in solved(problem, schedule)), default=np.inf)
    search = VirtualStageSearch(problem, schedule)
    before_s = search.bound_s
    assert before_s <= best_s * (1 + 1e-9)
    limit_s = best_s if seed % 2 else np.inf
    search.prove(limit_s, 0.0)
    assert before_s <= search.bound_s <= best_s * (1 + 1e-9)
    assert not search.proven_s > min(limit_s, max(before_s, search.bound_s))


def layer_of(transient_bytes):
    return LayerCosts.build(
        f"{transient_bytes} bytes", ("s",), forward_s=1.0, backward_s=2.0, state_bytes=1,
        activation_bytes=1, transient_bytes=transient_bytes,
    )  # fmt: skip


def test_transients_that_a_device_has_wherever_stages_begin():
    """Six layers in four stages: those behind the first one begin at layer 1, 2 or 3 and later."""
    problem = StageProblem.build(
        (LayerRun(layer_of(1), 1), LayerRun(layer_of(9), 4), LayerRun(layer_of(7), 1)),
        num_stages=2,
        num_microbatches=2,
        memory_bytes=100,
    )
    interleaved = Schedule(ScheduleKind.INTERLEAVED, 2, 2, 2)
    assert least_transients(problem, interleaved).tolist() == [9, 9]
    in_a_v = Schedule(ScheduleKind.ZBV, 2, 2, 2)
    assert least_transients(problem, in_a_v).tolist() == [7, 9]


def test_layers_of_a_large_transient_need_room_for_it():
    """With room for one layer of the fast strategy beside its transient, each device has the slow
    one for most; with room for the transients of all that is no bound at all."""
    layer = LayerCosts.build(
        "layer", ("fast", "slow"), forward_s=[1.0, 2.0], backward_s=[2.0, 4.0],
        state_bytes=[10, 10], activation_bytes=[0, 0], transient_bytes=[50, 0],
    )  # fmt: skip
    problem = StageProblem.build(
        (LayerRun(layer, 8),), num_stages=2, num_microbatches=2, memory_bytes=60
    )
    schedule = Schedule(ScheduleKind.INTERLEAVED, 2, 2, 2)
    best_s = min(step_s for step_s, _ in solved(problem, schedule))
    bound_s = virtual_stage_bound_s(problem, schedule)
    assert 2 * 4 * 6.0 <= bound_s <= best_s


@settings(max_examples=25)
@given(seeds)
def test_chains_of_one_problem_bound_another(seed):
    (problem, schedule), known = drawn(seed), {}
    other, _ = drawn(seed + 1, like=schedule)
    bounds_s = []
    for of in (other, problem):
        pipelines = solved(of, schedule)
        if not pipelines:
            return
        times = times_of(of, pipelines[0][1])
        bounds_s += [fluid_paths_bound_s(of, schedule, times, np.inf, 0.0, known)]
        assert bounds_s[-1] <= min(step_s for step_s, _ in pipelines) * (1 + 1e-9)
    alone_s = fluid_paths_bound_s(problem, schedule, times, np.inf, 0.0)
    assert known[schedule] and alone_s <= bounds_s[-1] * (1 + 1e-9)


@settings(max_examples=15)
@given(seeds)
def test_prices_of_all_passes_prove_no_less_than_the_chains(seed):
    problem, schedule = drawn(seed)
    pipelines = solved(problem, schedule)
    if not pipelines:
        return
    times = times_of(problem, pipelines[0][1])
    priced_s = fluid_paths_bound_s(problem, schedule, times, np.inf, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fluid_paths, "MAX_PRICED", 0)
        chains_s = fluid_paths_bound_s(problem, schedule, times, np.inf, 0.0)
    assert chains_s <= priced_s * (1 + 1e-9)


def even_chain(*, num_layers=4, forward_s=1.0, backward_s=2.0, sync_s=0.0, hop_s=0.0):
    """Equal layers on two devices, two microbatches."""
    layer = LayerCosts.build(
        "layer", ("s",), forward_s=forward_s, backward_s=backward_s, sync_s=sync_s,
        state_bytes=1, activation_bytes=1,
    )  # fmt: skip
    return StageProblem.build(
        (LayerRun(layer, num_layers),), num_stages=2, num_microbatches=2, memory_bytes=1000,
        hop_s=hop_s,
    )  # fmt: skip


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
def test_as_many_stages_as_layers_leave_no_gap(tolerance):
    """By hand: two layers a device, 2 * 2 * 3, one pass of a layer down and one up before the
    first device ends, its two layers' sync_s after that; a hop down and up in both rounds."""
    problem = even_chain(sync_s=5.0, hop_s=0.25)
    schedule = Schedule(ScheduleKind.INTERLEAVED, 2, 2, 2)
    ((step_s, stages),) = solved(problem, schedule)
    assert step_s == pytest.approx(12 + 3 + 6 * 0.25 + 10)
    bound_s = fluid_paths_bound_s(problem, schedule, times_of(problem, stages), np.inf, tolerance)
    assert bound_s == pytest.approx(step_s)


def test_layers_are_whole():
    """Six layers in four stages: a device with four takes longer than the plan with three each."""
    problem = even_chain(num_layers=6)
    schedule = Schedule(ScheduleKind.INTERLEAVED, 2, 2, 2)
    best_s, stages = min(solved(problem, schedule), key=lambda found: found[0])
    times = times_of(problem, stages)
    assert fluid_paths_bound_s(problem, schedule, times, best_s, 0.0) == pytest.approx(
        best_s, rel=0.1
    )


def test_what_fits_nowhere_has_no_bound():
    problem = even_chain()
    tight = StageProblem.build(problem.runs, num_stages=2, num_microbatches=2, memory_bytes=2)
    schedule = Schedule(ScheduleKind.INTERLEAVED, 2, 2, 2)
    ((_, stages),) = solved(problem, schedule)
    times = times_of(problem, stages)
    assert fluid_paths_bound_s(tight, schedule, times, np.inf, 0.0) == np.inf


def test_too_large_a_program_proves_nothing(monkeypatch):
    monkeypatch.setattr(fluid_paths, "MAX_COLUMNS", 1)
    problem = even_chain()
    schedule = Schedule(ScheduleKind.INTERLEAVED, 2, 2, 2)
    ((_, stages),) = solved(problem, schedule)
    assert fluid_paths_bound_s(problem, schedule, times_of(problem, stages), np.inf, 0.0) == 0.0
