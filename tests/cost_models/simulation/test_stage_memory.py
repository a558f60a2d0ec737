"""The peak of a device over its actions, against courses worked out by hand."""

from dataclasses import replace

import pytest

from meshfold.cost_models.memory.put_off_bytes import LeftToW, PutOffBytes
from meshfold.cost_models.memory.stage_residents import ParameterGradients, StageResidents
from meshfold.cost_models.memory.step_memory import Moment
from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.cost_models.simulation.pipeline import StageEvents
from meshfold.cost_models.simulation.stage_memory import (
    StageMemory,
    StageUse,
    device_peak,
    stage_memory,
)
from meshfold.ir.step_events import Event, RegionEvents, StepEvents

NO_GRADIENTS = ParameterGradients((0, 0), (0, 0), (0, 0), 0, 0, 0, 0, 0, 0)
RESIDENTS = StageResidents((0, 0), NO_GRADIENTS, kept=100, put_off=(), saved=(0,))
USE = StageUse(RESIDENTS, {Pass.FORWARD: 0, Pass.BACKWARD: 0})


def memory(use: StageUse = USE, *, gathered: int = 0) -> StageMemory:
    """A forward works with 10, a backward with 30 beside the 100 of its microbatch."""
    forward, backward = Moment(transient=10), Moment(activations=100, transient=30)
    return StageMemory(
        use,
        replace(forward, gathered=gathered),
        forward,
        backward,
        backward,
        replace(backward, gathered=gathered),
        gathered,
    )


ALL_FORWARDS_FIRST = "F0 F1 F2 B0 B1 B2"
ONE_BY_ONE = "F0 B0 F1 B1 F2 B2"


def actions_of(text: str, stage: int = 0) -> tuple[StageAction, ...]:
    return tuple(StageAction(stage, Pass(a[0]), int(a[1])) for a in text.split())


def peak(order: str, of: StageMemory, update_bytes: int = 0) -> Moment:
    return device_peak(actions_of(order), {0: of}, update_bytes)


def test_what_is_in_flight_and_the_pass_that_works_with_most() -> None:
    assert peak(ALL_FORWARDS_FIRST, memory()) == Moment(activations=300, transient=30)
    assert peak(ONE_BY_ONE, memory()) == Moment(activations=100, transient=30)


def test_gradients_are_there_from_the_first_backward_on() -> None:
    grown = replace(NO_GRADIENTS, summed=50, final=50)
    later = Moment(gradients=50, activations=100, transient=30)
    of = memory(replace(USE, residents=replace(RESIDENTS, gradients=grown)))
    of = replace(of, backward=later, last_backward=later)
    # GPipe: the first backward has three in flight, the second has two and the gradients.
    assert peak(ALL_FORWARDS_FIRST, of) == Moment(activations=300, transient=30)
    assert peak(ONE_BY_ONE, of) == later


def test_shards_take_the_place_of_sums_and_the_optimizer_comes_last() -> None:
    late = replace(NO_GRADIENTS, summed=50, final=20)
    of = memory(replace(USE, residents=replace(RESIDENTS, gradients=late)))
    assert peak(ONE_BY_ONE, of, update_bytes=500) == Moment(gradients=20, transient=500)


def test_what_is_gathered_once_is_there_all_the_time_and_counts_once() -> None:
    assert peak(ALL_FORWARDS_FIRST, memory(gathered=40)) == Moment(
        activations=300, gathered=40, transient=30
    )


def test_outputs_stay_to_the_end() -> None:
    found = peak(ONE_BY_ONE, memory(replace(USE, outputs=7)))
    assert found == Moment(activations=100 + 3 * 7, transient=30)


