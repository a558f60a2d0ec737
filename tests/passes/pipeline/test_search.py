"""Pipelines beyond those that add up to the least."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.models.hugging_face import BATCH
from support.search.pipelines import PROBER, graph_of

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.shortlist import MOST_BEYOND
from meshfold.passes.one_pass.tree import SearchSpec
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.search import (
    PipelineOutcome,
    PricedPipeline,
    beyond_sums,
    priced_pipeline,
    search_pipelines,
    with_counted_memory,
)
from meshfold.passes.pipeline.simulated import TypedPipeline, rank_pipelines
from meshfold.passes.pipeline.tree import PipelineTree, grow_pipelines
from meshfold.passes.planner import find_pipeline
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.search import search_faster_stages


def searched() -> tuple[PipelineProblems, PipelineTree, PipelineOutcome]:
    """Pipelines of a GPT-2 on four devices."""
    graph = graph_of("gpt2", 4)
    problems = PipelineProblems(
        graph, resolve_cluster("dgx-v100", 4), CompileOptions(), BATCH, PROBER
    )
    tree = grow_pipelines(SearchSpec(4, 4, BATCH, {}), len(graph.instances))
    return problems, tree, search_pipelines(problems, tree)


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_more_of_what_adds_up_to_less_than_a_limit(most: int) -> None:
    problems, tree, outcome = searched()
    assert outcome.best is not None
    limit_s = 1.5 * outcome.best.step_s
    known = {x.problem.degrees for x in outcome.found}
    more = beyond_sums(outcome, limit_s, most)
    new = more.found[len(outcome.found) :]
    assert more.found[: len(outcome.found)] == outcome.found and 0 < len(new) <= most
    assert all(outcome.best.step_s <= x.step_s < limit_s for x in new)
    assert known.isdisjoint(x.problem.degrees for x in new)
    rows = {degrees: step_s for degrees, _, step_s in more.searched}
    assert all(rows[x.problem.degrees] == x.step_s for x in new)
    if most == 1000:
        # All that add up to less, though the gaps of their stages are not closed.
        found = {x.problem.degrees: x.step_s for x in more.found}
        for degrees in tree.candidates:
            alone = alone_s(problems, degrees)
            if 1.03 * alone < limit_s and not degrees.dp_shard:
                assert alone <= found[degrees] * (1 + 1e-9) <= 1.03 * alone, degrees.label


def alone_s(problems: PipelineProblems, degrees: UniformStrategy) -> float:
    """Seconds of the best plan on these degrees; infinite where nothing fits."""
    pins = {"pp": degrees.pp, "tp": degrees.tp, "microbatches": degrees.microbatches}
    pins |= {"sp": int(degrees.sequence_parallel), "cp": degrees.cp}
    tree = grow_pipelines(SearchSpec(4, 4, BATCH, pins), len(problems.folded.instances))
    best = search_pipelines(problems, tree).best
    of_one = best is not None and best.plan.schedule.num_virtual_stages == 1
    return best.step_s if best is not None and of_one else np.inf


def test_where_the_least_sum_simulates_slowly_others_are_simulated_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems, _, outcome = searched()
    known = list(outcome.found)
    asked: list[float] = []

    def ranked(_: object, found: tuple[object, ...]) -> list[tuple[object, float]]:
        """What is known already takes three times as long as it adds up to."""
        steps = [(x, x.step_s * (3.0 if x in known else 1.1)) for x in found]
        asked.append(len(found))
        return sorted(steps, key=lambda entry: entry[1])

    monkeypatch.setattr(find_pipeline, "rank_pipelines", ranked)
    typed, best_s, more = find_pipeline._fastest(problems, outcome, np.inf, 0)
    assert typed is not None and typed.found not in known
    assert best_s == pytest.approx(1.1 * typed.found.step_s)
    assert asked == [len(known), len(more.found) - len(known)] and 0 < asked[1] <= MOST_BEYOND
    # Nothing that takes longer than what is there already is looked for.
    least_s = min(x.step_s for x in known)
    _, _, same = find_pipeline._fastest(problems, outcome, 0.9 * least_s, 0)
    assert same is outcome


def test_what_does_not_fit_as_simulated_gets_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that needs more than was counted: 5 % of what it takes of the fastest pipeline."""
    problems, _, outcome = searched()
    (first, _), *_ = rank_pipelines(problems, outcome.found)
    limit = int(0.95 * first.plan.memory_bytes[-1])

    def simulated(typed: TypedPipeline, device: int) -> object:
        taken, capacity = typed.found.plan.memory_bytes, typed.found.problem.capacity_bytes
        over = taken[device] - limit if device + 1 == len(taken) else 0
        return SimpleNamespace(peak=capacity + over)

    monkeypatch.setattr(find_pipeline, "device_memory", simulated)
    typed, step_s = find_pipeline._fastest_that_fits(problems, outcome.found, np.inf, 0)
    assert typed is not None and typed.found is not first
    assert typed.found.plan.memory_bytes[-1] <= limit < first.plan.memory_bytes[-1]
    assert typed.found.plan.schedule == first.plan.schedule
    assert typed.found.step_s >= first.step_s and typed.found.problem is first.problem
    # Nothing is searched again that is not faster than what is there already.
    nothing = (None, np.inf)
    assert find_pipeline._fastest_that_fits(problems, outcome.found, 0.9 * step_s, 0) == nothing
    monkeypatch.setattr(find_pipeline, "MOST_AGAIN", 0)
    assert find_pipeline._fastest_that_fits(problems, outcome.found, np.inf, 0) == nothing


def with_budgets(found: PricedPipeline, share: float) -> PricedPipeline:
    """A pipeline that takes this share of what its devices have."""
    budgets = tuple(int(n / share) for n in found.plan.memory_bytes)
    return replace(found, plan=replace(found.plan, budgets_bytes=budgets))


def test_full_devices_get_what_their_simulated_peaks_leave() -> None:
    problems, tree, _ = searched()
    degrees = next(d for d in tree.candidates if (d.pp, d.tp, d.microbatches) == (2, 2, 2))
    problem, made = problems.problem(tree.strategies_of(degrees)), []
    for v in (1, 2):
        kind = ScheduleKind.INTERLEAVED if v > 1 else ScheduleKind.ONE_F_ONE_B
        schedule = Schedule(kind, 2, 2, num_virtual_stages=v)
        plan = search_faster_stages(problem.chain, [schedule], np.inf)
        assert isinstance(plan, PipelinePlan)
        made.append(with_budgets(priced_pipeline(problem, plan), 1.0))
    alone, found = made
    capacity = found.problem.capacity_bytes
    peaks = np.full(found.plan.schedule.num_devices, int(0.9 * capacity))
    more = with_counted_memory(found, peaks)
    assert more is not None and more.plan.schedule == found.plan.schedule
    room = np.array(more.plan.budgets_bytes) - found.plan.memory_bytes
    assert (room == capacity - peaks).all() and more.step_s <= found.step_s * (1 + 1e-9)
    # Not where little is left, where devices are not full, nor beyond what a bound covers.
    assert with_counted_memory(found, 0 * peaks + int(0.99 * capacity)) is None
    assert with_counted_memory(with_budgets(found, 0.9), peaks) is None
    few = np.full(alone.plan.schedule.num_devices, int(0.9 * capacity))
    assert with_counted_memory(alone, few) is None
    over = few.copy()
    over[-1] = int(1.01 * capacity)
    if less := with_counted_memory(alone, over):
        assert (np.array(less.plan.budgets_bytes) <= alone.plan.budgets_bytes).all()
