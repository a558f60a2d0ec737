"""The region search against HiGHS on the same tables: one region each of four families."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import LinearConstraint, milp
from support.models.hugging_face import BATCH, tiny_model
from support.models.vision import images, small_resnet

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.passes.region.elimination import Factor
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.search import RegionProblem
from meshfold.passes.region.typing import MeshSearch

SCALE = 1e6
"""HiGHS has absolute tolerances: microseconds are numbers around one."""


@cache
def graph_of(family: str) -> FoldedGraph:
    if family != "resnet":
        model, batch = tiny_model(family)
        return capture(model, batch).graph
    return capture(small_resnet(), images(BATCH, 16, 8)).graph


def largest_region(graph: FoldedGraph) -> int:
    return max(range(len(graph.regions)), key=lambda r: len(graph.regions[r].graph.ops))


def problem_of(family: str, sequence_parallel: bool, cp: int = 1, ep: int = 1) -> RegionProblem:
    graph = graph_of(family)
    cluster = resolve_cluster("dgx-v100", 4 * cp * ep)
    search = MeshSearch(graph, cluster, build_mesh(cluster, 2, 2, cp=cp, ep=ep), BATCH)
    return search.problem(largest_region(graph), "sequence" if sequence_parallel else "tensor")


def milp_optimum(domains: tuple[int, ...], factors: list[Factor]) -> float:
    """min over assignments of the sum of the tables, as a mixed integer program: a binary per
    value of a variable, a weight per finite entry of a table, marginals that agree."""
    offsets = np.cumsum([0, *domains])
    costs: list[np.ndarray[Any, Any]] = [np.zeros(int(offsets[-1]))]
    rows, columns, entries = [], [], []
    sides: list[float] = []

    def add(row: int, places: np.ndarray[Any, Any], value: float) -> None:
        rows.append(np.full(len(places), row))
        columns.append(places)
        entries.append(np.full(len(places), value))

    for i, size in enumerate(domains):
        add(len(sides), np.arange(offsets[i], offsets[i] + size), 1.0)
        sides.append(1.0)
    next_column = int(offsets[-1])
    fixed_s = sum(float(factor.table) for factor in factors if not factor.variables)
    for factor in (factor for factor in factors if factor.variables):
        at = np.argwhere(np.isfinite(factor.table))
        costs.append(factor.table[tuple(at.T)] * SCALE)
        own = next_column + np.arange(len(at))
        next_column += len(at)
        for position, i in enumerate(factor.variables):
            for value in range(domains[i]):
                add(len(sides), own[at[:, position] == value], 1.0)
                add(len(sides), np.array([offsets[i] + value]), -1.0)
                sides.append(0.0)
    shape = len(sides), next_column
    matrix = sparse.csr_matrix(
        (np.concatenate(entries), (np.concatenate(rows), np.concatenate(columns))), shape
    )
    integrality = np.zeros(next_column)
    integrality[: offsets[-1]] = 1
    found = milp(
        np.concatenate(costs),
        constraints=LinearConstraint(matrix, sides, sides),
        integrality=integrality,
        bounds=(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return float(found.fun) / SCALE + fixed_s


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral", "resnet"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("price", [0.0, 1e-9])
def test_elimination_finds_the_optimum_of_highs(
    family: str, sequence_parallel: bool, price: float
) -> None:
    check_optimum(problem_of(family, sequence_parallel), Prices(used_s_per_byte=price))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5", "mixtral", "resnet"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_elimination_finds_the_optimum_of_highs_on_cp_and_tp(
    family: str, sequence_parallel: bool
) -> None:
    problem = problem_of(family, sequence_parallel, cp=2)
    open_axes = {
        k for rules in problem.domains for c in rules.rules for k in (1, 2) if c[k].splits_work
    }
    assert open_axes == {1, 2}
    check_optimum(problem, Prices(used_s_per_byte=1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_elimination_finds_the_optimum_of_highs_beside_shared_experts(
    sequence_parallel: bool,
) -> None:
    problem = problem_of("mixtral", sequence_parallel, ep=2)
    check_optimum(problem, Prices(used_s_per_byte=1e-9))


def check_optimum(problem: RegionProblem, prices: Prices) -> None:
    solution = problem.solve(prices)
    assert solution is not None
    expected = milp_optimum(problem.factors.domains, problem._tables([prices]))
    assert solution.objective_s == pytest.approx(expected, rel=1e-7)
