"""Where ops stand in the code of a model, for messages."""

import re

import torch
from support.models.hugging_face import tiny_model
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import Source, SourceKind
from meshfold.passes.graph.places import made_at, op_place, read_name
from meshfold.passes.graph.typed import value_name


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


def test_what_a_region_reads_is_called_as_where_it_is_made() -> None:
    folded = capture(*tiny_model("llama")).graph
    assert len(folded.regions) > 2
    for number, region in enumerate(folded.regions):
        slots = region.graph.slots
        names = [read_name(folded, number, v) for v in range(len(slots))]
        assert all(name == slot.name for name, slot in zip(names, slots, strict=True) if slot.name)
        assert not any(name.startswith("slot") for name in names)
        made = region.graph.ops[-1].outputs[0]
        assert read_name(folded, number, made) == value_name(region.graph, made)
    last = folded.instances[-1]
    handed_over = next(v for v, s in enumerate(last.sources) if s.kind is SourceKind.VALUE)
    assert "add" in read_name(folded, last.region, handed_over)
