"""Models that do something else where they are traced: refused in plain words."""

import pytest
import torch
from torch import nn

from meshfold.capture import capture
from meshfold.errors import CaptureError

X = {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}


def test_what_is_missing_where_it_is_traced_is_asked_for() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = None if torch.compiler.is_compiling() else torch.ones(2)
            return (self.linear(x) * mask[:, None]).sum()  # type: ignore[index]

    with pytest.raises(CaptureError, match="'NoneType' object .* pass it in example_inputs") as e:
        capture(Masked(), X)
    assert "test_capture_refusals.py" in e.value.source


def test_a_module_that_casts_another_while_it_runs_is_refused() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classifier.to(torch.float32)(x).sum()

    with pytest.raises(CaptureError, match="moves or casts a module while it runs; do it before"):
        capture(Router(), X)
