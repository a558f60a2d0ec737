"""Events of programs: the collectives of a real step in their order, the seconds of the prices, the
bytes of the memory model."""

from collections import Counter
from dataclasses import replace

import pytest
from support.models.hugging_face import families
from support.programs.events import (
    DP,
    RECOMPUTED,
    SEQUENCE,
    STRATEGIES,
    ZERO2,
    ZERO3,
    eager,
    label,
    predicted,
    recorded,
)

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.strategy import UniformStrategy


@pytest.mark.sampled(2)
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
    layer = Counter(case.events.instances).most_common(1)[0][0]
    for number, region in enumerate(case.events.regions):
        price = case.prices[number]
        for events, compute_s, graph_s in (
            (region.forward, price.forward_s, price.graph_forward_s),
            (region.backward, price.backward_s, price.graph_backward_s),
        ):
            collectives = [e.collective for e in events if e.collective]
            inside_s = sum(c.seconds for c in collectives)
            total_s = sum(e.seconds for e in events) + inside_s
            expected_s = compute_s + graph_s
            if number == layer or not price.regathered_s:
                assert total_s == pytest.approx(expected_s)
            # The embedding is alone in its bucket, and its backward does not read it.
            assert total_s <= expected_s * (1 + 1e-9)
    assert (case.prices[layer].regathered_s > 0) == (strategy.zero > 1)


def test_regions_wait_for_the_host_as_they_do_in_the_prices() -> None:
    case = eager("llama", DP, cluster_name="dgx-h100")
    host_op_s = resolve_cluster("dgx-h100", 4).groups[0].device.host_op_s
    for number, region in enumerate(case.events.regions):
        price, pricer = case.prices[number], case.pricers[number]
        assert sum(e.seconds for e in region.forward) == pytest.approx(price.forward_s)
        assert sum(e.seconds for e in region.backward) == pytest.approx(price.backward_s)
        # Kernels of a model as small as this one are shorter.
        assert price.forward_s >= host_op_s * len(pricer.graph.ops) * (1 - 1e-9)


def test_recomputation_runs_the_forward_in_the_backward() -> None:
    # Under ZeRO 3 what runs again also reads parameters that the backward alone does not.
    whole = replace(RECOMPUTED, zero=0)
    plain, again = (eager("llama", s) for s in (replace(whole, recompute="none"), whole))
    added_s = again.time.backward_s - plain.time.backward_s
    compute_s = [
        simulate(replace(case.events, slowdown=1.0)).step.compute_s for case in (plain, again)
    ]
    assert compute_s[1] - compute_s[0] == pytest.approx(added_s, rel=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_the_peak_is_that_of_the_memory_model(strategy: UniformStrategy) -> None:
    case = eager("llama", strategy)
    peak = simulate(case.events).step.peak_bytes
    groups = [g for region in case.events.regions for g in region.groups]
    # The model lets a buffer be read for a whole backward more, and has the gather of the instance
    # before beside a whole backward: here both are where the links put them.
    most = max(b.unsharded_bytes for b in groups) + max(b.flat_bytes for b in groups)
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
