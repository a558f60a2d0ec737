"""What is searched on one mesh, for tiny models."""

from functools import cache

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import strategies_on
from meshfold.passes.region.typing import MeshSearch
from support.models.hugging_face import BATCH, tiny_model

PROBER = OpProber()


@cache
def graph_of(family: str, layers: int = 2) -> FoldedGraph:
    model, batch = tiny_model(family, layers=layers)
    return capture(model, batch).graph


@cache
def search_of(family: str, dp: int, tp: int, layers: int = 2) -> MeshSearch:
    cluster = resolve_cluster("dgx-v100", 4)
    return MeshSearch(graph_of(family, layers), cluster, build_mesh(cluster, dp, tp), BATCH)


def planner(
    family: str,
    dp: int,
    tp: int,
    memory_bytes: int | None = None,
    layers: int = 2,
    *,
    offloads: bool = False,
) -> MeshPlanner:
    """Candidates and chain of a tiny model on one mesh of four V100s."""
    cluster = resolve_cluster("dgx-v100", 4)
    options = CompileOptions(memory_bytes=memory_bytes)
    offload = ("none", "optimizer", "parameters", "activations") if offloads else ("none",)
    strategies = [s for s in strategies_on(Degrees(dp=dp, tp=tp)) if s.offload in offload]
    search = search_of(family, dp, tp, layers)
    return MeshPlanner(graph_of(family, layers), cluster, search, strategies, options, PROBER)
