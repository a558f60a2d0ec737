"""What selective recomputation costs and keeps, on the layers of models."""

from dataclasses import replace
from itertools import pairwise

import pytest
from support.models.hugging_face import BATCH, tiny_model
from support.models.recompute import layer_regions

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.strategy import KeptResults, UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.events.region import region_events
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.region.typing import MeshSearch

PROBER = OpProber()
PARALLEL = UniformStrategy(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("gpt2", PARALLEL),
        ("llama", UniformStrategy()),
        ("bert", PARALLEL),
        ("t5", UniformStrategy()),
        ("vit", UniformStrategy()),
        ("mixtral", PARALLEL),
    ],
    ids=lambda x: x if isinstance(x, str) else x.label,
)
def test_selective_is_below_the_mix_of_keeping_all_and_nothing(
    family: str, strategy: UniformStrategy
) -> None:
    """Of the same bytes it takes fewer seconds; and what is priced is what is simulated."""
    graph = capture(*tiny_model(family, layers=3)).graph
    cluster = resolve_cluster("dgx-v100", strategy.tp)
    mesh = build_mesh(cluster, 1, strategy.tp)
    search = MeshSearch(graph, cluster, mesh, BATCH)
    typings = search.solve(zero=0, mode=strategy.tp_mode).typings
    solutions = search.solutions(strategy.tp_mode)
    model = MemoryModel(search.costs, PROBER)
    for r in sorted(layer_regions(graph)):
        floats = next(i.floats for i in graph.instances if i.region == r)
        region, pricer = graph.regions[r].graph, solutions[r].pricer
        points = model.selective(region, typings[r], floats, pricer)
        chosen = points["selective"]
        of = replace(typings[r], recompute="selective", kept=chosen.kept)
        full = replace(typings[r], recompute="full")
        kept = [model.region(region, t, floats).saved_bytes for t in (typings[r], of, full)]
        all_s = model.recompute_price(region, replace(of, kept=KeptResults()), floats, pricer)
        assert all_s is not None
        added_s, most_s = (p.compute_s + p.graph_s for p in (chosen.price, all_s))
        share = (kept[0] - kept[1]) / (kept[0] - kept[2])
        assert 0.0 < share < 1.0 and added_s < share * most_s
        events = region_events("r", of, of.slots, pricer, model, floats).events
        assert model.recompute_price(region, of, floats, pricer) == chosen.price
        again_s = sum(
            e.collective.seconds if e.collective else e.seconds for e in events.recomputed
        )
        # Copies around collectives are charged by the simulator alone.
        assert added_s <= again_s * (1 + 1e-9) and again_s == pytest.approx(added_s, rel=0.05)


@pytest.mark.parametrize(("family", "num_points"), [("gpt2", 2), ("llama", 4)])
def test_points_of_the_curve_are_in_order_and_convex(family: str, num_points: int) -> None:
    """Each keeps fewer bytes for more seconds than the one before, at a rising price a byte."""
    graph = capture(*tiny_model(family, layers=3)).graph
    cluster = resolve_cluster("dgx-v100", 1)
    search = MeshSearch(graph, cluster, build_mesh(cluster, 1, 1), BATCH)
    typings = search.solve(zero=0).typings
    solutions, model = search.solutions("tensor"), MemoryModel(search.costs, PROBER)
    for r in sorted(layer_regions(graph)):
        floats = next(i.floats for i in graph.instances if i.region == r)
        region, pricer = graph.regions[r].graph, solutions[r].pricer
        chosen = model.selective(region, typings[r], floats, pricer)
        points = [(model.region(region, typings[r], floats).saved_bytes, 0.0)]
        for recompute, point in chosen.items():
            of = replace(typings[r], recompute=recompute, kept=point.kept)
            added_s = point.price.compute_s + point.price.graph_s
            points.append((model.region(region, of, floats).saved_bytes, added_s))
        points = list(dict.fromkeys(points))
        assert points == sorted(points, key=lambda x: (-x[0], x[1]))
        slopes = [
            (later_s - earlier_s) / (more - fewer)
            for (more, earlier_s), (fewer, later_s) in pairwise(points)
        ]
        assert slopes == sorted(slopes)
        assert len(points) == num_points
