"""States and activations on other ranks and on the host: by hand, and as candidates of the
search."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model
from support.search.triples import draw_triple

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph, OpGraph, Slot, SlotKind, Value
from meshfold.ir.options import CompileOptions
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.ir.strategy import Degrees, UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.memory.zero import (
    gathered_axes,
    host_traffic,
    program_shards,
    program_states,
    slot_facts,
    whole_notes,
    zero_axes,
    zero_layouts,
)
from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.one_pass.priced import order_of
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import strategies_on
from meshfold.passes.price.overlap import Busy
from meshfold.passes.price.region import HostTraffic
from meshfold.passes.price.step import ends_s, instance_s
from meshfold.passes.region.typing import MeshSearch

PROBER = OpProber()
HOST_BYTES_PER_S = 15.75e9  # of dgx-v100, each way


def with_disks() -> ClusterSpec:
    """Four V100, whose host has a disk of 1 GB/s for each."""
    spec = resolve_cluster("dgx-v100", 4)
    (group,) = spec.groups
    device = replace(group.device, disk_bytes_per_s=1e9)
    return replace(spec, groups=(replace(group, device=device),))


@cache
def graph_of(family: str) -> FoldedGraph:
    return capture(*tiny_model(family)).graph


@cache
def search_of(family: str, dp: int, tp: int) -> MeshSearch:
    cluster = with_disks()
    return MeshSearch(graph_of(family), cluster, build_mesh(cluster, dp, tp), BATCH)


def planner(
    family: str,
    dp: int,
    tp: int,
    *,
    memory_bytes: int | None = None,
    optimizer: str = "adamw",
    among: Callable[[UniformStrategy], bool] = lambda candidate: True,
) -> MeshPlanner:
    """Over the candidates `among`, those that cannot run included."""
    return MeshPlanner(
        graph_of(family),
        with_disks(),
        search_of(family, dp, tp),
        [candidate for candidate in strategies_on(Degrees(dp=dp, tp=tp)) if among(candidate)],
        CompileOptions(memory_bytes=memory_bytes, optimizer=optimizer),
        PROBER,
    )


def layer_leaf(of: MeshPlanner, strategy: UniformStrategy) -> StrategyCandidate:
    """The candidate of the layer that repeats."""
    return of._uniform_candidates(strategy)[1]


@pytest.mark.parametrize(("family", "dp", "tp"), [("gpt2", 2, 2), ("llama", 1, 1)])
def test_a_step_is_the_sum_of_its_layers(family: str, dp: int, tp: int) -> None:
    """Of every candidate, those that cannot run included: time, and what is there all the time."""
    of = planner(family, dp, tp, among=lambda strategy: not strategy.batch_on_tp)
    (program, *_) = of.programs.values()
    inputs = program_states(of.folded, program.typings, of.mesh).inputs
    assert len(of.strategies) == len(set(of.strategies)) >= 9
    for strategy in of.strategies:
        candidates, priced = of._uniform_candidates(strategy), of.uniform(strategy)
        layers = [candidates[i.region] for i in of.folded.instances]
        total_s = (
            sum(candidate.time_s for candidate in layers) + layers[0].ends_s + of.costs.launch_s
        )
        assert priced.time.step_s == pytest.approx(total_s, rel=1e-12)
        memory = priced.memory
        assert memory.optimizer == sum(candidate.optimizer_bytes for candidate in layers)
        stored = sum(candidate.parameter_bytes for candidate in layers)
        assert memory.parameters + memory.reserve + inputs == stored + of.fixed_bytes


def test_offloaded_activations_hide_behind_compute_as_far_as_the_link_allows() -> None:
    of = planner("llama", 1, 1)
    plain, moved = (
        layer_leaf(of, UniformStrategy(offload=offload)) for offload in ("none", "activations")
    )
    one_way_s = plain.memory.saved_bytes / HOST_BYTES_PER_S
    forward_s, backward_s = plain.price.forward_s, plain.price.backward_s
    exposed_s = max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - backward_s)
    assert moved.time_s == pytest.approx(plain.time_s + exposed_s, rel=1e-12)
    assert moved.overlapped_s == pytest.approx(2 * one_way_s)
    # The layer's own is away; while it runs, a neighbour's is on the way.
    assert (moved.retained_bytes, moved.memory) == (0, plain.memory)
    worst = max(plain.memory.forward_peak_bytes, plain.memory.backward_peak_bytes)
    assert moved.workspace_bytes == worst + plain.memory.saved_bytes
    assert moved.states_bytes == plain.states_bytes


def test_a_slow_link_exposes_what_compute_does_not_hide() -> None:
    of = planner("llama", 1, 1)
    slow = with_disks()
    (group,) = slow.groups
    device = replace(group.device, host_bytes_per_s=1e6)
    costs = replace(of.costs, cluster=replace(slow, groups=(replace(group, device=device),)))
    candidate = layer_leaf(of, UniformStrategy(offload="activations"))
    traffic = host_traffic(candidate.strategy.offload, candidate.memory, 0, 0, 0, costs)
    assert traffic.saved_s == candidate.memory.saved_bytes / 1e6 > candidate.price.backward_s


def test_offloaded_states_leave_and_the_way_there_and_back_is_paid() -> None:
    of = planner("llama", 1, 1)
    plain, moved = (
        layer_leaf(of, UniformStrategy(offload=offload)) for offload in ("none", "optimizer")
    )
    num_bytes = plain.parameter_bytes
    assert plain.optimizer_bytes == 2 * num_bytes and plain.gradient_bytes == num_bytes
    assert (moved.optimizer_bytes, moved.gradient_bytes) == (0, 0)
    assert moved.parameter_bytes == num_bytes
    one_way_s = num_bytes / HOST_BYTES_PER_S
    # The slowest of 4 devices that differ by 0.8 %: sqrt(2 ln 4) = 1.66511.
    device_s = 7 * num_bytes / (900e9 * 0.91) * (1 + 0.008 * math.sqrt(2 * math.log(4)))
    hidden = max(plain.price.backward_s, one_way_s) + max(plain.price.forward_s, one_way_s)
    expected_s = hidden + 7 * num_bytes / 13.6e9
    assert plain.time_s == pytest.approx(
        plain.price.forward_s + plain.price.backward_s + device_s, rel=1e-9
    )
    assert moved.time_s == pytest.approx(expected_s, rel=1e-12)
    # Gradients of the layer that is last have nothing to hide behind, nor its parameters.
    assert moved.ends_s == pytest.approx(2 * one_way_s)


def test_parameters_that_come_by_layer_come_twice() -> None:
    of = planner("llama", 1, 1)
    plain, staying, moved = (
        layer_leaf(of, UniformStrategy(offload=offload))
        for offload in ("none", "optimizer", "parameters")
    )
    num_bytes = plain.parameter_bytes
    one_way_s = num_bytes / HOST_BYTES_PER_S
    forward_s, backward_s = plain.price.forward_s, plain.price.backward_s
    hidden = max(forward_s, one_way_s) + max(backward_s, one_way_s)
    assert moved.time_s == pytest.approx(hidden + 7 * num_bytes / 13.6e9, rel=1e-12)
    assert moved.price.host.by_layer_s == pytest.approx(one_way_s)
    assert moved.parameter_bytes == moved.optimizer_bytes == moved.gradient_bytes == 0
    # Its own, and those of the layer that comes.
    assert moved.workspace_bytes == staying.workspace_bytes + 2 * num_bytes
    # Under ZeRO 3 a gather waits for its copy: 7 + 3 seconds, and 2 x 3 + 4 of gathers and more.
    price = replace(
        plain.price,
        forward_s=1.0,
        backward_s=8.0,
        gather_s={"dp": 3.0},
        reduce_s={"dp": 4.0},
        host=HostTraffic(gradients_s=2.0, parameters_s=7.0, by_layer_s=7.0),
    )
    assert instance_s(price, 1.0) == 10.0 + 10.0 and ends_s(price) == 3.0 + 4.0 + 7.0 + 2.0
    assert instance_s(replace(price, num_gathers=1, gather_s={}), 1.0) == 7.0 + 8.0


def test_zero_2_stores_shards_and_keeps_what_it_gathers() -> None:
    of = planner("llama", 4, 1)
    graph, facts = of.folded.regions[1].graph, slot_facts(of.folded, of.reads)[1]
    none, _, two, three = (layer_leaf(of, UniformStrategy(dp=4, zero=z)) for z in range(4))
    shards = zero_layouts(graph, none.typing, of.mesh, gathered_axes(graph, none.typing, of.mesh))
    assert shards.keys() == facts.first
    for candidate in (two, three):
        assert {i: candidate.typing.slots[i] for i in shards} == shards
        assert candidate.states_bytes * 4 == none.states_bytes
        assert candidate.gradient_bytes * 4 == none.gradient_bytes
    # The whole parameters are there between forward and backward, or twice for a while.
    assert two.retained_bytes == three.retained_bytes + none.parameter_bytes
    assert two.workspace_bytes == three.workspace_bytes - 2 * none.parameter_bytes
    gather_s = sum(two.price.gather_s.values())
    price, slowdown = two.price, of.costs.cluster.overlap_slowdown
    reduce_s = sum(price.reduce_s.values())
    # Nor are they copied out of the buffer of a gather once more.
    copied_s = price.backward_s + price.regathered_s
    saved_s = Busy(copied_s, price.graph_backward_s, slowdown).beside_s(gather_s + reduce_s)
    saved_s -= Busy(price.backward_s, price.graph_backward_s, slowdown).beside_s(reduce_s)
    assert three.time_s - two.time_s == pytest.approx(saved_s, rel=1e-12, abs=1e-15)


def test_zero_1_in_one_pass_is_zero_2() -> None:
    of = planner("llama", 4, 1)
    one, two = (layer_leaf(of, UniformStrategy(dp=4, zero=zero)) for zero in (1, 2))
    assert one.typing == two.typing and one.time_s == two.time_s
    assert one.resident_bytes == two.resident_bytes


def test_a_tied_parameter_is_sharded_where_all_of_its_readers_gather_it() -> None:
    """On cp alone the embedding of a BERT gathers its table, the head reads rows of it."""
    folded, cluster = graph_of("bert"), resolve_cluster("dgx-h100", 4)
    mesh = build_mesh(cluster, 1, 1, cp=4)
    typings = MeshSearch(folded, cluster, mesh, BATCH).solve(zero=0, mode="tensor").typings
    (group,) = folded.tied_slots
    alone = []
    for r, i in group:
        graph = folded.regions[r].graph
        axes = gathered_axes(graph, typings[r], mesh)
        alone.append(zero_layouts(graph, typings[r], mesh, axes).get(i))
    together = program_shards(folded, typings, mesh)
    assert len(set(alone)) == 2
    assert len({together[r].get(i) for r, i in group}) == 1


def test_plans_that_shard_tied_parameters_over_cp_can_be_emitted() -> None:
    captured = capture(*tiny_model("bert"))
    options = CompileOptions(pins={"cp": 4, "zero": 3})
    plan = plan_captured(captured, "bert", resolve_cluster("local-cpu", 4), options)
    assert any(region.strategy.zero == 3 for region in plan.regions)
    emit_plan(captured.graph, plan)


def test_fewer_query_heads_on_a_rank_than_key_heads_can_be_planned() -> None:
    """One query head a rank, three key heads: each rank picks the one that it needs."""
    triple = draw_triple(406)
    captured = capture(triple.model, triple.batch)
    plan = plan_captured(captured, "grouped", triple.cluster, triple.options)
    emit_plan(captured.graph, plan)


def test_sharded_states_send_only_the_shard_to_the_host() -> None:
    of = planner("llama", 4, 1)
    traffic = [
        layer_leaf(of, UniformStrategy(dp=4, zero=zero, offload="optimizer")).price.host.gradients_s
        for zero in range(4)
    ]
    assert traffic[1:] == pytest.approx([traffic[0] / 4] * 3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_resident_bounds_the_program(family: str) -> None:
    """No candidate holds more in the bounds than the exact figures say."""
    of = planner(family, 2, 1)
    for chain in of._chains():
        for strategy in of.strategies:
            candidates = [
                max((x for x in region if x.strategy == strategy), key=lambda x: len(x.sharded))
                for region in chain.everything
                if any(x.strategy == strategy for x in region)
            ]
            if len(candidates) < len(chain.everything):
                continue
            priced = of.price([candidates[i.region] for i in of.folded.instances])
            held = sum(
                chain.moments._bytes_before_backward(candidates[i.region], i.region)
                for i in of.folded.instances
            )
            assert held + of.fixed_bytes <= priced.memory.peak


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_the_plan_with_planned_leaves_is_within_its_gap_of_every_program(share: float) -> None:
    """Brute force: every layer any of four candidates."""
    offered = [
        UniformStrategy(),
        UniformStrategy(recompute="selective"),
        UniformStrategy(offload="activations"),
        UniformStrategy(recompute="selective", offload="optimizer"),
    ]
    free = planner("vit", 1, 1, among=offered.__contains__)
    programs = []
    for chain in free._chains():
        choices: Sequence[Sequence[StrategyCandidate]] = [
            chain.candidates[i.region] for i in free.folded.instances
        ]
        programs += [free.price(list(assignment)) for assignment in itertools.product(*choices)]
    assert len(programs) == 4 ** len(free.folded.instances)
    peaks = [p.memory.peak for p in programs]
    budget = round(min(peaks) + share * (max(peaks) - min(peaks)))
    best = min((p for p in programs if p.memory.peak <= budget), key=order_of)
    found = planner("vit", 1, 1, memory_bytes=budget, among=offered.__contains__).plan()
    assert found.best is not None and found.best.memory.peak <= budget
    assert found.lower_bound_s <= best.time.step_s * (1 + 1e-9)
    gap = found.best.time.step_s / found.lower_bound_s - 1
    assert found.best.time.step_s <= best.time.step_s * (1 + gap)
    assert found.best.time.step_s <= best.time.step_s * 1.02


def test_a_note_names_the_reason_for_a_parameter_that_stays_whole() -> None:
    names = ("odd", "read", "sharded")
    values = tuple(Value(shape, "float32", True) for shape in ((1, 3), (32, 32), (32, 32)))
    graph = OpGraph(tuple(Slot(SlotKind.PARAMETER, name) for name in names), values, (), ())
    mesh = build_mesh(resolve_cluster("local-cpu", 2), 2, 1)
    (axis,) = zero_axes(mesh)
    whole = (INVARIANT,) * len(mesh.axes)
    shard = tuple(Shard(0) if k == axis else INVARIANT for k in range(len(mesh.axes)))
    odd, read = whole_notes(graph, (whole, whole, shard), range(3), mesh, "tensor")
    assert odd.startswith("ZeRO keeps odd [1, 3] whole: no dim divides over 2 ranks")
    assert read.startswith("ZeRO keeps read [32, 32] whole: an op reads it as Invariant")
