"""Where regions in parts take values apart and join them."""

from dataclasses import replace

import pytest
from support.programs.schedules import emitted

from meshfold.ir.op_graph import OpGraph
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.chained_chunks.boundary_values import joined_outputs, split_slots

pytestmark = pytest.mark.xdist_group("schedules")


def layer(parts: int = 2, pins: str = "tp+sp") -> tuple[OpGraph, RegionTyping]:
    region = emitted("llama", pins, parts=parts).regions[1]
    return region.ops, region.typing


@pytest.mark.parametrize("pins", ["tp", "tp+sp"])
def test_a_layer_joins_what_its_like_takes_apart(pins: str) -> None:
    graph, typing = layer(pins=pins)
    taken, made = split_slots(graph, typing), joined_outputs(graph, typing)
    assert taken[0].chunks == made[0].chunks
    assert taken[0].chunks.stacked[taken[0].chunks.dim] == 2
    # unflatten, unbind and two reshapes; two reshapes, stack and reshape
    targets = [graph.ops[k].target for k in (*sorted(taken[0].ops), *sorted(made[0].ops))]
    assert [t.split(".")[1] for t in targets] == [
        *("unflatten", "unbind", "reshape", "reshape"),
        *("reshape", "reshape", "stack", "reshape"),
    ]


def test_other_parts_are_others() -> None:
    two, four = (split_slots(*layer(parts))[0].chunks for parts in (2, 4))
    assert two != four


def test_a_region_in_one_part_has_none() -> None:
    graph, typing = layer(parts=1)
    assert not split_slots(graph, typing) and not joined_outputs(graph, typing)


def test_what_is_read_unsplit_too_is_neither() -> None:
    graph, typing = layer()
    (v,) = (v for v in split_slots(graph, typing))
    both = replace(graph, outputs=(*graph.outputs, v))
    assert v not in split_slots(both, typing)
    twice = replace(graph, outputs=(*graph.outputs, *graph.outputs))
    assert not joined_outputs(twice, typing)
