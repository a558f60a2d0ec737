"""Samples of zeros alone, which a model takes out."""

import pytest
import torch
from torch import Tensor, nn

import meshfold
from meshfold.errors import ValueCheckError


class Images(nn.Module):
    """The mean of images that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        real = (x == 0.0).sum(dim=(-1, -2)) != x.shape[1:].numel()
        return (x[real] * self.weight).sin().mean()


def test_a_batch_without_padding_runs_and_one_with_padding_ends_the_step() -> None:
    x = torch.randn(4, 2, 3)
    options = meshfold.CompileOptions(precision="model")
    compiled = meshfold.compile(Images(), "local-cpux1", {"x": x}, options=options)
    assert torch.allclose(compiled(x=x), Images()(x=x))
    assert any("no sample is all zeros" in note for note in compiled.plan.notes)
    x[2] = 0
    with pytest.raises(ValueCheckError, match="no sample is all zeros"):
        compiled(x=x)
