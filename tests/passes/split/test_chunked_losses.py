"""Which heads and losses become one op, and that it computes the same."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.graphs.captured import captured_in_float64, targets_of
from support.models.hugging_face import tiny_model
from support.programs.schedules import captured_family
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.pipeline import Captured, capture
from meshfold.ops.reference_interpreter import run_graph
from meshfold.passes.split.chunked_losses import with_chunked_losses
from meshfold.validation.float64_mode import float64_everywhere

Loss = Callable[[Tensor, Tensor], Tensor]

CHUNKED: dict[str, Loss] = {
    "flat": lambda y, t: F.cross_entropy(y.view(-1, 9), t.view(-1)),
    "shifted": lambda y, t: F.cross_entropy(
        y[:, :-1].contiguous().view(-1, 9), t[:, 1:].reshape(-1), ignore_index=3
    ),
    "smoothed": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "rows": lambda y, t: F.cross_entropy(y.reshape(-1, 9), t.flatten(), reduction="none").mean(),
}
WHOLE: dict[str, Loss] = {
    "logits are read again": lambda y, t: F.cross_entropy(y.view(-1, 9), t.view(-1)) + y.mean(),
    "changed logits": lambda y, t: F.cross_entropy(y.view(-1, 9).tanh(), t.view(-1)),
    "mixed classes": lambda y, t: F.cross_entropy(
        y[:, :3].reshape(-1, 3), t.repeat_interleave(3)[: y.shape[0] * 9] % 3
    ),
    "maps of classes": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "probabilities": lambda y, t: F.cross_entropy(y.view(-1, 9), y.detach().view(-1, 9).softmax(1)),
}


class Head(nn.Module):
    def __init__(self, loss: Loss, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 9, bias=bias)
        self.loss = loss

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.loss(self.head(self.norm(x)), t)


def captured_head(loss: Loss, *, bias: bool = False) -> tuple[Head, dict[str, Tensor], Captured]:
    model = Head(loss, bias)
    batch = {"x": torch.randn(4, 5, 6, dtype=torch.float64), "t": torch.arange(20).view(4, 5) % 9}
    return model, batch, captured_in_float64(model, batch)


def results(model: nn.Module, batch: dict[str, Tensor], found: Captured) -> list[Tensor]:
    """Loss and gradients of a captured graph."""
    parameters = dict(model.named_parameters())
    with float64_everywhere():
        buffers = dict(model.named_buffers())
        (loss,) = run_graph(found.graph, parameters, buffers, found.constants, batch).values()
    return [loss, *torch.autograd.grad(loss, list(parameters.values()))]


@pytest.mark.parametrize("name", CHUNKED)
def test_a_head_and_its_loss_are_one_op_that_computes_the_same(name: str) -> None:
    model, batch, found = captured_head(CHUNKED[name], bias=name == "shifted")
    chunked = replace(found, graph=with_chunked_losses(found.graph))
    targets = targets_of(chunked)
    assert "linear_cross_entropy" in targets and "linear" not in targets
    assert with_chunked_losses(chunked.graph) is chunked.graph
    pairs = zip(results(model, batch, chunked), results(model, batch, found), strict=True)
    for ours, right in pairs:
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE)
def test_other_heads_stay(name: str) -> None:
    _, _, found = captured_head(WHOLE[name])
    assert with_chunked_losses(found.graph) is found.graph


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_language_models_have_one(family: str) -> None:
    found = captured_family(family)
    chunked = replace(found, graph=with_chunked_losses(found.graph))
    assert targets_of(chunked).count("linear_cross_entropy") == 1


def test_losses_of_narrow_logits_are_in_float32() -> None:
    found = capture(*tiny_model("llama", dtype=torch.float32), precision="bf16")
    graph = with_chunked_losses(found.graph).regions[-1].graph
    (loss,) = (op for op in graph.ops if "linear_cross" in op.target)
    assert ("is_wide", True) in loss.kwargs
    assert graph.values[loss.outputs[0]].dtype == "float32"
