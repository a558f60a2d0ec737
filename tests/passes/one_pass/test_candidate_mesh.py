"""A mesh in the race: its bound rises with every region typed and is never above its programs."""

from functools import cache

import pytest
from support.models.hugging_face import BATCH, families, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.graph.boundaries import num_instances
from meshfold.passes.one_pass.bounds import least_compute_s
from meshfold.passes.one_pass.candidate_mesh import CandidateMesh
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import strategies_on
from meshfold.passes.region.pins import pinned_slots
from meshfold.passes.region.typing import ROLES, MeshSearch

CLUSTER = resolve_cluster("dgx-v100", 8)
MESHES = [Degrees(8, 1, 1), Degrees(2, 1, 4), Degrees(1, 1, 8), Degrees(2, 2, 2)]


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


def candidate_mesh(
    family: str, degrees: Degrees, search: MeshSearch, bare_s: float = 0.0
) -> CandidateMesh:
    strategies = [candidate for candidate in strategies_on(degrees) if candidate.offload == "none"]
    return CandidateMesh(
        graph_of(family), search.costs, degrees, strategies, bare_s, search=lambda: search
    )


def search_of(family: str, degrees: Degrees, pins: CompileOptions | None = None) -> MeshSearch:
    mesh = build_mesh(CLUSTER, degrees.dp, degrees.tp, cp=degrees.cp)
    graph = graph_of(family)
    pinned = pinned_slots(graph, pins.layout_pins if pins else ())
    return MeshSearch(graph, CLUSTER, mesh, BATCH, pinned=pinned)


@pytest.mark.parametrize("family", families("llama", without=("bert", "vit", "mixtral")))
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_bound_rises_up_to_that_of_the_typed_mesh(family: str, degrees: Degrees) -> None:
    search = search_of(family, degrees)
    one = candidate_mesh(family, degrees, search)
    bounds = [one.bound_s]
    while one.raise_bound():
        bounds.append(one.bound_s)
    typed = MeshPlanner(
        graph_of(family), CLUSTER, search, one.strategies, CompileOptions(), OpProber()
    )
    rising = [*bounds, typed.fastest_s]
    assert len(bounds) > 1
    for before, after in zip(rising, rising[1:], strict=False):
        assert 0 < before <= after * (1 + 1e-9)
    one.planner = typed
    assert one.bound_s == typed.fastest_s


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_no_typing_is_below_what_its_ops_take_when_sharded_over_all_ranks(degrees: Degrees) -> None:
    search = search_of("llama", degrees)
    costs = CostModel(CLUSTER, search.mesh)
    for r in num_instances(graph_of("llama")):
        bare_s = sum(least_compute_s(search.graphs[r], costs))
        for mode in ROLES if search.space.tp_axis is not None else ["tensor"]:
            assert bare_s <= search.ops_s(r, mode) * (1 + 1e-9)


def test_regions_that_share_a_parameter_are_not_typed_alone() -> None:
    """GPT-2's head is its embedding: both regions keep their bare bound."""
    search = search_of("gpt2", Degrees(2, 1, 4))
    one = candidate_mesh("gpt2", Degrees(2, 1, 4), search)
    typed = 0
    while one.raise_bound():
        typed += 1
    assert typed == len(graph_of("gpt2").regions) - 2


def test_a_bound_from_elsewhere_holds_until_the_typed_regions_pass_it() -> None:
    search = search_of("llama", Degrees(2, 1, 4))
    assert candidate_mesh("llama", Degrees(2, 1, 4), search, bare_s=7.0).bound_s == 7.0


def test_a_mesh_with_pinned_layouts_is_typed_as_a_whole() -> None:
    pins = CompileOptions(pins={"layout:*.q_proj.weight": "tp:0"})
    search = search_of("llama", Degrees(2, 1, 4), pins)
    assert not candidate_mesh("llama", Degrees(2, 1, 4), search).raise_bound()
