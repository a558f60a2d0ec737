"""Events of programs: the collectives of a real step in their order, the seconds of the prices, the
bytes of the memory model."""

from collections import Counter
from dataclasses import replace

import pytest
from support_events import Eager, eager
from support_memory import EmittedStep
from support_models import families

from meshfold.collective_order import collectives_of
from meshfold.cost_models.step_simulation import simulate
from meshfold.opgraph import ITEM_BYTES
from meshfold.strategy import UniformStrategy

DP = UniformStrategy(dp=4)
ZERO2 = UniformStrategy(dp=4, zero=2)
ZERO3 = UniformStrategy(dp=4, zero=3)
SEQUENCE = UniformStrategy(dp=2, tp=2, zero=3, sequence_parallel=True)
RECOMPUTED = UniformStrategy(dp=2, tp=2, zero=3, recompute="full")
STRATEGIES = (DP, ZERO2, ZERO3, SEQUENCE, RECOMPUTED)


def label(strategy: UniformStrategy) -> str:
    return strategy.label


SCALAR = 8
"""Bytes: a count of targets is not worth its place among the collectives of a loss."""


def recorded(case: Eager) -> list[tuple[str, str, int]]:
    """(kind, axes, bytes as the cost model counts them) of a step that really runs; no scalars."""
    step = EmittedStep(case.model, case.captured, case.program, case.batch)
    mesh = step.runner.mesh
    with collectives_of(mesh) as calls:
        step.train()
    found = []
    for call in calls:
        if call.kind == "all_reduce_in_place":
            continue  # of this mesh it starts an all_reduce, which is noted, too
        num_bytes = ITEM_BYTES[call.dtype]
        for size in call.shape:
            num_bytes *= size
        if call.kind == "all_gather":
            num_bytes *= mesh.size(call.axes)
        found.append((call.kind, ",".join(call.axes), num_bytes))
    return [call for call in found if call[2] > SCALAR]


def predicted(case: Eager) -> list[tuple[str, str, int]]:
    transfers = [t.collective for t in simulate(case.events).transfers]
    return [(c.kind, ",".join(c.axes), c.num_bytes) for c in transfers if c.num_bytes > SCALAR]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
@pytest.mark.parametrize("family", families("llama", without=("mixtral",)))
def test_collectives_are_those_of_a_real_step_in_their_order(
    family: str, strategy: UniformStrategy
) -> None:
    case = eager(family, strategy)
    real = recorded(case)
    assert len(real) > 3
    assert predicted(case) == real


@pytest.mark.parametrize("strategy", [DP, ZERO2, ZERO3, SEQUENCE], ids=label)
def test_seconds_are_those_of_the_prices(strategy: UniformStrategy) -> None:
    case = eager("llama", strategy)
    for number, region in enumerate(case.events.regions):
        price = case.prices[number]
        for events, compute_s, graph_s in (
            (region.forward, price.forward_s, price.graph_forward_s),
            (region.backward, price.backward_s, price.graph_backward_s),
        ):
            inside_s = sum(e.collective.seconds for e in events if e.collective)
            total_s = sum(e.seconds for e in events) + inside_s
            assert total_s == pytest.approx(compute_s + graph_s)


def test_recomputation_runs_the_forward_again() -> None:
    plain, again = (eager("llama", s) for s in (UniformStrategy(dp=2, tp=2, zero=3), RECOMPUTED))
    added_s = again.time.backward_s - plain.time.backward_s
    compute_s = [
        simulate(replace(case.events, slowdown=1.0)).step.compute_s for case in (plain, again)
    ]
    assert compute_s[1] - compute_s[0] == pytest.approx(added_s, rel=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_the_peak_is_that_of_the_memory_model(strategy: UniformStrategy) -> None:
    case = eager("llama", strategy)
    peak = simulate(case.events).step.peak_bytes
    buckets = [b for region in case.events.regions for b in region.buckets]
    # The model lets a buffer be read for a whole backward more, and has the gather of the instance
    # before beside a whole backward: here both are where the links put them.
    most = max(b.whole_bytes for b in buckets) + max(b.flat_bytes for b in buckets)
    assert case.memory.peak - most <= peak <= 1.01 * case.memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DP, ZERO2, ZERO3, SEQUENCE], ids=label)
def test_the_peak_of_many_layers_is_within_three_percent(strategy: UniformStrategy) -> None:
    case = eager("llama", strategy, layers=12)
    assert simulate(case.events).step.peak_bytes == pytest.approx(case.memory.peak, rel=0.03)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_the_step_adds_up_and_lies_between_its_bounds(strategy: UniformStrategy) -> None:
    case = eager("llama", strategy, cluster_name="dgx-h100")
    course = simulate(case.events)
    step = course.step
    end_s = max(t.end_s for t in course.transfers)
    assert step.step_s >= end_s
    links: Counter[str] = Counter()
    for transfer in course.transfers:
        links[transfer.collective.link] += transfer.collective.seconds
    alone = (step.compute_s, *links.values())
    assert max(alone) <= step.step_s <= sum(alone) + 1e-12
    assert step.exposed_s == pytest.approx(sum(row.exposed_s for row in step.overlap))


def test_bytes_of_precision_are_narrow_for_gathers_and_wide_for_reductions() -> None:
    case = eager("llama", ZERO3, precision="bf16")
    assert predicted(case) == recorded(case)


def test_instances_share_their_description() -> None:
    case = eager("llama", ZERO3, layers=6)
    assert len(case.events.regions) == 3 and len(case.events.instances) == 8
