"""When optimizer states go to the host, and what plans say of it."""

import math
from dataclasses import replace
from typing import Any

import pytest
from support.processes.offload import cluster_with_hosts
from support.search.stack_plans import BATCH, PROBER, stack_graph, stack_plan

from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.errors import InfeasibleError, OptionError, PlanMismatchError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan, TimeEstimate
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.offload import (
    IN_STAGES,
    LEAST_GAIN,
    NEEDS_DISK,
    NEEDS_OFFLOAD,
    PAYS_OFFLOAD,
    WORTH_STAGES,
    must_offload,
    offloaded_if_faster,
)
from meshfold.plan_file.io import plan_from_json, plan_to_json


def plan(cluster: ClusterSpec | None = None, **options) -> Plan:
    return stack_plan(cluster or cluster_with_hosts(1), **options)


def request(cluster: ClusterSpec, **options) -> PlanRequest:
    return PlanRequest(stack_graph(), cluster, CompileOptions(**options), "stack", BATCH, PROBER)


def offloads(found: Plan) -> list[str]:
    return [region.strategy.offload for region in found.regions]


def test_what_fits_is_planned_as_if_there_were_no_hosts() -> None:
    found = plan()
    assert set(offloads(found)) == {"none"} and NEEDS_OFFLOAD not in found.notes


