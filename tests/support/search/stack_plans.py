"""Plans of a stack of four layers, of which nothing but the budget is hard."""

from functools import cache

from meshfold.capture.pipeline import capture
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.planner.shared_work import SharedWork
from support.programs.local_programs import stack_model

PROBER = OpProber()
BATCH = 4


@cache
def stack_graph() -> FoldedGraph:
    model, batch = stack_model(4, 64, BATCH)
    return capture(model, batch).graph


def stack_plan(
    cluster: ClusterSpec,
    shared: SharedWork | None = None,
    *,
    prices_memory: bool = False,
    **options,
) -> Plan:
    """options: of CompileOptions; the others as for find_plan_for."""
    return find_plan_for(
        stack_graph(),
        cluster,
        CompileOptions(**options),
        model_name="stack",
        batch_size=BATCH,
        probe=PROBER,
        shared=shared,
        prices_memory=prices_memory,
    )
