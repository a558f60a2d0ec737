"""Modes that captured programs run in, and those that they refuse."""

import pytest
import torch
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.errors import OptionError
from meshfold.training.calls.captured_mode import CapturedMode


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


def test_what_was_frozen_when_captured_cannot_be_trained() -> None:
    model = Layers(nn.Identity())
    model.linear.bias.requires_grad_(False)
    mode = CapturedMode(model, capture(model, {"x": torch.randn(8, 4)}).graph)
    parameters = dict(model.named_parameters())
    mode.check_trained(parameters)
    assert mode.thawed_text(parameters) == ""
    model.requires_grad_(False)
    mode.check_trained(parameters)
    model.requires_grad_(True)
    assert "linear.bias" in mode.thawed_text(parameters)
    with torch.no_grad():
        mode.check_trained(parameters)
    with pytest.raises(OptionError, match="linear.bias .of 1 parameters. was frozen when"):
        mode.check_trained(parameters)
