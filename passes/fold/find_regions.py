"""Fold a flat graph: find the regions that repeat and write the program as instances of them.

    flat ops --scope_spans / repeat_spans--> segments --assemble--> FoldedGraph

Two methods propose where to cut:

scopes     ops are grouped by the module that called them. Groups with equal canonical form are
           instances of one region; a group that occurs once is opened one level deeper, unless it
           is a sibling of a region (the odd first layer of a stack stays one piece).
repeats    scopes are ignored: tandem repeats of the sequence of ops (passes.fold.repeats).

Scopes give the cuts people expect, so repeats are tried where scopes leave more than half of the
ops, and taken where they leave less than half of those. What is between regions is glue: regions
with one instance, and so are groups too small to be worth a region.

What repeats nowhere and is long is still cut into layers (passes.fold.layers), so that each can
have a strategy of its own; a program where that is most of the ops says so in its notes.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from meshfold.ir.op_graph import FoldedGraph
from meshfold.passes.fold.assemble import assemble
from meshfold.passes.fold.canonical_form import (
    FlatIndex,
    Segment,
    Span,
    canonical_segment,
    flat_index,
    is_worth,
)
from meshfold.passes.fold.layers import LONG_OPS, layer_spans
from meshfold.passes.fold.repeats import repeat_spans

Stacks = Sequence[tuple[str, ...]]


def fold(flat: FoldedGraph, stacks: Stacks) -> FoldedGraph:
    """Fold the one region of `flat`; stacks[k] is the chain of module scopes of op k, outermost
    first. The result has the same ops in the same order."""
    persistent = frozenset(b.name for b in flat.buffers if b.persistent)
    index = flat_index(flat.regions[0].graph, persistent)
    num_ops = len(stacks)
    segments = _segments(index, merge_glue(scope_spans(index, stacks, 0, num_ops, 0)))
    if 2 * distinct_ops(segments) > num_ops:
        repeats = _segments(index, repeat_spans(index))
        if 2 * distinct_ops(repeats) < distinct_ops(segments):
            segments = repeats
    counts = Counter(s.form for s in segments)
    lone = [counts[s.form] == 1 for s in segments]
    pieces = [
        _segments(index, layer_spans(index, stacks, s.start, s.stop)) if is_lone else [s]
        for s, is_lone in zip(segments, lone, strict=True)
    ]
    return _with_note(assemble(flat, stacks, [s for of in pieces for s in of]))


def _with_note(folded: FoldedGraph) -> FoldedGraph:
    """Says so where folding did not help a program of many layers."""
    distinct = sum(len(region.graph.ops) for region in folded.regions)
    if folded.num_ops <= LONG_OPS or 2 * distinct <= folded.num_ops:
        return folded
    note = (
        f"folding did not help: {distinct:,} of {folded.num_ops:,} ops are different, in "
        f"{len(folded.regions):,} regions; planning takes longer in proportion"
    )
    return replace(folded, notes=(*folded.notes, note))


def _segments(index: FlatIndex, spans: Sequence[Span]) -> list[Segment]:
    return [canonical_segment(index, span.start, span.stop) for span in spans]


def merge_glue(spans: Sequence[Span]) -> list[Span]:
    """Neighbouring pieces of glue (an inner and an outer scope ending together) as one."""
    merged: list[Span] = []
    for span in spans:
        if span.is_glue and merged and merged[-1].is_glue:
            span = Span(merged.pop().start, span.stop, is_glue=True)
        merged.append(span)
    return merged


def distinct_ops(segments: Sequence[Segment]) -> int:
    """Ops that are left when equal segments count once."""
    return sum({s.form: s.stop - s.start for s in segments}.values())


def scope_spans(index: FlatIndex, stacks: Stacks, start: int, stop: int, depth: int) -> list[Span]:
    """Span ops start..stop-1, all called under the same first `depth` scopes.

    A single cut means that nothing repeats. O(ops x depth of scopes).
    """
    groups = _groups(stacks, start, stop, depth)
    forms = _forms(index, groups)
    counts = Counter(forms.values())
    repeated = {span for span, form in forms.items() if counts[form] > 1}
    parents = {_parent(scope) for scope, span in groups if span in repeated}
    opened = _openings(index, stacks, [s for _, s in groups if s in repeated], forms, depth)
    spans: list[Span] = []
    glue_start = start
    for scope, span in groups:
        inner = [span]
        if span in repeated:
            if forms[span] in opened:
                inner = scope_spans(index, stacks, span.start, span.stop, depth + 1)
        elif scope and _parent(scope) not in parents:
            inner = scope_spans(index, stacks, span.start, span.stop, depth + 1)
            if len(inner) == 1:
                continue
        elif not scope or not is_worth(index, span):
            continue
        if glue_start < span.start:
            spans.append(Span(glue_start, span.start, is_glue=True))
        spans += inner
        glue_start = span.stop
    if glue_start < stop:
        spans.append(Span(glue_start, stop, is_glue=True))
    return spans


def _groups(stacks: Stacks, start: int, stop: int, depth: int) -> list[tuple[str, Span]]:
    """Stretches of ops with one scope at `depth`; "" for ops called by the parent itself."""

    def scope(k: int) -> str:
        return stacks[k][depth] if len(stacks[k]) > depth else ""

    groups = []
    for key, ops in itertools.groupby(range(start, stop), scope):
        members = list(ops)
        groups.append((key, Span(members[0], members[-1] + 1)))
    return groups


def _forms(index: FlatIndex, groups: Sequence[tuple[str, Span]]) -> dict[Span, object]:
    """Canonical forms of the groups that are worth a region and could be equal to another."""
    worth = [span for scope, span in groups if scope and is_worth(index, span)]
    sizes = Counter(span.stop - span.start for span in worth)
    return {
        span: canonical_segment(index, span.start, span.stop).form
        for span in worth
        if sizes[span.stop - span.start] > 1
    }


def _openings(
    index: FlatIndex,
    stacks: Stacks,
    repeated: Sequence[Span],
    forms: dict[Span, object],
    depth: int,
) -> set[object]:
    """Forms of repeated groups that are stacks themselves (one of two equal towers): opening them
    leaves less than half of their ops."""
    firsts = {forms[span]: span for span in reversed(repeated)}
    opened = set()
    for form, span in firsts.items():
        inner = scope_spans(index, stacks, span.start, span.stop, depth + 1)
        if len(inner) > 1:
            left = distinct_ops([canonical_segment(index, c.start, c.stop) for c in inner])
            if 2 * left < span.stop - span.start:
                opened.add(form)
    return opened


def _parent(scope: str) -> str:
    return scope.rpartition(".")[0]
