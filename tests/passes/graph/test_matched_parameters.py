"""Which parameters stand where: by ops and values, not by names or regions."""

import pytest
import torch
from support.models.factories import deep
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.passes.graph.matched_parameters import matched_parameters


class Products(nn.Module):
    """x @ a @ b..., by the names given, and a sum or a mean."""

    def __init__(self, names: str, *, means: bool = False, factor: float = 2.0) -> None:
        super().__init__()
        self.names, self.means, self.factor = names, means, factor
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(4, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = x @ getattr(self, name) * self.factor
        return x.mean() if self.means else x.sum()


class Crossed(Products):
    """The same ops; the second one reads the input again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            y = x @ getattr(self, name) * self.factor
        return y.sum()


def captured(model: nn.Module) -> FoldedGraph:
    return capture(model, {"x": torch.ones(2, 4)}).graph


def test_names_follow_from_places() -> None:
    aba, xyz = captured(Products("aba")), captured(Products("xyz"))
    assert matched_parameters(aba, xyz) == {"x": "a", "y": "b", "z": "a"}
    assert matched_parameters(aba, aba) == {"a": "a", "b": "b"}


@pytest.mark.parametrize("sharing", ["called", "placed", "tied"])
def test_blocks_that_are_folded_in_other_ways(sharing: str) -> None:
    (shared, batch), (own, _) = deep(sharing), deep()
    found = matched_parameters(capture(shared, batch).graph, capture(own, batch).graph)
    block = "block." if sharing == "called" else "blocks.0."
    for name, source in found.items():
        parts = name.split(".")
        assert source == (name if parts[0] != "blocks" else block + ".".join(parts[2:]))
    assert len(found) == 4 + 4 * 4


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Products("xyz", means=True), "number 6 is aten.sum.default in the model where layers are"),
        (Products("xy"), "the models run different ops: number 4 is"),
        (Products("xyz", factor=3.0), "number 1 is aten.mul.Tensor"),
        (Products("xxy"), "x stands in the places of both a and b, so which"),
        (Crossed("xyz"), "number 2 is aten.matmul"),
    ],
)
def test_programs_that_differ_are_refused(other: nn.Module, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        matched_parameters(captured(Products("aba")), captured(other))
    assert words in str(caught.value)