def test_what_does_not_fit_is_made_to_fit_and_says_so() -> None:
    whole, least = plan(), plan(pins={"offload": "optimizer"})
    assert least.memory.optimizer == least.memory.gradients == 0
    found = plan(memory_bytes=(whole.memory.peak + 2 * least.memory.peak) // 3)
    assert "none" in offloads(found) and len({*offloads(found)}) > 1, "no more than it takes"
    assert found.memory.peak <= found.memory.capacity and NEEDS_OFFLOAD in found.notes
    assert any("in the host's memory:" in note for note in found.notes)
    free = plan(memory_bytes=1 << 60)
    (why,) = (note for note in found.notes if note.startswith("fits because: "))
    assert " layers on the host" in why
    price = f"{found.step_s / free.step_s - 1:+.1%} on the step of one device, the best plan"
    assert f"; in all {price} on devices of any memory" in why
    # Parameters, gradients, and two states: 4 x 8 bytes of each number.
    num_bytes = 4 * sum(8 * a * b for a, b in ((64, 128), (128, 64), (1, 128), (1, 64))) * 4
    (note,) = (note for note in least.notes if "host's memory" in note)
    assert "of 5 of 5 layers" in note and f"{num_bytes / 1e6:.3g} MB" in note


def slow_plan(costs: float, fills: float) -> Plan:
    """A plan for which the memory limit costs so much; fills: its share of the memory."""
    found = plan()
    memory = replace(found.memory, capacity=round(found.memory.peak / fills))
    stats = replace(found.search, unlimited_s=found.time.step_s / (1 + costs), least_s=0.0)
    return replace(found, memory=memory, search=stats)


def taking(found: Plan, step_s: float) -> Plan:
    """`found` as if it took so long."""
    time = TimeEstimate(step_s, 0.0, 0.0, 0.0, {})
    return replace(found, time=time, simulated=None)


@pytest.mark.parametrize(
    ("costs", "fills", "options", "is_searched"),
    [
        (0.5, 0.99, {}, True),
        (0.1, 0.99, {}, True),
        (0.05, 0.99, {}, False),
        (0.5, 0.7, {}, False),
        (0.5, 0.99, {"pins": {"offload": "none"}}, False),
        (0.5, 0.99, {"allow_offload": True}, False),
    ],
)
def test_offload_is_searched_where_memory_makes_a_plan_slow(
    costs: float, fills: float, options: dict[str, Any], is_searched: bool
) -> None:
    first, asked = slow_plan(costs, fills), []

    def plans_of(request: PlanRequest) -> tuple[Plan, ...]:
        asked.append(request)
        return (taking(first, first.step_s / 2),)

    of = request(cluster_with_hosts(1), **options)
    found = offloaded_if_faster(of, (first,), plans_of)
    assert bool(asked) == is_searched == (PAYS_OFFLOAD in found[0].notes)
    for wider in asked:
        assert wider.options.allow_offload and not wider.explains
        assert wider.beat_s == max(first.step_s, first.time.step_s)
        assert wider.in_one_pass == (costs < WORTH_STAGES)
    assert found if is_searched else found == (first,)


def test_a_plan_of_one_pass_alone_says_that_stages_were_left_out() -> None:
    first = slow_plan(0.1, 0.99)
    of = request(cluster_with_hosts(1))
    (found,) = offloaded_if_faster(of, (first,), lambda _: (taking(first, first.step_s / 2),))
    assert found.search.left_out[IN_STAGES] == first.search.num_leaves
    lower = replace(first, search=replace(first.search, lower_bound_s=first.step_s / 8))
    (found,) = offloaded_if_faster(of, (lower,), lambda _: (taking(first, first.step_s / 2),))
    assert found.search.lower_bound_s == first.step_s / 8, "what fits without may be faster still"
    stages = request(cluster_with_hosts(2), pins={"pp": 2})
    assert offloaded_if_faster(stages, (first,), lambda _: ()) == (first,)


def test_offload_that_gains_little_or_finds_nothing_leaves_the_plan() -> None:
    first, of = slow_plan(0.5, 0.99), request(cluster_with_hosts(1))
    hardly = taking(first, first.step_s * (1 - LEAST_GAIN / 2))
    assert offloaded_if_faster(of, (first,), lambda _: (hardly,)) == (first,)

    def nothing(_: PlanRequest) -> tuple[Plan, ...]:
        raise InfeasibleError("nothing", binding_constraint="memory")

    assert offloaded_if_faster(of, (first,), nothing) == (first,)


def test_where_states_leave_no_room_nothing_else_is_tried() -> None:
    """Parameters, gradients and two states of 8-byte numbers, four layers and more, on one device
    and sharded over two."""
    numbers = sum(math.prod(p.shape) for p in stack_graph().parameters)
    for num_devices in (1, 2):
        hosts = cluster_with_hosts(num_devices)
        # A step of AdamW makes tensors at once: what is left out of the bound.
        states = hosts.reserve_bytes + 4 * 8 * numbers // num_devices
        bounds = [
            memory
            for memory in range(states // 2, 2 * states, states // 20)
            if must_offload(request(hosts, memory_bytes=memory))
        ]
        assert states - states // 20 <= max(bounds) <= 1.5 * states
        with pytest.raises(InfeasibleError):
            plan(hosts, memory_bytes=max(bounds), pins={"offload": "none"})
        assert not must_offload(request(hosts, memory_bytes=1, allow_offload=True))
        assert not must_offload(request(hosts, memory_bytes=1, pins={"offload": "optimizer"}))


def test_a_pipeline_that_is_pinned_is_made_to_fit_as_a_whole() -> None:
    pins, hosts = {"pp": 2, "microbatches": 2}, cluster_with_hosts(2)
    least = plan(hosts, pins={**pins, "offload": "optimizer"})
    assert least.memory.optimizer == 0 and set(offloads(least)) == {"optimizer"}
    # The host's step: 7 passes over the layers of the stage that ends last, at 10 GB/s.
    layer_bytes = 8 * (2 * 64 * 128 + 128 + 64)
    layers = (least.time.optimizer_s - 4e-6) / (7 * layer_bytes / 1e10)
    assert round(layers) in (1, 2, 3) and layers == pytest.approx(round(layers))
    found = plan(hosts, pins=pins, memory_bytes=least.memory.peak)
    assert found.memory.peak <= least.memory.peak and NEEDS_OFFLOAD in found.notes
    assert emit_plan(stack_graph(), least).offloaded == {p.name for p in stack_graph().parameters}


def test_layers_of_a_pipeline_go_to_the_host_one_by_one() -> None:
    """As many of them as it takes, and the plan says so."""
    pins, hosts = {"pp": 2, "microbatches": 2}, cluster_with_hosts(2)
    (group,) = hosts.groups
    slow = replace(group.device, host_memory_bytes_per_s=3e9)  # adds gradients up behind all others
    hosts = replace(hosts, groups=(replace(group, device=slow),))
    whole, least = (plan(hosts, pins={**pins, "offload": x}) for x in ("none", "optimizer"))
    budget = (whole.memory.peak + least.memory.peak) // 2
    found = plan(hosts, pins=pins, memory_bytes=budget)
    assert set(offloads(found)) == {"none", "optimizer"} and found.memory.peak <= budget
    assert whole.time.step_s < found.time.step_s < least.time.step_s
    # Gradients that leave with every backward are charged to nobody.
    layer_bytes = 8 * (2 * 64 * 128 + 128 + 64)
    assert whole.memory.gradients == 3 * layer_bytes and least.memory.gradients == 0
    assert found.memory.gradients in (layer_bytes, 2 * layer_bytes)
    (note,) = (x for x in found.notes if "host's memory:" in x)
    assert note.startswith("parameters and optimizer states of ")
    (why,) = (x for x in found.notes if x.startswith("fits because: "))
    assert "optimizer states of " in why
    names = emit_plan(stack_graph(), found).offloaded
    assert 0 < len(names) < len(stack_graph().parameters)


def test_parameters_of_layers_come_where_states_alone_do_not_make_room() -> None:
    by_layer, staying = (plan(pins={"offload": x}) for x in ("parameters", "optimizer"))
    assert by_layer.memory.parameters == 0 and by_layer.memory.peak < staying.memory.peak
    assert by_layer.simulated is not None
    assert price_plan(stack_graph(), by_layer, PROBER).memory == by_layer.memory
    found = plan(memory_bytes=(by_layer.memory.peak + staying.memory.peak) // 2)
    assert "parameters" in offloads(found)
    assert any("of 5 layers on the host until their layer runs" in note for note in found.notes)
    assert any("come twice, for its forward and its backward" in note for note in found.notes)
    pins = {"pp": 2, "microbatches": 2, "offload": "parameters"}
    stages = plan(cluster_with_hosts(2), pins=pins)
    emitted = emit_plan(stack_graph(), stages)
    assert emitted.by_layer == emitted.offloaded == {p.name for p in stack_graph().parameters}
    assert stages.memory.parameters == 0


def test_what_is_gathered_once_does_not_come_by_layer() -> None:
    hosts = cluster_with_hosts(2)
    with pytest.raises(OptionError, match="pin zero=0 or zero=3"):
        plan(hosts, pins={"dp": 2, "zero": 2, "offload": "parameters"})


def with_disks(num_devices: int, **figures: float) -> ClusterSpec:
    """Processes of this machine, as if their hosts had disks of 1 GB/s, and these figures."""
    spec = cluster_with_hosts(num_devices)
    (group,) = spec.groups
    device = replace(group.device, **figures)
    return replace(spec, groups=(replace(group, device=device),))


LAYER_BYTES = 8 * (2 * 64 * 128 + 128 + 64)


@pytest.mark.parametrize("pins", [{}, {"pp": 2, "microbatches": 2}], ids=["one pass", "stages"])
def test_states_on_disk_have_a_price(pins: dict[str, Any]) -> None:
    """Two states of a number are read from the disk and written, one after the other."""
    spec = with_disks(2 if pins else 1)
    memory, disk = (plan(spec, pins={**pins, "offload": x}) for x in ("optimizer", "disk"))
    # And 7 passes over the host's memory, at 10 GB/s.
    layers = (disk.time.optimizer_s - 4e-6) / (4 * LAYER_BYTES / 1e9 + 7 * LAYER_BYTES / 1e10)
    assert round(layers) in ((1, 2, 3) if pins else (4,))
    assert layers == pytest.approx(round(layers))
    assert disk.memory.optimizer == 0 and set(offloads(disk)) == {"disk"}
    assert disk.step_s > memory.step_s and (pins or disk.memory == memory.memory)
    assert any("keep_states_on_disk" in note for note in disk.notes)
    if not pins:
        assert price_plan(stack_graph(), disk, PROBER).time == disk.time
    with pytest.raises(OptionError, match="give disk_bytes_per_s of the devices"):
        plan(with_disks(2, disk_bytes_per_s=0.0), pins={**pins, "offload": "disk"})


def test_states_go_to_the_disk_where_the_host_has_no_room() -> None:
    small = plan(pins={"offload": "optimizer"}).memory.peak
    # Four numbers each of 4 layers leave the device, and two of them are states.
    host_bytes = 4 * 4 * LAYER_BYTES
    roomy = plan(with_disks(1, host_memory_bytes=host_bytes), memory_bytes=small)
    assert "disk" not in offloads(roomy)
    narrow = with_disks(1, host_memory_bytes=host_bytes // 2)
    for options in ({}, {"allow_offload": True}):
        found = plan(narrow, memory_bytes=small, **options)
        assert "disk" in offloads(found) and NEEDS_DISK in found.notes
        assert not {"optimizer", "parameters"}.intersection(offloads(found))
    for spec in (
        with_disks(1, host_memory_bytes=host_bytes // 4),
        with_disks(1, host_memory_bytes=host_bytes // 2, disk_bytes_per_s=0.0),
    ):
        with pytest.raises(InfeasibleError):
            plan(spec, memory_bytes=small)


def test_nothing_fits_at_all() -> None:
    with pytest.raises(InfeasibleError) as least:
        plan(memory_bytes=1000)
    assert least.value.required_bytes > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pins": {"pp": 2, "microbatches": 2, "offload": "activations"}}, "not in a pipeline"),
        ({"pins": {"microbatches": 2, "offload": "optimizer"}, "optimizer": "sgd"}, "no states"),
    ],
)
def test_pins_that_a_pipeline_cannot_keep(options, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan(cluster_with_hosts(2), **options)


def test_a_plan_with_offload_is_simulated_and_comes_back_from_its_file() -> None:
    found = plan(pins={"offload": "optimizer"})
    assert found.simulated is not None and found.simulated.step_s >= found.time.optimizer_s
    loaded = plan_from_json(plan_to_json(found))
    assert loaded == found
    priced = price_plan(stack_graph(), loaded, PROBER)
    assert (priced.time, priced.memory) == (found.time, found.memory)
    assert priced.simulated == found.simulated


def test_a_plan_is_not_priced_without_figures_of_the_host() -> None:
    found = plan(pins={"offload": "optimizer"})
    (group,) = found.cluster.groups
    for name in ("host_bytes_per_s", "host_memory_bytes_per_s"):
        device = replace(group.device, **{name: 0.0})
        cluster = replace(found.cluster, groups=(replace(group, device=device),))
        with pytest.raises(PlanMismatchError, match=f"give {name} of the devices"):
            price_plan(stack_graph(), replace(found, cluster=cluster), PROBER)
