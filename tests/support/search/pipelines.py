"""Problems and trees of the search over stages, of tiny models on few devices."""

from dataclasses import replace
from functools import cache

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.tree import SearchSpec
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.tree import grow_pipelines
from support.models.hugging_face import BATCH, tiny_model

PROBER = OpProber()


@cache
def graph_of(family: str, layers: int = 2) -> FoldedGraph:
    model, batch = tiny_model(family, layers=layers)
    return capture(model, batch).graph


def problems_of(cluster: ClusterSpec, **options) -> PipelineProblems:
    folded = graph_of("llama")
    return PipelineProblems(folded, cluster, CompileOptions(**options), BATCH, PROBER)


def tree_for(num_devices: int, pins=None, switched_off=()):
    spec = SearchSpec(num_devices, num_devices, BATCH, pins or {}, switched_off=switched_off)
    return grow_pipelines(spec, len(graph_of("llama").instances))


def slow_links(num_devices: int) -> ClusterSpec:
    """Fast hops inside a slow machine: pipelines pay."""
    spec = resolve_cluster("local-cpu", num_devices)
    link = replace(spec.groups[0].link, bytes_per_s=1e7, latency_s=1e-7, start_s=0.0)
    return replace(spec, groups=tuple(replace(g, link=link) for g in spec.groups))
