"""Model flops by hand."""

import torch
from support.models.hugging_face import tiny_model
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.passes.price.model_flops import ModelFlops, model_flops

B, T, D, H = 4, 6, 8, 16


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def flops_of(model: nn.Module, **batch: torch.Tensor) -> ModelFlops:
    return model_flops(capture(model, batch).graph)


def test_a_product_counts_forward_and_a_product_per_gradient() -> None:
    one = 2 * B * D * H
    # The first layer's input needs no gradient.
    found = flops_of(TwoLayers(), x=torch.zeros(B, D))
    assert found == ModelFlops(2 * one + 3 * one, "float32")


def test_frozen_weights_need_no_gradient() -> None:
    model = TwoLayers()
    model.first.requires_grad_(False)
    one = 2 * B * D * H
    # The first layer is forward alone, and below the second nothing needs a gradient.
    assert flops_of(model, x=torch.zeros(B, D)).flops == one + 2 * one


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def test_attention_counts_its_scores_once_and_half_of_a_causal_square() -> None:
    linear = 2 * B * T * D * 3 * D
    forward = 2 * B * T * T * (D + D) / 2
    assert flops_of(Attention(), x=torch.zeros(B, T, D)).flops == 2 * linear + 3 * forward


def test_a_folded_model_counts_all_of_its_layers() -> None:
    model, batch = tiny_model("llama")
    folded = capture(model, batch).graph
    whole = capture(model, batch, full_capture=True).graph
    assert model_flops(folded).flops == model_flops(whole).flops > 0


def test_a_model_without_products_has_none() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).mean()

    assert flops_of(Scale(), x=torch.zeros(B, D)) == ModelFlops(0.0, "float32")
