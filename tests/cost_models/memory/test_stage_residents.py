"""What a stage has of a microbatch outside of the instance that runs, by hand."""

from dataclasses import replace

import pytest

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.memory.parameter_uses import ParameterUse
from meshfold.cost_models.memory.put_off_bytes import PutOffBytes
from meshfold.cost_models.memory.stage_residents import (
    StageInstance,
    StageResidents,
    stage_residents,
)
from meshfold.cost_models.memory.step_memory import InstanceMemory

# One layer: takes x (10 bytes, kept), keeps 100 inside, gives 10; a parameter of 20.
LAYER = RegionMemory(
    saved_bytes=100,
    saved_slots=frozenset({0}),
    output_roots=(0,),
    output_bytes=(10,),
    saved_outputs=(False,),
    forward_peak_bytes=130,
    backward_peak_bytes=170,
    reduction_bytes=30,
    slot_gradient_bytes=(10, 20),
)


def layer(k: int, how: str = "direct", stored: int = 20, name: str = "") -> StageInstance:
    """The first takes what arrived."""
    use = ParameterUse(1, stored, 20, 20, stored, how, name)  # type: ignore[arg-type]
    memory = InstanceMemory(LAYER, {0: (k - 1, 0)} if k else {}, (use,))
    return StageInstance(memory, outside=() if k else (0,))


def stage(how: str = "direct", stored: int = 20, *, once: bool = False) -> StageResidents:
    layers = [replace(layer(k, how, stored), is_once=once) for k in range(2)]
    return stage_residents(layers, [(1, 0)], arrived_bytes=10, received_bytes=10)


def test_activations_of_a_stage() -> None:
    found = stage()
    # What arrived; with it the first layer; behind both their outputs, and the gradient that
    # arrived, to the end; of the first layer the gradient that it has coming in is its own.
    assert found.activations == (10, 10 + 100 + 10, 10 + 100 + 10 + 10 + 10, 10 + 10 + 10)
    assert found.kept == 10 + 2 * (100 + 10)
    assert found.saved == (100, 100)


def test_gradients_that_go_straight_to_grad() -> None:
    of = stage().gradients
    assert (of.first[2:], of.later[2:], of.last[2:]) == ((0, 20), (40, 40), (40, 40))
    assert (of.summed, of.final) == (40, 40)


def test_gradients_that_are_scattered_with_every_microbatch() -> None:
    of = stage("gathered", stored=5).gradients
    # Those of the first are sums behind the next backward; until then they are with its buffers.
    assert (of.first[2:], of.later[2:], of.last[2:]) == ((0, 0), (10, 10), (10, 10))
    # At the end of a backward the shards of two layers are beside their sums.
    assert (of.summed, of.final, of.each, of.beside) == (10, 10, 10, 10)
    tied = stage_residents(
        [layer(k, "gathered", 5, name="table") for k in range(2)], [(1, 0)]
    ).gradients
    assert (tied.later[2:], tied.summed, tied.beside) == ((15, 20), 15, 15)


def test_gradients_that_are_added_up_and_scattered_once() -> None:
    of = stage("gathered", stored=5, once=True).gradients
    # With the last microbatch 5 of each layer takes the place of 20.
    assert (of.first[2:], of.later[2:], of.last[2:]) == ((0, 20), (40, 40), (40, 25))
    assert (of.summed, of.final, of.sums, of.late) == (40, 10, 40, 10)


def test_what_is_all_reduced_is_added_up_and_stays_where_it_is() -> None:
    of = stage("reduced").gradients
    assert (of.first[2:], of.last[2:]) == ((0, 20), (40, 40))
    assert (of.summed, of.final, of.late) == (40, 40, 0)


def test_a_parameter_of_two_layers_waits_for_both_in_every_microbatch() -> None:
    layers = [layer(k, name="table") for k in range(2)]
    of = stage_residents(layers, [(1, 0)]).gradients
    assert (of.later[2:], of.summed) == ((20, 40), 20)
    # One that another stage reads as well does not.
    alone = [layer(0, name="table"), layer(1)]
    assert stage_residents(alone, [(1, 0)]).gradients.later[2:] == (40, 40)


@pytest.mark.parametrize("splits", [False, True])
def test_one_microbatch_and_what_waits_for_w(splits: bool) -> None:
    layers = [replace(layer(k), put_off=PutOffBytes(7, ((20, 6, 0),))) for k in range(2)]
    found = stage_residents(layers, [(1, 0)], is_only=True, splits=splits)
    assert found.gradients.last[2:] == ((0, 0) if splits else (0, 20))
    left = PutOffBytes(7, ((20, 6, 0),))
    assert [x.put_off for x in found.put_off] == [left, left] and found.put_off_bytes == 14
    assert found.activations[3] - found.activations[0] == 10 + 7
