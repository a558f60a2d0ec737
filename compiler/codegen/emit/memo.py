"""What emissions of one plan share, in several modes, micro-chunks, collective matmuls, buckets."""

from functools import cached_property

from meshfold.codegen.schedule.list_scheduling import KnownCosts
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.chained_chunks import ChainedOrders
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.split.micro_chunks import ChunkingProblem


class EmissionMemo:
    """folded: the captured graph of the plan. The typings of its regions, its mesh and its cluster
    must be those of every plan that is emitted with it. split: the graph with regions as the plan
    has them; chunking: its regions in micro-chunks; chained, segments: orders and costs that
    emissions have found."""

    def __init__(self, folded: FoldedGraph, plan: Plan, probe: OpProber | None = None) -> None:
        self._folded, self._plan = folded, plan
        self.costs = CostModel(plan.cluster, plan.mesh)
        self.probe = probe or OpProber()
        self.chained = ChainedOrders()
        self.segments = KnownCosts()

    @cached_property
    def split(self) -> FoldedGraph:
        return planned_graph(self._folded, self._plan)

    @cached_property
    def chunking(self) -> ChunkingProblem:
        return ChunkingProblem(self.split, self._plan)
