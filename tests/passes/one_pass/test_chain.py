"""A chain whose layers are short of memory at two moments: in the backward, and in the step of the
optimizer."""

import itertools
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import strategies_on
from meshfold.passes.region.typing import MeshSearch

DEVICES = 8
PROBER = OpProber()


@cache
def graph() -> FoldedGraph:
    """Layers as in Llama-2-7B, of which states and activations of a sequence are alike."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_hidden_layers=16,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(DEVICES, 2048, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    return capture(model, batch, precision="bf16").graph


@cache
def search() -> MeshSearch:
    cluster = resolve_cluster("dgx-h100", DEVICES)
    return MeshSearch(graph(), cluster, build_mesh(cluster, DEVICES, 1), DEVICES)


def planner(memory_bytes: int | None = None, *, offloads: bool = True) -> MeshPlanner:
    offload = ("none", "optimizer", "parameters", "activations") if offloads else ("none",)
    strategies = [s for s in strategies_on(Degrees(dp=DEVICES)) if s.offload in offload]
    options = CompileOptions(memory_bytes=memory_bytes)
    return MeshPlanner(graph(), search().costs.cluster, search(), strategies, options, PROBER)


def faster_mixtures(of: MeshPlanner, best: Priced, ratio: float) -> list[Priced]:
    """Exact costs of programs that add up to less than `ratio` of `best` in which the longest run
    mixes two candidates; the other layers are as there."""
    region, first, count = max(of.folded.runs, key=lambda run: run[2])
    origin = [best.candidates[i.region] for i in best.split.instances]
    now_s = sum(c.time_s for c in origin[first : first + count])
    least_s = now_s - (1 - ratio) * best.time.step_s
    candidates = [c for c in of.candidates[region] if not c.is_partial]
    found = []
    for a, b in itertools.permutations(candidates, 2):
        for of_a in (1, 2, count // 2):
            if of_a * a.time_s + (count - of_a) * b.time_s < least_s:
                mixed = [a] * of_a + [b] * (count - of_a)
                found.append(of.price([*origin[:first], *mixed, *origin[first + count :]]))
    return found


@pytest.mark.parametrize("share", [0.85, 0.9, 0.97, 1.03])
def test_no_mixture_of_two_that_fits_is_faster(share: float) -> None:
    """Budgets around what the leanest program needs on the device, with recomputation and the host
    to choose from; the bound knows both moments, too."""
    reserve = planner().reserve_bytes
    budget = reserve + round(share * (planner(offloads=False).smallest.memory.peak - reserve))
    of = planner(budget)
    plan = of.plan()
    assert plan.best is not None and plan.best.memory.peak <= budget
    faster = faster_mixtures(of, plan.best, 0.98)
    assert faster, "all that is faster is too large"
    assert all(p.memory.peak > budget for p in faster)
    fitting = [p for p in of._priced.values() if p.memory.fits]
    assert plan.lower_bound_s <= min(p.time.step_s for p in fitting) * (1 + 1e-9)
    assert plan.best.time.step_s <= 1.1 * plan.lower_bound_s
