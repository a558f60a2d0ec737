"""Loops over experts that are modules of their own: the graph of Switch Transformers computes what
the loop does, and what is any different keeps its loop."""

from typing import Any

import pytest
import torch
from support.models.switch import tiny_switch
from torch import Tensor, nn
from transformers.models.switch_transformers import modeling_switch_transformers

from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.rewrites.expert_linear import EXPERT_LINEAR
from meshfold.errors import CaptureError
from meshfold.ir.op_graph import DRAWS
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

Experts = modeling_switch_transformers.SwitchTransformersExperts


def experts_of(model: nn.Module) -> list[nn.ModuleDict]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def targets(captured: Captured) -> list[str]:
    regions = captured.graph.regions
    return [op.target for i in captured.graph.instances for op in regions[i.region].graph.ops]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("capacity", [1, 2, 8])
@pytest.mark.parametrize("with_router_losses", [False, True])
def test_the_graph_computes_what_the_loop_does(capacity: int, with_router_losses: bool) -> None:
    model, batch = tiny_switch(expert_capacity=capacity)
    inputs = {**batch, "output_router_logits": with_router_losses}
    parameters = dict(model.named_parameters())
    with float64_everywhere():
        captured = capture(model, inputs)
        (loss,) = run_graph(captured.graph, parameters, {}, captured.constants, batch).values()
        expected = model(**inputs).loss
    assert targets(captured).count(EXPERT_LINEAR) == 2 * len(experts_of(model))
    assert torch.allclose(loss, expected, rtol=0, atol=1e-14)
    made, wanted = (
        torch.autograd.grad(x, list(parameters.values()), allow_unused=True)
        for x in (loss, expected)
    )
    for name, a, b in zip(parameters, made, wanted, strict=True):
        assert a is not None, name
        # Of the expert that no row chose: zeros, where the loop leaves None.
        assert (b is None) == ("expert_3" in name), name
        assert torch.allclose(a, torch.zeros_like(a) if b is None else b, rtol=0, atol=1e-14), name
    assert all(type(module) is Experts for module in experts_of(model)), "the model is changed"
    assert any("leaves None" in note for note in captured.graph.notes)


def with_a_hook(model: nn.Module) -> None:
    experts_of(model)[0]["expert_1"].register_forward_hook(lambda *_: None)


def with_a_bias(model: nn.Module) -> None:
    expert: Any = experts_of(model)[0]["expert_1"]
    expert.wi = nn.Linear(expert.wi.in_features, expert.wi.out_features)


def with_another_activation(model: nn.Module) -> None:
    expert: Any = experts_of(model)[0]["expert_1"]
    expert.act = nn.GELU()


def with_activations_that_learn(model: nn.Module) -> None:
    for expert in experts_of(model)[0].values():
        expert.act = nn.PReLU()


def with_another_setting(model: nn.Module) -> None:
    for k, expert in enumerate(experts_of(model)[0].values()):
        expert.act = nn.LeakyReLU(0.1 * k)


def with_its_own_forward(model: nn.Module) -> None:
    expert: Any = experts_of(model)[0]["expert_1"]
    expert.forward = expert.wi.forward


@pytest.mark.parametrize(
    "change",
    [
        with_a_hook,
        with_a_bias,
        with_another_activation,
        with_activations_that_learn,
        with_another_setting,
        with_its_own_forward,
    ],
    ids=lambda f: f.__name__,
)
def test_experts_that_are_any_different_keep_their_loop(change: Any) -> None:
    model, batch = tiny_switch()
    change(model.double())
    with pytest.raises(CaptureError, match=r"nonzero gives a shape or a number that depends on"):
        capture(model.float(), batch)


def test_another_loop_under_the_same_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        return x * (selected.sum(-1) > 0)

    model, batch = tiny_switch()
    monkeypatch.setattr(Experts, "forward", forward)
    with float64_everywhere():
        assert EXPERT_LINEAR not in targets(capture(model, batch))


def test_noise_in_the_router_is_drawn_alike_on_all_ranks() -> None:
    model, batch = tiny_switch(router_jitter_noise=0.1)
    quiet, noisy = capture(model.float(), batch).graph, capture(model.train(), batch).graph
    for graph, draws in ((quiet, False), (noisy, True)):
        assert draws == any(op.target in DRAWS for r in graph.regions for op in r.graph.ops)
        assert not any("random" in note for note in graph.notes)
