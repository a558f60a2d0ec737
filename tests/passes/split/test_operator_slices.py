"""Operators in slices: which, along which dim, and graphs that compute the same."""

from dataclasses import replace

import pytest
import torch
from support.programs.schedules import captured_family
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import FoldedGraph, ParameterSlice
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.passes.split.operator_slices import (
    Slicing,
    largest_operator_bytes,
    operators_in_slices,
    slicings_of,
    whole_layout,
    with_slices,
)


class Net(nn.Module):
    """x [rows, 8] -> 24 (1,536 bytes of float64) -> 6 features."""

    def __init__(self, middle: int = 24) -> None:
        super().__init__()
        self.up = nn.Linear(8, middle)
        self.down = nn.Linear(middle, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def graph(middle: int = 24) -> FoldedGraph:
    return capture(Net(middle).double(), {"x": torch.zeros(4, 8, dtype=torch.float64)}).graph


def named(folded: FoldedGraph) -> list[str]:
    return [s.label for i in folded.instances for s in i.sources if s.slice]


def test_the_largest_operator_has_as_many_slices_as_asked_for_and_others_by_size() -> None:
    folded = graph()
    assert largest_operator_bytes(folded) == 24 * 8 * 8
    # up [24, 8] by rows, which are columns of the result; down [6, 24] has 3/4 of its bytes: 3.
    found = sorted(slicings_of(folded, 4).values(), key=lambda s: s.count)
    assert found == [Slicing(0, 3), Slicing(0, 4)]
    sliced = with_slices(folded, 4)
    assert named(sliced) == [f"up.weight[{k}/4]" for k in range(4)] + [
        f"down.weight[{k}/3]" for k in range(3)
    ]
    # Equal slices are one region.
    assert len({i.region for i in sliced.instances}) == len(sliced.regions) == 4
    assert operators_in_slices(sliced) == [(0, 3), (5, 7)]
    assert sliced.parameters == folded.parameters
    assert sliced.numbers == (0,) * len(sliced.instances)
    assert with_slices(sliced, 8) is sliced


def test_a_dim_that_does_not_divide_makes_more_slices_or_gives_way_to_the_other_one() -> None:
    # up [25, 8] in 2: 25 divides by 5 only, which is more than twice as many: along its columns.
    (up, _) = sorted(slicings_of(graph(25), 2).items())
    assert up[1] == Slicing(1, 2)
    # up [23, 8] in 3: 23 is prime, 8 divides by 4.
    assert sorted(slicings_of(graph(23), 3).values(), key=str)[-1] == Slicing(1, 4)


def test_what_cannot_be_sliced_is_left_alone() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (nn.functional.linear(x, self.weight) * self.weight.sum()).mean()

    folded = capture(Reused(), {"x": torch.zeros(4, 8)}).graph
    assert largest_operator_bytes(folded) == 0 and with_slices(folded, 2) is folded


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_tables_are_sliced_alike(family: str) -> None:
    folded = captured_family(family).graph
    sliced = with_slices(folded, 8)
    of: dict[str, set[tuple[int, int]]] = {}
    for instance in sliced.instances:
        for s in instance.sources:
            if s.slice:
                of.setdefault(s.name, set()).add((s.slice.dim, s.slice.count))
    assert of and all(len(found) == 1 for found in of.values())
    table = next(name for name in of if "wte" in name or "embed_tokens" in name)
    assert next(iter(of[table]))[0] == 1  # columns of what is looked up


def test_slices_one_after_the_other_are_blocks_of_the_whole() -> None:
    part = ParameterSlice(dim=0, number=0, count=4)
    layout = (Shard(0), INVARIANT, replace(Shard(0), blocks=2), Shard(1))
    assert whole_layout(layout, part) == (
        replace(Shard(0), blocks=4),
        INVARIANT,
        replace(Shard(0), blocks=8),
        Shard(1),
    )
