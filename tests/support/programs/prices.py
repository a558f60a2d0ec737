"""Prices of typed regions."""

from collections.abc import Sequence

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.price.region import RecomputePrice, RegionPrice, RegionPricer
from meshfold.passes.rules.table import AxisRule


def price_region(
    graph: OpGraph,
    typing: RegionTyping,
    rules: Sequence[Sequence[AxisRule]],
    costs: CostModel,
    selective: RecomputePrice | None = None,
) -> RegionPrice:
    """Price one instance of a region as it will be emitted. rules[o]: the axis rules of op o;
    selective: what selective recomputation adds."""
    pricer = RegionPricer(graph, typing, rules, costs)
    reshard = typing.reshard_after_forward
    return pricer.price(
        typing.slots, typing.recompute, reshard_after_forward=reshard, selective=selective
    )
