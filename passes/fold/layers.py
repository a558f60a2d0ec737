"""Span a long stretch of ops that repeats nowhere into layers, so that each has its own strategy.

    by scopes     the modules that the innermost common module calls, where they are worth a region;
                  what is between them is glue. A layer that is long itself is cut again.
    by crossing   where no module helps, pieces of at most LONG_OPS ops, each ending where the
                  fewest values cross

Regions exchange values in one layout, so a cut inside a pair of column- and row-parallel ops would
cost communication: modules come first, and narrow places next.
"""

import itertools
import os
from collections.abc import Sequence

from meshfold.passes.fold.canonical_form import FlatIndex, Span, is_worth
from meshfold.passes.fold.repeats import crossing

LONG_OPS = 300
"""A stretch of more ops is cut: longer than a layer of most models, short enough that a strategy
for all of it is not a loss."""

LEAST_SHARE = 4
"""A piece between narrow places has at least LONG_OPS / LEAST_SHARE ops."""


def layer_spans(
    index: FlatIndex, stacks: Sequence[tuple[str, ...]], start: int, stop: int
) -> list[Span]:
    """Ops start..stop-1 in one piece or several, in order. stacks[k]: scopes of op k."""
    if stop - start <= LONG_OPS:
        return [Span(start, stop)]
    pieces = _by_scopes(index, stacks, start, stop)
    if len(pieces) == 1:
        return _by_crossing(index, start, stop)
    return [c for piece in pieces for c in layer_spans(index, stacks, piece.start, piece.stop)]


def _by_scopes(
    index: FlatIndex, stacks: Sequence[tuple[str, ...]], start: int, stop: int
) -> list[Span]:
    """The modules called at the first depth where there are several, and the glue between."""
    depth = len(os.path.commonprefix([list(stack) for stack in stacks[start:stop]]))
    spans: list[Span] = []
    glue_start = start
    for scope, ops in itertools.groupby(
        range(start, stop), lambda k: stacks[k][depth] if len(stacks[k]) > depth else ""
    ):
        members = list(ops)
        span = Span(members[0], members[-1] + 1)
        if not scope or not is_worth(index, span):
            continue
        if glue_start < span.start:
            spans.append(Span(glue_start, span.start, is_glue=True))
        spans.append(span)
        glue_start = span.stop
    if glue_start < stop:
        spans.append(Span(glue_start, stop, is_glue=True))
    return spans


def _by_crossing(index: FlatIndex, start: int, stop: int) -> list[Span]:
    """Pieces of LONG_OPS / LEAST_SHARE to LONG_OPS ops that end at the last of the narrowest
    places."""
    values = crossing(index)
    spans = []
    while stop - start > LONG_OPS:
        ends = range(start + LONG_OPS // LEAST_SHARE, start + LONG_OPS + 1)
        end = min(ends, key=lambda k: (values[k], -k))
        spans.append(Span(start, end))
        start = end
    return [*spans, Span(start, stop)]
