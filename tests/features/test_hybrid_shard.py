"""HSDP, ZeRO inside a part of the data parallel ranks: two replicas of two ranks each, against one
process. Numbers and layouts of the storage mesh are held in tests/compiler/ir/test_mesh.py."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.graphs.op_graphs import folded_stack
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools
from support.programs.emit import clipped_steps
from support.programs.pipeline import captured_model, planned
from support.programs.schedules import nodes_of_two

import meshfold
from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.cost_models.op_costs.collective_time import collective_s
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import OptionError
from meshfold.ir.options import Mode
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import parse_layout
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.bounds import Room, least_step_s
from meshfold.passes.one_pass.search import TOLERANCE, MeshPlanner
from meshfold.passes.one_pass.tree import SearchSpec, grow_tree, strategies_on
from meshfold.passes.region.typing import MeshSearch
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.validation.scaled_down import _small_degrees

EXACT = 1e-12
RANKS = 4
PINS = {"dp": 4, "tp": 1, "dp_shard": 2, "zero": 3}


@cache
def captured_family(family: str) -> Captured:
    model, batch = tiny_model(family)
    with float64_everywhere():
        return capture(model, batch)


@cache
def plan_for(family: str, zero: int, mode: Mode = "eager") -> Plan:
    options = meshfold.CompileOptions(pins={**PINS, "zero": zero}, mode=mode)
    cluster = resolve_cluster("local-cpu", RANKS)
    return plan_captured(captured_family(family), family, cluster, options)


def plan_for_nodes(pins: Mapping[str, int]) -> Plan:
    """Of GPT-2 on two nodes of two devices."""
    options = meshfold.CompileOptions(pins=pins)
    return plan_captured(captured_family("gpt2"), "gpt2", nodes_of_two(4), options)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("family", "zero", "mode"),
    [
        ("gpt2", 3, "eager"),
        ("llama", 2, "scheduled"),
        pytest.param("gpt2", 1, "eager", marks=pytest.mark.slow),
        pytest.param("gpt2", 2, "eager", marks=pytest.mark.slow),
        pytest.param("gpt2", 1, "scheduled", marks=pytest.mark.slow),
        pytest.param("gpt2", 3, "scheduled", marks=pytest.mark.slow),
        pytest.param("llama", 1, "eager", marks=pytest.mark.slow),
        pytest.param("llama", 3, "eager", marks=pytest.mark.slow),
        pytest.param("llama", 3, "scheduled", marks=pytest.mark.slow),
        pytest.param("uneven", 3, "eager", marks=pytest.mark.slow),
        pytest.param("mixtral", 3, "eager", marks=pytest.mark.slow),
    ],
)
def test_loss_and_every_gradient_equal_one_process(
    pools: Pools, family: str, zero: int, mode: Mode
) -> None:
    plan = plan_for(family, zero, mode)
    assert plan.strategy.degrees == Degrees(4, dp_shard=2) and plan.strategy.zero == zero
    stored = [p.stored for region in plan.regions for p in region.parameters]
    assert all(layout[0].copies == 2 for layout in stored)
    arguments = family, captured_family(family), plan_to_json(plan)
    for loss_error, gradient_error, name, uneven in pools.run(
        RANKS, "support.programs.emit:compare_step", *arguments
    ):
        assert loss_error <= EXACT
        assert gradient_error <= EXACT, name
        assert not uneven, "parameters with a gradient on one side only"


def test_traffic_by_hand() -> None:
    """Two nodes of two ranks: a layer is gathered in a node, its gradients are scattered there, and
    only the shards cross the network."""
    plan = plan_for_nodes(PINS)
    events = plan.events
    assert events is not None
    groups = [g for r in events.regions for g in r.groups if g.reduce is not None]
    assert groups
    for group in groups:
        assert group.gather is not None and group.reduce is not None
        whole = group.gather.num_bytes
        assert group.gather.axes == group.reduce.axes == ("dp_shard",)
        scattered, summed = group.reduce.steps
        assert (scattered.kind, summed.kind) == ("reduce_scatter", "all_reduce")
        assert (scattered.num_bytes, summed.num_bytes) == (whole, whole // 2)
        assert summed.axes == ("dp_replicate",)
        assert group.reduce.seconds == scattered.seconds + summed.seconds
    assert {g.gather.link for g in groups if g.gather} == {plan.cluster.groups[0].link.name}
    network = {g.reduce.steps[1].link for g in groups if g.reduce}
    assert network == {plan.cluster.network.name}
    assert not events.trailing


def test_memory_by_hand() -> None:
    """States are halved whatever number of replicas there is: every parameter divides by two."""
    whole, shared = plan_for_nodes({"dp": 4, "tp": 1, "zero": 0}), plan_for_nodes(PINS)
    assert shared.memory.parameters == whole.memory.parameters // 2
    assert shared.memory.optimizer == whole.memory.optimizer // 2
    quartered = plan_for_nodes({**PINS, "dp_shard": 4})
    assert quartered.memory.parameters == shared.memory.parameters // 2


def test_price_by_hand() -> None:
    """Of a square weight, whose layout is one of two shards on each of two nodes."""
    cluster = nodes_of_two(4)
    costs = CostModel(cluster, build_mesh(cluster, 4, 1))
    search = MeshSearch(folded_stack(), cluster, costs.mesh, 4)
    x, _ = search.solve(zero=0).typings[0].slots
    price = search.solutions()[0].pricer.price([x, parse_layout("S0*2")])
    size = 16 * 16 * 4
    near, far = GroupShape(2, 1, 2, 2), GroupShape(2, 2, 1, 1)
    links = costs.node_link, cluster.network
    assert price.gather_s["dp"] == collective_s("all_gather", size, near, *links)
    assert price.reduce_s["dp"] == pytest.approx(
        collective_s("reduce_scatter", size, near, *links)
        + collective_s("all_reduce", size // 2, far, *links),
        rel=1e-12,
    )


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_search_is_no_worse_than_every_assignment(share: float) -> None:
    """All combinations of what the regions of a stack may do, priced exactly: no one that fits is
    faster than the plan of the search, nor than its bound."""
    cluster = nodes_of_two(4)
    search = MeshSearch(folded_stack(), cluster, build_mesh(cluster, 4, 1), 4)
    strategies = [s for s in strategies_on(Degrees(4, dp_shard=2)) if s.offload == "none"]

    def planner(memory_bytes: int | None) -> MeshPlanner:
        options = meshfold.CompileOptions(memory_bytes=memory_bytes)
        return MeshPlanner(search.folded, cluster, search, strategies, options, OpProber())

    free = planner(None)
    programs = [
        free.price([choice[i.region] for i in free.folded.instances])
        for choice in itertools.product(*free.candidates)
    ]
    assert any(c.typing.slots[-1][0].copies == 2 for of in free.candidates for c in of)
    least, most = (f(p.memory.peak for p in programs) for f in (min, max))
    limit = int(least + share * (most - least))
    fitting = min(p.time.step_s for p in programs if p.memory.peak <= limit)
    found = planner(limit).plan()
    assert found.best is not None and found.best.memory.peak <= limit
    assert found.best.time.step_s <= fitting * (1 + TOLERANCE)
    assert found.lower_bound_s <= fitting * (1 + 1e-12)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"dp": 4, "dp_shard": 3}, "dp_shard can be 2, 4"),
        ({"tp": 4, "dp_shard": 2}, "dp_shard can be 1"),
        ({"dp": 4, "dp_shard": 2, "zero": 0}, "zero=0 shards nothing"),
    ],
)
def test_a_part_that_cannot_be_is_one_line(pins: dict[str, int], words: str) -> None:
    with pytest.raises(OptionError) as error:
        plan_for_nodes(pins)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_pin_of_all_ranks_is_plain_zero() -> None:
    plan = plan_for_nodes({**PINS, "dp_shard": 4})
    assert plan.strategy.degrees == Degrees(4) and plan.mesh.replicas == 1


def test_it_is_searched_where_dp_crosses_nodes() -> None:
    """By default a node's devices share states; also beside tp, which takes some of them."""

    def parts(devices: int, per_node: int) -> set[tuple[int, int, int]]:
        spec = SearchSpec(devices, per_node, batch_size=devices, pins={})
        return {(s.dp, s.tp, s.dp_shard) for s in grow_tree(spec).strategies if s.dp_shard}

    assert parts(8, 4) == {(8, 1, 4), (4, 2, 2)}
    assert parts(4, 4) == set()


