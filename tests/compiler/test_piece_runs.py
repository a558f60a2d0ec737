"""Pieces that nothing parts in either direction become one."""

from itertools import pairwise

import pytest
from support_schedules import emitted
from torch import fx

from meshfold.codegen.program.region_schedule import Move, Piece, Pieces
from meshfold.codegen.schedule.segments import Cuts, cut_in_pieces, cut_in_runs
from meshfold.piece_runs import Place, moves_of, period_of, renumbered, runs_of

pytestmark = pytest.mark.xdist_group("schedules")


def places(text: str, tail: int = 0) -> list[Place]:
    moves = [Move(word[0], int(word[1:] or -1)) for word in text.split()]  # type: ignore[arg-type]
    return period_of(moves, tail)


def ops(count: int) -> Pieces:
    piece = Piece((), (), fx.GraphModule({}, fx.Graph()), ())
    return Pieces((piece,) * count, {}, (), ())


def runs(forward: list[Place], backward: list[Place], *apart: int) -> list[tuple[int, ...]]:
    return runs_of(ops(4), forward, backward, apart)


def test_a_period_names_what_the_region_before_has_left() -> None:
    moves = (Move("F", 0), Move("T"), Move("F", 1), Move("F", 2))
    period = period_of(moves, 1)
    assert period == [(Move("F", 0), False), (Move("F", 2), True), (Move("F", 1), False)]
    assert moves_of(period) == (moves, 1)


def test_pieces_that_follow_each_other_both_ways_are_one() -> None:
    forward = places("F0 F1 F2 F3")
    assert runs(forward, places("B3 B2 B1 B0")) == [(0, 1, 2, 3)]
    assert runs(forward, places("B3 B2 R0 B1 B0")) == [(0, 1), (2, 3)]
    assert runs(forward, places("B3 B1 B2 B0")) == []
    assert runs(forward, places("B3 B2 B1 B0"), 1) == [(2, 3)]
    assert runs(places("F0 O0 F1 F2 G F3"), places("B3 B2 B1 B0")) == [(1, 2)]


def test_gradients_of_weights_must_stand_together_too() -> None:
    forward = places("F0 F1 F2 F3")
    assert runs(forward, places("B3 B2 B1 B0 W3 W1")) == [(0, 1, 2, 3)]
    assert runs(forward, places("B3 B2 B1 B0 W3 G W1")) == [
        (0, 1, 2),
    ]
    assert runs(forward, places("B3 B2 W2 B1 B0 W1")) == [(0, 1), (2, 3)]


def test_what_is_left_to_the_next_region_stays_with_its_like() -> None:
    """3 is in the tail, 2 is not, though they follow each other in the last region of a line."""
    forward = period_of([Move("F", 0), Move("T"), *(Move("F", k) for k in (1, 2, 3))], 1)
    assert runs(forward, places("B3 B2 B1 B0")) == [(1, 2)]
    assert renumbered(forward, (0, 1, 1, 2)) == [
        (Move("F", 0), False),
        (Move("F", 2), True),
        (Move("F", 1), False),
    ]


def test_a_layer_has_no_two_pieces_that_could_be_one() -> None:
    region = emitted("llama", "tp+sp", parts=2).regions[1]
    schedule = region.schedule
    assert schedule is not None
    forward = period_of(schedule.forward, schedule.forward_tail)
    backward = period_of(schedule.backward, schedule.backward_tail)
    apart = {*schedule.taken.values(), *schedule.handed.values()}
    assert runs_of(schedule.pieces, forward, backward, apart) == []


def test_pieces_of_a_run_are_the_nodes_of_all() -> None:
    graph = emitted("llama", "tp+sp", parts=2).regions[1].graph.graph
    cuts = Cuts((), (1.0,) * 1000, 1.0)
    short = cut_in_pieces(graph, cuts)
    pairs = pairwise(enumerate(short.pieces))
    run = next(
        (a, b)
        for (a, left), (b, right) in pairs
        if left.kind == right.kind == "ops" and set(left.outputs) & set(right.inputs)
    )
    found, numbers = cut_in_runs(graph, cuts, [run])
    assert len(found.pieces) == len(short.pieces) - 1 == len(set(numbers))
    one = found.pieces[numbers[run[0]]]
    assert numbers[run[0]] == numbers[run[1]] and one.kind == "ops"
    assert set(one.outputs) <= {name for k in run for name in short.pieces[k].outputs}
