"""Pieces that a schedule leaves together in both directions, to be run as one.

The pieces of a region in line are short while its order is looked for (meshfold.schedule_program).
Each costs the host its time, forward and backward, so those that follow each other at once, and
whose backwards do, the other way round, become one again.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

from meshfold.codegen.program.region_schedule import Move, Pieces

Place = tuple[Move, bool]
"""A move, and whether it is in the tail. In order they are a period of passes.line_schedule."""


def period_of(moves: Sequence[Move], tail: int) -> list[Place]:
    """The period of a direction whose last moves, as many as `tail`, are its tail."""
    left = iter(moves[len(moves) - tail :])
    body = moves[: len(moves) - tail]
    return [(next(left), True) if m.kind == "T" else (m, False) for m in body]


def moves_of(period: Sequence[Place]) -> tuple[tuple[Move, ...], int]:
    """Inverse of period_of."""
    tail = tuple(move for move, is_left in period if is_left)
    body = tuple(Move("T") if is_left else move for move, is_left in period)
    return (*body, *tail), len(tail)


def runs_of(
    pieces: Pieces, forward: Sequence[Place], backward: Sequence[Place], apart: Collection[int]
) -> list[tuple[int, ...]]:
    """The runs of two or more, by number of the pieces, in order. apart: pieces that stay for
    themselves."""
    behind = {(b, a) for (a, x), (b, y) in pairwise(backward) if x == y}
    weights = {m.number: (k, left) for k, (m, left) in enumerate(backward) if m.kind == "W"}
    runs: list[list[int]] = []
    for (first, x), (then, y) in pairwise(forward):
        a, b = first.number, then.number
        if not (first.kind == then.kind == "F" and x == y):
            continue
        if not {a, b}.isdisjoint(apart) or (Move("B", a), Move("B", b)) not in behind:
            continue
        if pieces.pieces[a].kind != "ops" or pieces.pieces[b].kind != "ops":
            continue
        is_next = bool(runs) and runs[-1][-1] == a
        run = runs[-1] if is_next else [a]
        late = sorted(weights[k] for k in (*run, b) if k in weights)
        if any(q != p + 1 or left != right for (p, left), (q, right) in pairwise(late)):
            continue
        run.append(b)
        if not is_next:
            runs.append(run)
    return [tuple(run) for run in runs]


def renumbered(period: Sequence[Place], numbers: Sequence[int]) -> list[Place]:
    """`period` with the pieces' new numbers; those of a run, which stand together, once."""
    found: list[Place] = []
    for move, is_left in period:
        if move.kind in "FBW":
            move = Move(move.kind, numbers[move.number])
        if (move, is_left) not in found[-1:]:
            found.append((move, is_left))
    return found
