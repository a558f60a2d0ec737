"""Which values cross stage boundaries: not what a stage can make of inputs and constants."""

import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.passes.split.pieces import cut_as
from meshfold.passes.split.stage_crossing import crossing_readers, crossing_values

BATCH, WIDTH = 2, 4


class Mixed(nn.Module):
    """One value of each kind, all read by the last op."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made = {
            "of inputs": mask.cos() * self.table,
            "of a parameter": self.scale.sin() * torch.ones(WIDTH),
            "of both": x.tan() * self.scale,
            "drawn": torch.rand_like(x).exp(),
            "of an update": x.log1p() + self.steps,
            "of an updated weight": (self.scale * self.steps).sinh(),
        }
        self.steps.copy_(self.steps + 1)
        return torch.stack([y.expand(BATCH, WIDTH) for y in made.values()]).sum()


def targets(folded: FoldedGraph, target: str) -> list[tuple[int, int]]:
    """The outputs that an op of this target leads to, of pieces of one op each."""
    return [
        (k, 0)
        for k, instance in enumerate(folded.instances)
        if folded.regions[instance.region].graph.ops[0].target.startswith(f"aten.{target}.")
    ]


def test_what_inputs_and_constants_make_does_not_cross() -> None:
    inputs = {"x": torch.rand(BATCH, WIDTH), "mask": torch.rand(BATCH, WIDTH)}
    graph = capture(Mixed(), inputs).graph
    folded = cut_as(graph, [1] * graph.num_ops).folded
    assert all(len(region.graph.ops) == 1 for region in folded.regions)
    crossing = crossing_values(folded)
    expected = (
        *(("cos", False), ("tan", False), ("sin", False), ("exp", True)),
        ("sinh", True),  # another stage has not the buffer as it is
    )
    for target, crosses in expected:
        assert [made in crossing for made in targets(folded, target)] == [crosses]
    # tan(x) alone is of inputs; times the scale it is not.
    later = [k for k, _ in crossing if k > targets(folded, "tan")[0][0]]
    assert later


def test_the_last_reader_of_what_crosses_is_a_layer_or_who_asked() -> None:
    inputs = {"x": torch.rand(BATCH, WIDTH), "mask": torch.rand(BATCH, WIDTH)}
    graph = capture(Mixed(), inputs).graph
    folded = cut_as(graph, [1] * graph.num_ops).folded
    inside, returned = (crossing_readers(folded, is_returned=x) for x in (False, True))
    assert inside.keys() <= returned.keys() <= crossing_values(folded)
    for (maker, output), reader in inside.items():
        read = [
            k
            for k, instance in enumerate(folded.instances)
            for source in instance.sources
            if source.kind is SourceKind.VALUE
            and (source.instance, source.output) == (maker, output)
        ]
        assert reader == max(read)
    (made,) = (o.source for o in folded.outputs)
    assert returned[made.instance, made.output] == len(folded.instances)
