"""Attention heads that no axis divides: what the search does with them, and how it prices them."""

import pytest
import torch
import transformers
from support.graphs.op_graphs import costs_on
from support.models.hugging_face import tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.ops.shards import GRANULES, Divisions
from meshfold.passes.rules.table import region_rules

SEQUENCE = 1024


def gpt2_xl() -> FoldedGraph:
    """Two layers of GPT-2 XL; a table of few tokens."""
    sizes = {"n_layer": 2, "n_embd": 1600, "n_head": 25, "n_positions": SEQUENCE}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes | dropout, vocab_size=1024, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
        ids = torch.empty(8, SEQUENCE, dtype=torch.long)
    return capture(model, {"input_ids": ids, "labels": ids.clone()}).graph


def qwen2() -> FoldedGraph:
    """Two layers of Qwen2-0.5B, whose 14 query heads share 2 key heads; a table of few tokens."""
    config = transformers.Qwen2Config(
        vocab_size=1024,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2,
        num_attention_heads=14,
        num_key_value_heads=2,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(16, SEQUENCE, dtype=torch.long)
    return capture(model, {"input_ids": ids, "labels": ids.clone()}).graph


def planned(graph: FoldedGraph, **pins: int) -> Plan:
    return find_plan_for(
        graph,
        resolve_cluster("dgx-h100x1"),
        CompileOptions(pins=pins or {"tp": 8, "sp": 1}),
        model_name="gpt2-xl",
        batch_size=8,
        probe=OpProber(),
    )


def stored(plan: Plan) -> dict[str, str]:
    return {
        p.name.split(".", 1)[-1]: str(p.stored[plan.mesh.index("tp")])
        for region in plan.regions
        for p in region.parameters
        if "attn" in p.name
    }


def test_the_heads_of_gpt2_xl_are_shared_by_eight_ranks() -> None:
    plan = planned(gpt2_xl())
    found = stored(plan)
    assert found["c_attn.weight"] == "S1/3+64" and found["c_attn.bias"] == "S0/3+64"
    assert found["c_proj.weight"] == "S0+64"


@pytest.mark.parametrize("sequence_parallel", [0, 1])
def test_query_heads_are_sharded_beside_unsharded_key_heads(sequence_parallel: int) -> None:
    plan = planned(qwen2(), tp=4, dp=2, sp=sequence_parallel)
    found = stored(plan)
    assert found["q_proj.weight"] == "S0+64"
    assert found["o_proj.weight"] == "S1+64"
    (attention,) = {
        op.rules[plan.mesh.index("tp")]
        for region in plan.regions
        for target, op in zip(region.op_targets, region.typing.ops, strict=True)
        if "attention" in target
    }
    assert attention == "h/+"


def test_the_fullest_rank_is_priced() -> None:
    (layer,) = (
        r.graph for r in gpt2_xl().regions if any("attention" in op.target for op in r.graph.ops)
    )
    rules = region_rules(layer, (8,))
    (k,) = (k for k, op in enumerate(layer.ops) if "attention" in op.target)
    (padded,) = (r for r in rules[k][0] if "+" in r.name)
    (whole,) = (r for r in rules[k][0] if r.name == "I")
    mesh, costs, _ = costs_on(1, 8)
    there, alone = (
        op_time(layer, layer.ops[k], (rule,), costs).forward_s - costs.launch_s
        for rule in (padded, whole)
    )
    assert there == pytest.approx(4 / 25 * alone), "four heads of 25 on the fullest rank"


def test_padding_is_limited() -> None:
    assert Divisions(8)(25, GRANULES) and Divisions(4)(3, GRANULES)
    assert not Divisions(8)(16, GRANULES), "16 heads divide"
    assert not Divisions(8)(3, GRANULES), "five of eight ranks would idle"
    assert not Divisions(2)(1, GRANULES), "one head is no parallelism"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_heads_that_divide_are_never_padded(family: str) -> None:
    model, batch = tiny_model(family)
    for region in capture(model, batch).graph.regions:
        for of_op in region_rules(region.graph, (2, 4, 8)):
            names = [rule.name for rules in of_op for rule in rules]
            assert not any("+" in name for name in names)
