"""Losses over classes read logits as narrow as these are made."""

from typing import Any

import pytest
import torch
from support.graphs.captured import targets_of
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.returns import Returns
from meshfold.ops.reference_interpreter import run_graph


class Head(nn.Module):
    """Logits, widened, shifted by a position as older models of transformers do it."""

    def __init__(self, shifts: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.shifts, self.options = shifts, options

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.table(ids)).float()
        if self.shifts:
            logits, ids = logits[:, :-1].contiguous(), ids[:, 1:]
        loss = F.cross_entropy(logits.reshape(-1, 12), ids.reshape(-1), **self.options)
        return {"loss": loss, "logits": logits}


def captured(model: nn.Module, **options: Any) -> Captured:
    ids = torch.tensor([[0, 3, 11], [4, 4, 2]])
    return capture(model.bfloat16(), {"ids": ids}, **options)


@pytest.mark.parametrize("shifts", [True, False])
def test_logits_are_not_widened_as_a_whole(shifts: bool) -> None:
    model = Head(shifts, label_smoothing=0.1)
    found = captured(model)
    assert "_to_copy" not in targets_of(found) and targets_of(found)[-1] == "cross_entropy"
    ids = torch.tensor([[0, 3, 11], [4, 4, 2]])
    parameters = dict(model.named_parameters())
    (made,) = run_graph(found.graph, parameters, {}, found.constants, {"ids": ids}).values()
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, model(ids)["loss"], rtol=1e-6, atol=0)


def test_widened_logits_that_are_returned_are_made_for_that() -> None:
    found = targets_of(captured(Head(shifts=False), returns=Returns(outputs=("logits",))))
    assert "_to_copy" in found and "cross_entropy" in found


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_losses_of_wide_logits_and_of_probabilities_stay(precision: Any) -> None:
    class Soft(Head):
        def forward(self, ids: Tensor) -> Tensor:
            logits = self.head(self.table(ids)).float()
            return F.cross_entropy(logits.reshape(-1, 12), logits.reshape(-1, 12).softmax(-1))

    ids = torch.tensor([[0, 3, 11]])
    assert "cross_entropy_loss" in targets_of(capture(Soft(), {"ids": ids}, precision=precision))
    wide = targets_of(capture(Head(), {"ids": ids}))
    assert "cross_entropy_loss" in wide
