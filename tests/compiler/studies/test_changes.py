"""What would have to change for pins to cost nothing, on invented plans."""

from dataclasses import replace

import pytest
from support.programs.plans import CLUSTER, example_plan

from meshfold.ir.plan import Plan
from meshfold.report.why_not import Change, LinkUse, StepParts
from meshfold.studies.changes import World, changes, nearest, wins, with_bandwidth

WORLD = World(CLUSTER, 1000, 16)


def plan_of(step_s: float) -> Plan:
    plan = example_plan()
    rest = {"backward_s": 0.0, "exposed_communication_s": 0.0, "optimizer_s": 0.0}
    return replace(plan, time=replace(plan.time, forward_s=step_s, **rest))


def plan_in(world: World, pinned: bool) -> Plan | None:
    """With the pins 2 s and 5 s on the network as it is; without them 3 s, and 12 s from batches of
    64 on. The pins need 500 bytes."""
    if not pinned:
        return plan_of(3.0 if world.batch < 64 else 12.0)
    rate = world.cluster.network.bytes_per_s / CLUSTER.network.bytes_per_s
    return plan_of(2.0 + 5.0 / rate) if world.memory_bytes >= 500 else None


def test_pins_win_where_they_cost_nothing() -> None:
    fast = replace(WORLD, cluster=with_bandwidth(CLUSTER, "infiniband", 8.0))
    assert not wins(WORLD, plan_in) and wins(fast, plan_in)
    assert not wins(replace(fast, memory_bytes=499), plan_in)
    assert wins(WORLD, lambda _, pinned: plan_of(9.0) if pinned else None)


def test_the_nearest_factor() -> None:
    """2 + 5 / f <= 3 from f = 5 on; four halvings of 1..16 leave a factor of 16 ** (1 / 16)."""

    def scaled(factor: float) -> World:
        return replace(WORLD, cluster=with_bandwidth(CLUSTER, "infiniband", factor))

    found = nearest(scaled, 16.0, plan_in)
    assert found is not None and 5.0 <= found <= 5.0 * 16 ** (1 / 16)
    assert nearest(scaled, 4.0, plan_in) is None
    assert nearest(lambda _: WORLD, 16.0, plan_in) is None


def test_every_knob_is_turned() -> None:
    ours = StepParts(3.0, {}, {"infiniband": LinkUse(1.0)})
    theirs = StepParts(7.0, {}, {"infiniband": LinkUse(5.0), "of another plan": LinkUse(1.0)})
    found = list(changes(WORLD, (ours, theirs), plan_in, sizes=True))
    assert found[0] == Change("memory per device", "", "8 x and 1/8")
    assert found[1].what == "bandwidth of infiniband" and found[1].tried == "16 x"
    factor, words = found[1].found.split(" x ")
    assert 5.0 <= float(factor) <= 6.0
    assert words == f"or more, {float(factor) * 50:.0f} GB/s"
    assert found[2] == Change("batch", "64", "32, 64")
    assert len(found) == 3


def test_a_link_that_the_pins_use_less_is_made_slower() -> None:
    parts = StepParts(3.0, {}, {"infiniband": LinkUse(5.0)}), StepParts(7.0, {}, {})

    def slow(world: World, pinned: bool) -> Plan:
        rate = world.cluster.network.bytes_per_s / CLUSTER.network.bytes_per_s
        return plan_of(4.0 if pinned else 2.0 / rate)

    memory, link = changes(WORLD, parts, slow, sizes=False)
    assert not memory.found and link.tried == "1/16"
    assert 0.42 <= float(link.found.split(" x or less")[0]) <= 0.5


def test_bandwidth_of_links_inside_of_nodes() -> None:
    found = with_bandwidth(CLUSTER, "nvlink", 2.0)
    assert found.groups[0].link.bytes_per_s == pytest.approx(9e11)
    assert found.network == CLUSTER.network
