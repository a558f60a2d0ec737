"""The bound on a mesh that was never typed: below every program, and tight enough to prune."""

import math
from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph, SlotKind
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.bounds import Room, least_step_s
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import strategies_on
from meshfold.passes.region.typing import MeshSearch

PROBER = OpProber()
CLUSTER = resolve_cluster("dgx-v100", 8)
MESHES = [Degrees(2, 1, 4), Degrees(2, 2, 2), Degrees(2, 4, 1), Degrees(4, 2, 1), Degrees(4, 1, 2)]


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


def search_of(family: str, degrees: Degrees) -> MeshSearch:
    mesh = build_mesh(CLUSTER, degrees.dp, degrees.tp, cp=degrees.cp)
    return MeshSearch(graph_of(family), CLUSTER, mesh, BATCH)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_no_program_of_the_mesh_is_below(family: str, degrees: Degrees) -> None:
    search = search_of(family, degrees)
    assert search.space.data is not None
    bound_s = least_step_s(
        graph_of(family), search.space.data, search.costs, Room(math.inf, math.inf)
    )
    strategies = [candidate for candidate in strategies_on(degrees) if candidate.offload == "none"]
    of = MeshPlanner(graph_of(family), CLUSTER, search, strategies, CompileOptions(), PROBER)
    assert 0 < bound_s <= of.plan().unlimited_s
    for strategy in strategies:
        assert bound_s <= of.uniform(strategy).time.step_s


def test_fewer_ranks_that_shard_weights_have_more_to_reduce() -> None:
    """By hand: each region's gradients over dp alone, where they outweigh the backward."""
    graph = graph_of("llama")
    data = search_of("llama", Degrees(2, 4, 1)).space.data
    assert data is not None
    by_tp = {}
    for degrees in (Degrees(2, 1, 4), Degrees(2, 2, 2), Degrees(2, 4, 1)):
        mesh = build_mesh(CLUSTER, degrees.dp, degrees.tp, cp=degrees.cp)
        by_tp[degrees.tp] = least_step_s(
            graph, data, CostModel(CLUSTER, mesh), Room(math.inf, math.inf)
        )
    assert by_tp[1] >= by_tp[2] >= by_tp[4]
    costs = CostModel(CLUSTER, build_mesh(CLUSTER, 2, 1, cp=4))
    scatter_s = whole_s = sharded_s = 0.0
    for instance in graph.instances:
        region = graph.regions[instance.region].graph
        num_bytes = sum(
            region.values[i].num_bytes
            for i, slot in enumerate(region.slots)
            if slot.kind is SlotKind.PARAMETER
        )
        sharded_s += sum(
            costs.collective_s(kind, num_bytes, (0,)) for kind in ("all_gather", "reduce_scatter")
        )
        scatter_s += costs.collective_s("reduce_scatter", num_bytes, (0,))
        whole_s += min(costs.collective_s("all_reduce", num_bytes, axes) for axes in ((0,), (0, 1)))
    assert by_tp[1] >= min(whole_s, scatter_s) * (1 - 1e-12)
    without_memory_s = least_step_s(graph, data, costs, Room(0.0, 0.0))
    assert without_memory_s >= sharded_s * (1 - 1e-12)
    assert without_memory_s >= by_tp[1]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_memory_raises_the_bound_but_not_above_what_fits(share: float) -> None:
    degrees = Degrees(2, 2, 2)
    search = search_of("llama", degrees)
    strategies = [candidate for candidate in strategies_on(degrees) if candidate.offload == "none"]

    def planned(memory_bytes: int | None) -> MeshPlanner:
        options = CompileOptions(memory_bytes=memory_bytes)
        return MeshPlanner(graph_of("llama"), CLUSTER, search, strategies, options, PROBER)

    free = planned(None)
    peaks = [free.uniform(s).memory.peak for s in strategies]
    budget = round(min(peaks) + share * (max(peaks) - min(peaks)))
    found = planned(budget).plan().best
    assert found is not None and search.space.data is not None
    # AdamW: a parameter, its gradient, two moments and the denominator of its step.
    bound_s = least_step_s(
        graph_of("llama"), search.space.data, search.costs, Room(budget / 5, budget)
    )
    assert bound_s <= found.time.step_s
