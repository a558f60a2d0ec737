"""Choices of LayerDrop become the input of the layer; other choices stay."""

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.rewrites.skipped_layers import with_skips
from meshfold.capture.trace.export import export_fake
from meshfold.capture.trace.fake_model import fake_copy, flatten_inputs, model_names
from meshfold.capture.trace.lower import read_program
from meshfold.capture.trace.raw_program import RawProgram
from meshfold.ir.returns import LOSS_ALONE


class Chosen(nn.Module):
    """x or layer(x), by a drawn number or by one that is not."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        number = torch.rand([]) if self.draws else x.sum()
        return torch.where(number < 0.5, x, self.layer(x)).exp().sum()


def program(draws: bool) -> RawProgram:
    model = Chosen(draws)
    fake = fake_copy(model, "model")
    inputs = flatten_inputs({"x": torch.zeros(2, 4)}, fake.mode, "model", None)
    exported = export_fake(fake, inputs, LOSS_ALONE)
    return read_program(exported, model_names(model, "model"), inputs.infos)


@pytest.mark.parametrize("draws", [True, False])
def test_a_choice_by_a_draw_becomes_the_input(draws: bool) -> None:
    before = program(draws)
    after = with_skips(before)
    (exp,) = (op for op in after.ops if op.target == "aten.exp.default")
    makers = {key: op.target for op in after.ops for key in op.outputs}
    reads_choice = makers.get(next(iter(exp.operands))) == "aten.where.self"
    assert reads_choice == (not draws)
    assert len(before.ops) - len(after.ops) == int(draws)
