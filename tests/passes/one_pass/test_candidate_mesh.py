"""A mesh in the race: its bound rises with every region typed and is never above its programs."""

import math
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
    family: str,
    degrees: Degrees,
    search: MeshSearch,
    bare_s: float = 0.0,
    has_programs: bool = True,
) -> CandidateMesh:
    strategies = [candidate for candidate in strategies_on(degrees) if candidate.offload == "none"]
    graph = graph_of(family)
    planner = MeshPlanner(graph, CLUSTER, search, strategies, CompileOptions(), OpProber())
    return CandidateMesh(
        graph,
        search.costs,
        degrees,
        strategies,
        bare_s,
        search=lambda: search,
        typed=lambda _: planner if has_programs else None,
    )


def bounds_before_it_is_typed(one: CandidateMesh) -> list[float]:
    bounds = []
    while one.planner is None and one.bound_s < math.inf:
        bounds.append(one.bound_s)
        assert one.raise_bound()
    return bounds


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
    bounds = bounds_before_it_is_typed(one)
    assert one.planner is not None and one.bound_s == one.planner.fastest_s
    rising = [*bounds, one.bound_s]
    assert len(bounds) > 1
    for before, after in zip(rising, rising[1:], strict=False):
        assert 0 < before <= after * (1 + 1e-9)
    assert one.raise_bound() and one.bound_s == one.planner.bound_s
    assert not one.raise_bound()


def test_a_solved_mesh_has_a_plan_no_faster_than_its_bound() -> None:
    one = candidate_mesh("llama", Degrees(2, 1, 4), search_of("llama", Degrees(2, 1, 4)))
    while one.raise_bound():
        pass
    solution = one.solve(math.inf)
    assert one.plan is not None and one.plan.best is not None
    # The bounds are the same sums in another order.
    assert one.bound_s <= solution.lower_bound_s * (1 + 1e-12)
    assert solution.lower_bound_s <= solution.step_s * (1 + 1e-12)
    assert solution.step_s == one.plan.best_s
    assert one.solve(one.bound_s).step_s == math.inf


def test_a_mesh_without_programs_is_never_at_the_front() -> None:
    search = search_of("llama", Degrees(2, 1, 4))
    one = candidate_mesh("llama", Degrees(2, 1, 4), search, has_programs=False)
    bounds_before_it_is_typed(one)
    assert one.planner is None and one.bound_s == math.inf


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
    # The last of them is the bound before the rest is typed together.
    assert len(bounds_before_it_is_typed(one)) - 1 == len(graph_of("gpt2").regions) - 2


def test_a_bound_from_elsewhere_holds_until_the_typed_regions_pass_it() -> None:
    search = search_of("llama", Degrees(2, 1, 4))
    assert candidate_mesh("llama", Degrees(2, 1, 4), search, bare_s=7.0).bound_s == 7.0


def test_a_mesh_with_pinned_layouts_is_typed_as_a_whole() -> None:
    pins = CompileOptions(pins={"layout:*.q_proj.weight": "tp:0"})
    search = search_of("llama", Degrees(2, 1, 4), pins)
    assert len(bounds_before_it_is_typed(candidate_mesh("llama", Degrees(2, 1, 4), search))) == 1
