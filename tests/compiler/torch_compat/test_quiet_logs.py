"""A model that cannot be traced is refused in one line, without tracebacks of torch beside it."""

import logging

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError
from meshfold.torch_compat.quiet_logs import quiet_logs

NAME = "torch._subclasses.fake_tensor"


def test_loggers_are_as_they_were_afterwards() -> None:
    before = logging.getLogger(NAME).level
    with quiet_logs():
        assert not logging.getLogger(NAME).isEnabledFor(logging.ERROR) or before <= logging.INFO
    assert logging.getLogger(NAME).level == before


def test_a_wrong_shape_writes_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.new_ones(3)

    monkeypatch.setattr(logging.getLogger(NAME), "level", logging.WARNING)
    with pytest.raises(CaptureError, match=r"torch.Tensor.add cannot be captured"):
        capture(Wrong(), {"x": torch.ones(2, 4)})
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
