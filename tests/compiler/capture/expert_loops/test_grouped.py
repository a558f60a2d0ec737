"""Experts whose rows are grouped by values: graphs of JetMoE and LongCat compute what they do,
and modules that are any different keep their code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
)
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from meshfold.capture.expert_loops.forms import without_loops
from meshfold.capture.pipeline import capture
from meshfold.ops.reference_interpreter import run_graph
from meshfold.passes.rules.ops.experts import EXPERT_LINEAR
from meshfold.validation.float64_mode import float64_everywhere

_SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "use_cache": False,
}
_JET: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
    "kv_channels": 8,
    "intermediate_size": 16,
}
_LONGCAT: dict[str, Any] = {
    "num_layers": 1,
    "n_routed_experts": 3,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "ffn_hidden_size": 16,
    "expert_ffn_hidden_size": 8,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 4),
}


def jetmoe() -> nn.Module:
    return JetMoeForCausalLM(JetMoeConfig(**_SMALL, **_JET))


def longcat() -> nn.Module:
    return LongcatFlashForCausalLM(LongcatFlashConfig(**_SMALL, **_LONGCAT))


@pytest.mark.parametrize(("build", "num_products"), [(jetmoe, 4), (longcat, 2)])
def test_the_graph_computes_what_the_model_does(
    build: Callable[[], nn.Module], num_products: int
) -> None:
    torch.manual_seed(0)
    model = build().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 32, (2, 6))
    batch = {"input_ids": ids, "labels": ids}
    parameters = dict(model.named_parameters())
    with float64_everywhere():
        captured = capture(model, batch)
        buffers = dict(model.named_buffers())
        (loss,) = run_graph(captured.graph, parameters, buffers, captured.constants, batch).values()
        expected: Tensor = model(**batch).loss
    regions = captured.graph.regions
    targets = [op.target for i in captured.graph.instances for op in regions[i.region].graph.ops]
    assert targets.count(EXPERT_LINEAR) == num_products
    assert torch.allclose(loss, expected, rtol=0, atol=1e-13)
    made, wanted = (
        torch.autograd.grad(x, list(parameters.values()), allow_unused=True)
        for x in (loss, expected)
    )
    for name, a, b in zip(parameters, made, wanted, strict=True):
        assert a is not None and b is not None, name
        assert torch.allclose(a, b, rtol=0, atol=1e-13), name


def with_a_hook(experts: Any) -> None:
    experts.output_linear.register_forward_hook(lambda *_: None)


def with_another_method(experts: Any) -> None:
    experts.input_linear.forward = experts.output_linear.forward


def with_another_router(experts: Any) -> None:
    class Router(type(experts.router)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            return super().forward(2 * hidden_states)

    experts.router.__class__ = Router


def without_routed_experts(experts: Any) -> None:
    experts.num_routed_experts = 0


@pytest.mark.parametrize(
    ("build", "kind", "change"),
    [
        (jetmoe, JetMoeMoE, with_a_hook),
        (jetmoe, JetMoeMoE, with_another_method),
        (jetmoe, JetMoeMoE, with_another_router),
        (longcat, LongcatFlashExperts, without_routed_experts),
    ],
)
def test_what_is_different_keeps_its_code(
    build: Callable[[], nn.Module], kind: type, change: Callable[[Any], None]
) -> None:
    with torch.device("meta"):
        model = build()
    experts = next(m for m in model.modules() if isinstance(m, kind))
    change(experts)
    changed = without_loops(model)
    assert type(experts) is kind
    assert all(kind.__name__ not in note for note in changed)
