"""Modes that captured programs run in, and those that they refuse."""

import pytest
import torch
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.errors import OptionError
from meshfold.training.captured_mode import CapturedMode


class Layers(nn.Module):
    """A linear layer, what is given, and a mean."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.linear, self.middle = nn.Linear(4, 4), middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self.linear(x)).mean()


CASES = [
    # (what is in the middle, captured in train mode, asked for, what refuses)
    (nn.Identity(), True, False, ""),
    (nn.Identity(), False, True, ""),
    (nn.Dropout(0.1), True, False, ""),
    (nn.Dropout(0.1), False, True, "captured in eval mode, without dropout"),
    (nn.Dropout1d(0.1), True, False, "draws random numbers, which eval mode may not"),
    (nn.Dropout1d(0.1), False, True, "captured in eval mode, without dropout"),
    (nn.Dropout(0.0), False, True, ""),
    (nn.BatchNorm1d(4), True, False, "updates buffers"),
    (nn.BatchNorm1d(4), False, True, "captured in eval mode"),
    (nn.BatchNorm1d(4), True, True, ""),
]


@pytest.mark.parametrize(("middle", "is_training", "asked", "refusal"), CASES)
def test_the_other_mode(middle: nn.Module, is_training: bool, asked: bool, refusal: str) -> None:
    model = Layers(middle).train(is_training)
    mode = CapturedMode(model, capture(model, {"x": torch.randn(8, 4)}).graph)
    if asked and refusal:
        with pytest.raises(OptionError, match=refusal):
            mode.check(asked)
        return
    mode.check(asked)
    assert mode.needs_capture(asked) is bool(refusal)
    if refusal:
        with pytest.raises(OptionError, match=f"{refusal}.*evaluate it under torch.no_grad"):
            mode.check_program(asked)
    else:
        mode.check_program(asked)