def test_bounds_of_untyped_meshes_are_below_the_program() -> None:
    """What a mesh is left for: its least step is below that of a plan on it, whose gathers stay in
    a node."""
    folded, cluster = captured_family("gpt2").graph, nodes_of_two(4)
    search = MeshSearch(folded, cluster, build_mesh(cluster, 4, 1), folded.batch_size)
    assert search.space.data is not None
    costs = CostModel(cluster, build_mesh(cluster, 4, 1, replicas=2))
    bound_s = least_step_s(folded, search.space.data, costs, Room(0.0, 0.0))
    assert 0 < bound_s <= plan_for_nodes(PINS).time.step_s


def test_verify_keeps_two_replicas_where_processes_suffice() -> None:
    plan = plan_for_nodes(PINS)
    large = replace(plan.strategy, dp=64, dp_shard=8)
    assert _small_degrees(replace(plan, strategy=large))["dp"] == 4
    many = replace(large, pp=2, tp=2)
    assert _small_degrees(replace(plan, strategy=many))["dp"] == 2


def test_hsdp_is_a_baseline_where_there_are_several_nodes() -> None:
    plan = plan_for_nodes({})
    rows = {row.name: row for row in plan.baselines}
    assert rows["HSDP"].strategy.label == "dp4 (dp_shard2), zero3"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_recomputed_regions_equal_one_process(pools: Pools) -> None:
    plan = plan_for("gpt2", 3)
    regions = [replace(r, typing=replace(r.typing, recompute="full")) for r in plan.regions]
    text = plan_to_json(replace(plan, regions=tuple(regions)))
    for loss_error, gradient_error, name, _ in pools.run(
        RANKS, "support.programs.emit:compare_step", "gpt2", captured_family("gpt2"), text
    ):
        assert loss_error <= EXACT and gradient_error <= EXACT, name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_call_without_labels_gathers_the_same_shards(pools: Pools) -> None:
    arguments = "gpt2", captured_family("gpt2"), plan_to_json(plan_for("gpt2", 3))
    found = pools.run(RANKS, "support.programs.emit:inference_error", *arguments)
    assert max(found) <= EXACT


