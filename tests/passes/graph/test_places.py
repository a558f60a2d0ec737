"""Where ops stand in the code of a model, for messages."""

import re

import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import Source, SourceKind
from meshfold.passes.graph.places import made_at, op_place


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sinh(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubling()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


def test_an_op_is_named_with_its_line_and_module() -> None:
    folded = capture(Model(), {"x": torch.zeros(2, 2)}).graph
    (result,) = folded.outputs
    assert re.fullmatch(r"sinh \(.*test_places.py:\d+, in inner\)", op_place(folded, 0, 0))
    assert re.fullmatch(r" of sum \(.*test_places.py:\d+\)", made_at(folded, result.source))
    assert made_at(folded, Source(SourceKind.INPUT, "x")) == ""
    assert op_place(folded, 0, -1) == "what the model reads"
