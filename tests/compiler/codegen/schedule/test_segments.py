"""Regions in segments: every node in one of them, in an order in which they can run."""

import operator
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.schedules import emitted, matrix
from torch import fx

from meshfold.codegen.program.emitted import ORIGIN, RegionProgram
from meshfold.codegen.program.region_schedule import ActionKind, RegionSchedule
from meshfold.codegen.schedule.segments import SegmentLimits, segmented_graph
from meshfold.ops.conversions import STARTS, WAITS
from meshfold.zero.graph_ops import replicate_group, start_ahead, wait_group

pytestmark = pytest.mark.xdist_group("schedules")

CASES = [("llama", "zero3 x tp+sp"), ("gpt2", "tp"), ("llama", "tp+sp")]


def schedules(family: str, pins: str) -> list[tuple[RegionProgram, RegionSchedule]]:
    """The regions that have one."""
    found = [(r, r.schedule) for r in emitted(family, pins).regions if r.schedule is not None]
    assert found
    return [(region, schedule) for region, schedule in found if schedule is not None]


def test_regions_that_gather_and_reduce_alone_run_eager() -> None:
    for pins in ("dp", "zero3"):
        layers = [r for r in emitted("llama", pins).regions if r.name.startswith("B")]
        assert layers and all(region.schedule is None for region in layers)


def functions(graph: fx.Graph) -> Counter[object]:
    return Counter(n.target for n in graph.nodes if n.op == "call_function")


@pytest.mark.parametrize(("family", "pins"), CASES)
def test_segments_contain_every_node_once(family: str, pins: str) -> None:
    for region, schedule in schedules(family, pins):
        whole = functions(region.graph.graph)
        for function in (wait_group, replicate_group, start_ahead):
            del whole[function]
        found: Counter[object] = Counter()
        for segment in schedule.graph.segments:
            if segment.kind == "ops":
                found += functions(segment.graph.graph)
        collectives = sum(n for f, n in whole.items() if f in STARTS or f in WAITS)
        kinds = Counter(p.kind for p in schedule.graph.segments)
        assert kinds["start"] == kinds["wait"] == collectives / 2
        # Members come out of buckets; products may be split ones.
        members = len(schedule.graph.members)
        assert found.total() == whole.total() - collectives - members


@pytest.mark.parametrize(("family", "pins"), CASES)
def test_segments_come_after_what_they_read(family: str, pins: str) -> None:
    for region, schedule in schedules(family, pins):
        graph = schedule.graph
        known = {n.name for n in region.graph.graph.nodes if n.op == "placeholder"}
        known |= set(graph.members)
        for segment in graph.segments:
            assert known.issuperset(segment.inputs)
            known |= set(segment.outputs)
        assert known.issuperset(graph.results)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "pins"), matrix("llama"))
def test_every_start_has_its_wait_behind_it(family: str, pins: str) -> None:
    for _, schedule in schedules(family, pins):
        for actions, starts, waits in (
            (schedule.forward, "start", "wait"),
            (schedule.backward, "wait", "start"),
        ):
            place = {
                m.number: k
                for k, m in enumerate(actions)
                if m.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            }
            for number, segment in enumerate(schedule.graph.segments):
                if segment.kind == "wait":
                    pair = {"wait": number, "start": segment.partner}
                    assert place[pair[starts]] < place[pair[waits]]


def test_the_order_is_part_of_what_ranks_compare() -> None:
    """And what `meshfold graph` shows."""
    program = emitted("llama", "tp")
    found = program.regions[1].schedule
    assert found is not None
    words = found.text_lines()[1].split()
    assert words[:2] == ["backward:", "A"] and f"  {found.text_lines()[1]}" in program.text(0)
    # A W stands between the start of a collective and its wait.
    late = [words[k - 1][0] + words[k + 1][0] for k, word in enumerate(words) if word[0] == "W"]
    assert "><" in late
    actions = (*found.backward[:-2], *reversed(found.backward[-2:]))
    other = replace(program.regions[1], schedule=replace(found, backward=actions))
    changed = replace(program, regions=(program.regions[0], other, *program.regions[2:]))
    assert changed.digest != program.digest


def test_segments_of_chained_regions_are_short_and_boundaries_are_segments_of_their_own() -> None:
    for line in (r for r in emitted("llama", "tp+sp", parts=2).regions if r.schedule is not None):
        schedule = line.schedule
        assert schedule is not None
        for k in (*schedule.splits.values(), *schedule.joins.values()):
            segment = schedule.graph.segments[k]
            assert segment.kind == "ops" and len(segment.origins) == 4
    region = emitted("llama", "tp+sp", parts=2).regions[1]
    whole = segmented_graph(region.graph.graph)
    seconds = tuple(1.0 for _ in region.ops.ops)
    shorter = segmented_graph(region.graph.graph, SegmentLimits(seconds=seconds, shortest_s=3.0))
    sizes = [len(p.origins) for p in shorter.segments if p.kind == "ops"]
    assert max(len(p.origins) for p in whole.segments if p.kind == "ops") > 6
    assert len(sizes) > len([p for p in whole.segments if p.kind == "ops"])
    nodes = [
        functions(p.graph.graph) for p in (*whole.segments, *shorter.segments) if p.kind == "ops"
    ]
    half = len(nodes) - len(sizes)
    assert sum(nodes[:half], Counter()) == sum(nodes[half:], Counter())


Draw = list[tuple[int, int]]


def drawn_graph(reads: Draw) -> fx.Graph:
    """A graph of a placeholder and additions, each of two values before it."""
    graph = fx.Graph()
    values = [graph.placeholder("value_0")]
    for k, (a, b) in enumerate(reads):
        node = graph.call_function(operator.add, (values[a % len(values)], values[b % len(values)]))
        node.meta[ORIGIN] = k
        values.append(node)
    graph.output((values[-1],))
    return graph


@given(
    reads=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=12),
    splits=st.sets(st.integers(0, 11), max_size=4),
    joins=st.sets(st.integers(0, 11), max_size=4),
    shortest_s=st.sampled_from([1.0, 3.0, 100.0]),
)
def test_any_op_can_be_a_segment_of_its_own(
    reads: Draw, splits: set[int], joins: set[int], shortest_s: float
) -> None:
    """What a split reads was in one segment with what reads the chunks, where no collective stood
    between them: neither could come first."""
    joins -= splits
    limits = SegmentLimits(
        tuple(frozenset({k}) for k in splits),
        tuple(frozenset({k}) for k in joins),
        (1.0,) * len(reads),
        shortest_s,
    )
    segments = segmented_graph(drawn_graph(reads), limits).segments
    known = {"context", "value_0"}
    for segment in segments:
        assert known.issuperset(segment.inputs)
        known |= set(segment.outputs)
    found = [segment.origins for segment in segments if segment.kind == "ops"]
    assert sorted(k for origins in found for k in origins) == list(range(len(reads)))
    for k in (splits | joins).intersection(range(len(reads))):
        assert (k,) in found
