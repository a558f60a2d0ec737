"""The search of one region that shares nothing with others."""

from collections.abc import Sequence

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.roles import AxisRole
from meshfold.passes.region.search import RegionSolution, SearchTables, prepare_region


def solve_region(
    graph: OpGraph,
    costs: CostModel,
    *,
    slot_layouts: Sequence[Sequence[Layout]],
    output_layouts: Sequence[Sequence[Layout]],
    prices: Prices,
    roles: tuple[AxisRole, ...] = (),
) -> RegionSolution | None:
    """The cheapest typing of one region; None if the allowed layouts admit none. Arguments as of
    SearchTables and prepare_region."""
    tables = SearchTables(costs, roles)
    problem = prepare_region(
        graph, costs, tables, slot_layouts=slot_layouts, output_layouts=output_layouts
    )
    return problem.solve(prices)