@pytest.mark.slow
@pytest.mark.multiprocess
def test_clipping_counts_every_shard_once(pools: Pools) -> None:
    expected = clipped_steps("gpt2", {}, 0.3)
    for found in pools.run(RANKS, "support.programs.emit:clipped_steps", "gpt2", PINS, 0.3):
        assert np.array(found) == pytest.approx(np.array(expected), abs=EXACT)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_is_saved_loads_under_another_plan(pools: Pools, tmp_path: Path) -> None:
    hybrid = plan_to_json(plan_for("llama", 3))
    options = meshfold.CompileOptions(pins={"dp": 2, "tp": 2, "zero": 3, "sp": 1})
    cluster = resolve_cluster("local-cpu", RANKS)
    other = plan_to_json(plan_captured(captured_family("llama"), "llama", cluster, options))
    for k, (first, second) in enumerate(((hybrid, other), (other, hybrid))):
        found = pools.run(
            RANKS,
            "support.programs.emit:save_and_load",
            "llama",
            captured_family("llama"),
            first,
            second,
            str(tmp_path / str(k)),
        )
        assert all(wrong == [] for wrong in found)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("family", "pins", "mode"),
    [
        ("gpt2", {"pp": 1, "zero": 2}, "eager"),
        pytest.param("gpt2", {"pp": 1, "zero": 1}, "scheduled", marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 1, "zero": 3}, "scheduled", marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2, "zero": 1}, "eager", marks=pytest.mark.slow),
        pytest.param(
            "gpt2",
            {"pp": 2, "zero": 3, "schedule": "1f1b"},
            "scheduled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_microbatches_and_stages_compute_what_one_process_does(
    pools: Pools, family: str, pins: dict[str, int], mode: Mode
) -> None:
    """ZeRO 1 sums the replicas behind its one reduction of a step; under 2 and 3 shards of several
    microbatches are added up first."""
    ranks = RANKS * pins["pp"]
    fixed = {"dp": RANKS, "tp": 1, "dp_shard": 2, "microbatches": 2, "recompute": "none"}
    plan = replace(planned(family, 2, ranks, tuple({**fixed, **pins}.items())), mode=mode)
    assert plan.strategy.degrees.replicas == 2 and plan.strategy.zero == pins["zero"]
    arguments = family, 2, captured_model(family, 2), [plan_to_json(plan)]
    for outcomes in pools.run(
        ranks, "support.programs.pipeline:run_pipelines", *arguments, timeout_s=600.0
    ):
        for outcome in outcomes:
            assert max(outcome.loss_error, outcome.gradient_error) < EXACT
            assert outcome.parameter_error < 1e-11
