"""Regions in pieces: the same program, divided anywhere, and read back from a plan."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.models.unrepeated import unet, widening
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.op_graph import FoldedGraph, SlotKind
from meshfold.ops.reference_interpreter import run_graph
from meshfold.passes.split.loss_counts import loss_counts
from meshfold.passes.split.pieces import PIECES_PER_STAGE, _work, cut_as, in_pieces, sizes_of
from meshfold.validation.float64_mode import float64_everywhere

MAKERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "unet": unet,
    "widening": widening,
    "llama": lambda: tiny_model("llama", layers=2),
}


@cache
def captured(name: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = MAKERS[name]()
    with float64_everywhere():
        return model, batch, capture(model, batch)


@pytest.mark.parametrize("name", list(MAKERS))
def test_pieces_compute_what_the_whole_does(name: str) -> None:
    model, batch, found = captured(name)
    pieces = in_pieces(found.graph, 4)
    assert len(pieces.folded.instances) >= 4 * PIECES_PER_STAGE
    assert pieces.folded.num_ops == found.graph.num_ops
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    whole, cut = (
        run_graph(folded, parameters, buffers, found.constants, batch)
        for folded in (found.graph, pieces.folded)
    )
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[k], cut[k]) for k in whole)
    assert pieces.numbers == tuple(sorted(pieces.numbers))
    assert set(pieces.numbers) == set(range(len(found.graph.instances)))


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_plan_says_how_it_was_cut_by_the_sizes_of_its_layers(name: str) -> None:
    """In whatever order the cuts were found."""
    graph = captured(name)[2].graph
    pieces = in_pieces(graph, 4)
    again = cut_as(graph, sizes_of(pieces.folded))
    assert again.numbers == pieces.numbers
    assert contents(again.folded) == contents(pieces.folded)
    assert cut_as(graph, sizes_of(graph)).folded is graph


def test_sizes_of_another_program_cut_nothing() -> None:
    graph = captured("unet")[2].graph
    found = list(sizes_of(in_pieces(graph, 4).folded))
    for wrong in ([*found, 1], found[:-1], [0, *found], [10**6]):
        assert cut_as(graph, wrong).folded is graph
    largest = max(range(len(found) - 1), key=found.__getitem__)
    found[largest] -= 1
    found[largest + 1] += 1
    assert sizes_of(cut_as(graph, found).folded) == tuple(found)


def contents(folded: FoldedGraph) -> list[object]:
    """What every instance is, whatever the names and numbers of regions."""
    return [(folded.regions[i.region].graph, i.sources, i.floats) for i in folded.instances]


def test_the_first_and_the_last_piece_have_parameters() -> None:
    """torch makes no optimizer of none."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 4))
    model.extend([nn.Tanh(), nn.Tanh(), nn.Flatten(0), nn.Softmax(0)])
    folded = in_pieces(capture(model, {"input": torch.randn(2, 4)}).graph, 2).folded
    assert len(folded.instances) > 1
    for instance in (folded.instances[0], folded.instances[-1]):
        slots = folded.regions[instance.region].graph.slots
        assert any(slot.kind is SlotKind.PARAMETER for slot in slots)


def test_what_repeats_often_enough_is_left_alone() -> None:
    graph = captured("llama")[2].graph
    assert in_pieces(graph, 2).folded is graph


def test_no_piece_has_more_than_its_share_of_the_work() -> None:
    """What is more than a stage's share of four is a single op."""
    folded = in_pieces(captured("unet")[2].graph, 4).folded
    work = [sum(_work(folded.regions[i.region].graph)) for i in folded.instances]
    large = [n for n, w in zip(sizes_of(folded), work, strict=True) if w > sum(work) / 4]
    assert all(n == 1 for n in large)


def test_losses_that_count_their_targets_stay_together() -> None:
    """They are told apart by op and uncut instance."""
    graph = captured("widening")[2].graph
    pieces = in_pieces(graph, 100)
    assert len(pieces.folded.instances) > 10
    counts = loss_counts(pieces.folded)
    assert len(counts) == 2 and len({count.op[0] for count in counts}) == 1
    assert cut_as(graph, [1] * graph.num_ops).folded is graph
