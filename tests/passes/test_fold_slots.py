"""Slot classes of runs."""

import pytest
from support_fold import GraphBuilder, mlp_stack

from meshfold.ir.op_graph import FoldedGraph, Ref
from meshfold.passes.fold.find_regions import fold
from meshfold.passes.fold_slots import SlotClass, SlotFlow, slot_classes


def masked(depth: int, masks: list[str]) -> FoldedGraph:
    """Layers that add one of several masks, in turn, and a skip from two layers before."""
    b = GraphBuilder()
    h = b.slot("x", requires_grad=True)
    inputs = {name: b.slot(name) for name in dict.fromkeys(masks)}
    weights = [b.parameter(f"layers.{k}.weight") for k in range(depth)]
    skips = [h, h]
    for k, weight in enumerate(weights):
        stack = (f"layers.{k}",)
        y = b.op("aten.linear.default", Ref(h), Ref(weight), stack=stack)
        y = b.op("aten.add.Tensor", Ref(y), Ref(inputs[masks[k % len(masks)]]), stack=stack)
        y = b.op("aten.relu.default", Ref(y), stack=stack)
        h = b.op("aten.add.Tensor", Ref(y), Ref(skips[-2]), stack=stack)
        skips.append(h)
    return fold(b.flat([h]), tuple(b.stacks))


def flows(graph: FoldedGraph) -> list[SlotClass]:
    region, first, count = max(graph.runs, key=lambda run: run[2])
    return list(slot_classes(graph, first, count))


def test_a_chain_carries_one_value_and_owns_its_parameters() -> None:
    graph = fold(*mlp_stack(5))
    assert flows(graph) == [
        SlotClass(SlotFlow.CARRIED, output=0),
        SlotClass(SlotFlow.OWN),
        SlotClass(SlotFlow.OWN),
    ]


def test_shared_and_each() -> None:
    kinds = [c.flow for c in flows(masked(6, ["mask"]))]
    assert SlotFlow.SHARED in kinds
    assert SlotFlow.EACH in kinds


def test_periodic() -> None:
    found = flows(masked(8, ["narrow", "narrow", "wide"]))
    assert SlotClass(SlotFlow.PERIODIC, period=3) in found


def test_instances_of_two_regions_are_refused() -> None:
    graph = fold(*mlp_stack(3))
    with pytest.raises(ValueError, match="not of one region"):
        slot_classes(graph, 0, 2)