def test_messages_that_come_and_that_left() -> None:
    # 1F1B on the last of two devices: F0 B0 F1 B1 F2 B2. With B1 the input of F2 is on its way, and
    # the gradient of microbatch 0 has left by then; with F1 it may still be leaving.
    use = replace(USE, messages={Pass.FORWARD: 8, Pass.BACKWARD: 0}, sends_back=8)
    of = replace(memory(use), forward=Moment(transient=500))
    actions = actions_of(ONE_BY_ONE, 1)
    assert device_peak(actions, {1: of}, 0) == Moment(activations=8, transient=500)
    plain = replace(of, forward=Moment(transient=10))
    # B1: the gradient of microbatch 0 until another message leaves, and the input of F2.
    assert device_peak(actions, {1: plain}, 0) == Moment(activations=100 + 8 + 8, transient=30)


def test_what_waits_for_w() -> None:
    # Two products: the second frees what both need. 60 + 8 are kept from B to W.
    put_off = PutOffBytes(68, ((40, 0, 5), (25, 60, 0)))
    gradients = replace(NO_GRADIENTS, summed=70, final=70)
    residents = replace(RESIDENTS, put_off=(LeftToW(put_off),), gradients=gradients)
    of = memory(replace(USE, residents=residents))
    # B: 130. W: 68 + 40, 68 + 40 + 25, then 8 + 65 go to .grad.
    assert peak("F0 B0 W0", of) == Moment(activations=68, transient=65)
    # A second W finds the gradients of the first.
    assert peak("F0 B0 W0 F1 B1 W1", of).total == 70 + 68 + 65


def test_gradients_of_an_instance_go_before_the_next_one_makes_its_own() -> None:
    # Two instances of two products each: 80 made, of 100 kept 90 freed by then.
    each = LeftToW(PutOffBytes(100, ((40, 50, 0), (40, 40, 7))))
    gradients = replace(NO_GRADIENTS, summed=160, final=160, sums=160)
    residents = replace(RESIDENTS, put_off=(each, each), gradients=gradients)
    of = memory(replace(USE, residents=residents))
    # The first W: 200 are kept, and 40, then 40 - 50 + 40 + 7 more are made; behind that 100 are
    # left of the others, 10 of its own, 80 gradients, and what they are added up in.
    assert peak("F0 B0 W0", of) == Moment(160, 100, transient=100 - 90 + 80)
    # In the second W these are there from the beginning.
    assert peak("F0 B0 W0 F1 B1 W1", of) == Moment(160, 200, transient=40)
    # What goes straight to .grad goes behind its product, and is 160 in the end.
    alone = replace(each, direct=80, goes_alone=True)
    residents = replace(residents, put_off=(alone, alone), gradients=replace(gradients, sums=0))
    of = memory(replace(USE, residents=residents))
    assert peak("F0 B0 W0", of) == Moment(0, 200, transient=40)
    assert peak("F0 B0 W0 F1 B1 W1", of) == Moment(160, 200, transient=40)
    mixed = replace(each, direct=80)
    residents = replace(residents, put_off=(mixed, mixed))
    # Behind the second: what it handed over, and before that the other.
    assert peak("F0 B0 W0", memory(replace(USE, residents=residents))).total == 200 + 40


@pytest.mark.parametrize("splits", [False, True])
def test_passes_of_a_stage(splits: bool) -> None:
    region = RegionEvents(
        "A",
        forward=(Event("compute", 1.0, inside_bytes=10),),
        backward=(Event("compute", 2.0, inside_bytes=30),),
    )
    events = StepEvents((region,), (0,), (), 0.0, (0, 0, 0), fixed_bytes=0)
    gradients = ParameterGradients((0, 1), (0, 2), (0, 3), 3, 3, 0, 0, 0, 0)
    residents = StageResidents((4, 5), gradients, kept=25, put_off=(), saved=(20,))
    use = replace(USE, residents=residents)
    found = stage_memory(StageEvents(events, events), events, use, splits=splits)
    assert found.first_forward == found.forward == Moment(activations=4, transient=10)
    # What is saved inside counts as activations.
    assert found.first_backward == Moment(1, 25, transient=10)
    assert found.backward == Moment(2, 25, transient=10)
    assert found.last_backward == Moment(3, 25, transient=10)
    loss = stage_memory(StageEvents(events, events), events, replace(use, loss=0))
    assert loss.backward == Moment(2, 5, loss=30)
