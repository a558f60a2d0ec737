"""Classes of values that cross region boundaries, and their types."""

import pytest
from support.graphs.op_graphs import folded_stack
from support.models.hugging_face import tiny_model
from support.models.vision import images, small_resnet

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import Dependence, Value
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.passes.graph.boundaries import (
    batch_type,
    carries_feature_maps,
    find_boundaries,
    num_instances,
    sequence_type,
)

HIDDEN = Value((4, 8, 16), "float32", True)


def test_carried_value_is_one_class():
    found = find_boundaries(folded_stack(num_layers=3))
    embed, layer, head = 0, 1, 2
    carried = found.slots[layer][0]
    assert found.outputs[embed][0] == carried
    assert found.outputs[layer][0] == carried
    assert found.slots[head][0] == carried
    assert found.slots[layer][1] is None  # a parameter
    assert carried not in found.inputs | found.results


def test_inputs_and_results():
    found = find_boundaries(folded_stack(num_layers=3))
    assert found.inputs == {found.slots[0][0]}
    assert found.results == {found.outputs[2][0]}
    assert found.values[found.slots[0][0]].shape == (4, 8, 16)


def test_num_instances():
    assert num_instances(folded_stack(num_layers=3)) == {0: 1, 1: 3, 2: 1}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 3), Shard(0)), ((6, 3), INVARIANT), ((3, 8), INVARIANT), ((), INVARIANT)],
)
def test_batch_type(shape, expected):
    assert batch_type(Value(shape, "int64"), 8, 4) == expected


def test_batch_that_does_not_divide_stays_unsharded():
    assert batch_type(Value((6, 3), "int64"), 6, 4) == INVARIANT


@pytest.mark.parametrize(
    ("value", "batch", "expected"),
    [
        (HIDDEN, Shard(0), Shard(1)),
        (HIDDEN, INVARIANT, Shard(1)),
        (HIDDEN, Shard(1), Shard(0)),
        (Value((4, 9, 16), "float32", True), Shard(0), INVARIANT),
        (Value((4, 8), "float32", True), Shard(0), INVARIANT),
        (Value((4, 8, 16), "int64"), Shard(0), INVARIANT),
        (Value((4, 8, 16), "float32", True, Dependence.PARAMETER), Shard(0), INVARIANT),
    ],
)
def test_sequence_type(value, batch, expected):
    assert sequence_type(value, batch, 4) == expected


@pytest.mark.parametrize(("family", "carries"), [("t5", False), ("resnet", True)])
def test_what_is_alike_for_all_samples_is_no_feature_map(family, carries):
    """T5's layers pass on a position bias of rank 4: who pins tp=2 means its weights."""
    model = (small_resnet((4, 1)), images(4, 16, 8)) if family == "resnet" else tiny_model(family)
    assert carries_feature_maps(capture(*model).graph) is carries
