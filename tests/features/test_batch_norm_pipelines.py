"""Batch norms in pipelines: each microbatch has statistics of its own, where a pin says so."""

import pytest
import torch
from support.models.unrepeated import BATCH, residual
from support.programs.one_device import difference
from torch import Tensor, nn

from meshfold.errors import OptionError

PER_MICROBATCH = {"batch_norm": "microbatch"}


@pytest.mark.parametrize("stages", [1, 3])
def test_each_microbatch_has_statistics_of_its_own(stages: int) -> None:
    """Loss, gradients, running statistics and their counts are those of one process that runs the
    microbatches one after the other."""
    error = difference(*residual(), 2, stages, PER_MICROBATCH, one_by_one=True)
    assert error < 1e-12


def test_one_microbatch_needs_no_pin() -> None:
    assert difference(*residual(), 1, 3) < 1e-12


def test_without_the_pin_microbatches_are_refused() -> None:
    with pytest.raises(
        OptionError,
        match=r"_native_batch_norm_legit_functional \(.*unrepeated.py:\d+, in "
        r"blocks.0.norm\) takes statistics over the batch; pin batch_norm=microbatch",
    ):
        difference(*residual(), 2, 1)


class Feedback(nn.Module):
    """The first op reads what the last one wrote in the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh())
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x + self.level)
        self.level.copy_(y.detach().mean())
        return y.square().sum()


def test_a_buffer_that_stages_share_is_refused() -> None:
    """The stage that reads it would not see what the other one writes."""
    batch = {"x": torch.randn(BATCH, 4, dtype=torch.float64)}
    message = r"buffer level, which mean \(.*.py:\d+.*\) updates, is read in 2 stages"
    with pytest.raises(OptionError, match=message):
        difference(Feedback().double(), batch, 1, 2)
