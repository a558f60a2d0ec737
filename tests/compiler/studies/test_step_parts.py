"""A step in parts, and its links."""

from dataclasses import replace

import pytest
from support.programs.plans import example_plan, simulated_plan

from meshfold.ir.step_events import Event
from meshfold.studies.step_parts import parts_of_both, step_parts


def test_a_plan_without_events_knows_seconds_by_link() -> None:
    """dp goes over the network, tp over nvlink: 50 and 30 ms."""
    found = step_parts(example_plan(), simulated=False)
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    assert list(found.parts) == [
        "forward",
        "backward",
        "exposed communication",
        "optimizer",
        "bubble",
    ]
    seconds = {link: use.seconds for link, use in found.links.items()}
    assert seconds == {"network": 0.05, "nvlink": 0.03}
    assert found.links["nvlink"].num_bytes is None and found.recomputed_s is None


def test_a_simulated_pipeline_waits_too() -> None:
    plan = simulated_plan()
    assert plan.simulated is not None and "bubble" not in plan.simulated.parts
    waits = replace(plan, simulated=replace(plan.simulated, bubble_s=0.1))
    found = step_parts(waits, simulated=True)
    assert found.parts["bubble"] == 0.1
    assert found.step_s == pytest.approx(sum(found.parts.values())) == waits.step_s


def test_bytes_by_link_by_hand() -> None:
    """32 layers: a gather of 1 MiB, which the backward repeats of all but the last; a reduce-
    scatter of 2 MiB; inside an all-gather of 64 KiB; behind all an all-reduce of 4 KiB."""
    plan = simulated_plan()
    found = step_parts(plan, simulated=True)
    assert found.step_s == pytest.approx(sum(found.parts.values())) == plan.step_s
    network, inside = found.links["infiniband"], found.links["nvlink"]
    assert network.num_bytes == (32 + 31) * 2**20 + 32 * 2**21
    assert network.seconds == pytest.approx((32 + 31) * 2e-3 + 32 * 4e-3)
    assert inside.num_bytes == 32 * 2**16 + 4096
    assert found.recomputed_s == 0


def test_what_is_recomputed() -> None:
    plan = simulated_plan()
    assert plan.events is not None
    first, layer, last = plan.events.regions
    again = replace(
        layer, backward=(Event("recompute"), *layer.backward), recomputed=(Event("compute", 0.5),)
    )
    events = replace(plan.events, regions=(first, again, last))
    assert step_parts(replace(plan, events=events), simulated=True).recomputed_s == 32 * 0.5


def test_like_is_compared_with_like() -> None:
    both = parts_of_both(simulated_plan(), simulated_plan())
    assert "compute" in both[0].parts and both[0] == both[1]
    first, second = parts_of_both(simulated_plan(), example_plan())
    assert "forward" in first.parts and "forward" in second.parts
    assert first.step_s == simulated_plan().time.step_s
