"""Whole plans: better hardware never hurts, and the order of candidates does not matter."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.models.hugging_face import tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.tree import Tree
from meshfold.passes.planner import best_mesh as planner
from meshfold.passes.planner.find import find_plan_for
from meshfold.plan_file.io import plan_to_json

PROBER = OpProber()
FAMILIES = ("llama", "gpt2")


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


@cache
def slow_cluster() -> ClusterSpec:
    """Two nodes of two devices on which the tiny models feel links and memory."""
    return resolve_cluster("local-cpu", 4)


def scaled(cluster: ClusterSpec, compute: float, link: float) -> ClusterSpec:
    """Devices that compute `compute` times as fast under links `link` times as fast."""
    groups = []
    for group in cluster.groups:
        device = group.device
        device = replace(
            device,
            memory_bytes_per_s=device.memory_bytes_per_s * compute,
            peak_flops_per_s={k: v * compute for k, v in device.peak_flops_per_s.items()},
        )
        inside = replace(
            group.link,
            bytes_per_s=group.link.bytes_per_s * link,
            latency_s=group.link.latency_s / link,
        )
        groups.append(replace(group, device=device, link=inside))
    network = replace(
        cluster.network,
        bytes_per_s=cluster.network.bytes_per_s * link,
        latency_s=cluster.network.latency_s / link,
    )
    return replace(cluster, groups=tuple(groups), network=network)


def plan(family: str, cluster: ClusterSpec, memory_bytes: int | None = None) -> Plan:
    return find_plan_for(
        graph_of(family),
        cluster,
        CompileOptions(memory_bytes=memory_bytes),
        model_name=family,
        batch_size=4,
        probe=PROBER,
    )


@cache
def budgets(family: str) -> tuple[int, int]:
    """The least memory that fits about, and as much as the fastest plan takes."""
    with pytest.raises(InfeasibleError) as caught:
        plan(family, slow_cluster(), 10_000)
    return caught.value.required_bytes, plan(family, slow_cluster()).memory.peak


@pytest.mark.slow
@pytest.mark.rotated(3)
@pytest.mark.parametrize("seed", range(15))
def test_faster_hardware_is_never_slower(seed: int) -> None:
    draw = random.Random(seed)
    family = FAMILIES[seed % 2]
    least, most = budgets(family)
    memory_bytes = round(least + draw.random() * (most - least))
    faster = draw.choice([(1.0, 1.5), (1.0, 8.0), (2.0, 1.0), (3.0, 3.0)])
    before = plan(family, slow_cluster(), memory_bytes)
    after = plan(family, scaled(slow_cluster(), *faster), memory_bytes)
    assert after.time.step_s <= before.time.step_s * (1 + after.gap) * (1 + 1e-9)


@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 1.0))]
)
def test_the_order_of_candidates_does_not_matter(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, most = budgets("llama")
    memory_bytes = round(least + share * (most - least))
    first = plan_to_json(plan("llama", slow_cluster(), memory_bytes))
    grow = planner.grow_tree
    for seed in range(3):
        draws = random.Random(seed)

        def shuffled(*args: Any, draws: random.Random = draws) -> Tree:
            tree = grow(*args)
            strategies = draws.sample(tree.strategies, len(tree.strategies))
            return replace(tree, strategies=tuple(strategies))

        monkeypatch.setattr(planner, "grow_tree", shuffled)
        assert plan_to_json(plan("llama", slow_cluster(), memory_bytes)) == first
