"""Prices and bytes that are worked out where somebody asks."""

from typing import get_args

from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import SELECTIVE, Recompute, UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.pipeline.problem import PipelineProblems


class CountingProbe(OpProber):
    """An op probe that counts what it is asked."""

    asked = 0

    def __call__(self, *arguments, **options):
        self.asked += 1
        return super().__call__(*arguments, **options)


def test_seconds_alone_ask_no_probe():
    probe = CountingProbe()
    graph = capture(*tiny_model("llama")).graph
    cluster = resolve_cluster("local-cpu", 2)
    problems = PipelineProblems(graph, cluster, CompileOptions(), BATCH, probe)
    strategies = [
        UniformStrategy(pp=2, microbatches=2, recompute=recompute)
        for recompute in get_args(Recompute)
    ]
    seconds = problems.fastest_s(strategies)
    assert probe.asked == 0
    costs = problems.layer_costs(strategies)
    assert probe.asked > 0
    for instance, (forward_s, total_s) in zip(graph.instances, seconds, strict=True):
        of_layer = costs[instance.region]
        assert forward_s == min(x.forward_s for x in of_layer)
        assert total_s == min(x.forward_s + x.backward_s for x in of_layer)
        sizes = [x.activation_bytes for x in of_layer]
        assert sizes == sorted(sizes, reverse=True)


def test_what_selective_recomputation_keeps_is_chosen_once():
    graph = capture(*tiny_model("llama")).graph
    cluster = resolve_cluster("local-cpu", 2)
    problems = PipelineProblems(graph, cluster, CompileOptions(), BATCH, OpProber())
    tables = problems.tables(UniformStrategy(pp=2, microbatches=2), ["none", "selective"])
    for region in (layer.region for layer in tables.layers):
        assert region.kept("light") is region.kept("light")
        assert region.price("selective").backward_s >= region.price("none").backward_s
        assert region.memory("selective").saved_bytes <= region.memory("none").saved_bytes
        assert region.typed("full").recompute == "full" and region.added("full") is None


def test_points_that_are_the_same_count_once():
    graph = capture(*tiny_model("llama")).graph
    cluster = resolve_cluster("local-cpu", 2)
    problems = PipelineProblems(graph, cluster, CompileOptions(), BATCH, OpProber())
    tables = problems.tables(UniformStrategy(pp=2, microbatches=2), get_args(Recompute))
    regions = [layer.region for layer in tables.layers]
    for region in regions:
        distinct = region.distinct(get_args(Recompute))
        assert [x for x in distinct if x not in SELECTIVE] == ["none", "full"]
        sets = [region.kept(x) for x in distinct if x in SELECTIVE]
        assert "selective" in distinct and len(set(sets)) == len(sets)
        assert {region.kept(x) for x in SELECTIVE} == set(sets)
        # Somebody who pins one of them has it everywhere.
        assert region.distinct(["heavy"]) == ["heavy"]
    assert {len(region.distinct(get_args(Recompute))) for region in regions} > {3}
