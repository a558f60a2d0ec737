"""The step composed from its instances, against sums by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.memory.parameter_uses import ParameterUse
from meshfold.cost_models.memory.step_memory import (
    NO_LOSS,
    InstanceMemory,
    InstanceOutput,
    States,
    compose_step,
)
from meshfold.cost_models.op_costs.optimizers import TOGETHER_SCALARS_BYTES, update_of
from meshfold.ir.memory_estimate import MemoryEstimate

NO_STATES = States(parameters=0, trained=0, buffers=0, inputs=0)

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


def layer(source: InstanceOutput | None, how: str = "direct", stored: int = 20) -> InstanceMemory:
    use = ParameterUse(1, stored, 20, 20, stored, how)  # type: ignore[arg-type]
    return InstanceMemory(LAYER, {0: source} if source else {}, (use,))


def chain(count: int, how: str = "direct", stored: int = 20) -> list[InstanceMemory]:
    return [layer((k - 1, 0) if k else None, how, stored) for k in range(count)]


def with_weight(
    instances: list[InstanceMemory], num_bytes: int, *, stays: int | None = None, name: str = ""
) -> list[InstanceMemory]:
    """Instances that read a parameter of `num_bytes`, of whose gradient `stays` bytes do."""
    kept = num_bytes if stays is None else stays
    use = ParameterUse(1, num_bytes, num_bytes, num_bytes, kept, "direct", name)
    return [replace(i, parameters=(use,)) for i in instances]


def compose(
    instances: list[InstanceMemory],
    states: States = NO_STATES,
    outputs: tuple[InstanceOutput, ...] = (),
    loss: int = NO_LOSS,
) -> tuple[MemoryEstimate, tuple[int, ...]]:
    return compose_step(
        instances,
        outputs,
        states,
        reserve_bytes=0,
        capacity_bytes=1000,
        loss=loss,
    )


def test_what_the_layer_of_the_loss_holds_is_its_own_component() -> None:
    """The same bytes under another name, where the peak is inside that layer; none elsewhere."""
    plain, _ = compose(chain(3))
    for loss, inside in ((2, 170), (1, 0), (0, 0)):
        found, _ = compose(chain(3), loss=loss)
        assert (found.loss, found.peak) == (inside, plain.peak)
        assert found.activations + found.transient + found.loss == 2 * 100 + 2 * 10 + 170


def test_a_chain_peaks_when_the_last_backward_begins() -> None:
    estimate, kept = compose(chain(3))
    # two layers' 100, the two values between them, and the last layer's own backward
    assert estimate.activations == 2 * 100 + 2 * 10 + 100
    assert estimate.transient == 170 - 100
    assert estimate.gradients == 0
    assert estimate.peak == 390
    # The last layer's output is kept by nobody.
    assert kept == (110, 110, 100)


def test_gradients_grow_while_activations_shrink() -> None:
    estimate, _ = compose(with_weight(chain(3), 500))
    # optimizer time: all gradients, no activations
    assert estimate.gradients == 1500 and estimate.activations == 0 and estimate.peak == 1500


def test_offloaded_activations_are_there_for_two_instances_at_a_time() -> None:
    plain = [replace(i, parameters=()) for i in chain(5)]
    layers = [replace(i, is_offloaded=True) for i in plain]
    estimate, kept = compose(layers)
    # In any backward the instance's own and the one that comes back next; values between stay.
    assert estimate.activations == 100 + 100 + 4 * 10
    assert estimate.peak == compose(plain)[0].peak - 3 * 100
    assert kept == (10, 10, 10, 10, 0)
    # One of them alone: worst while the last one runs backward, the first one away.
    one = [replace(i, is_offloaded=k == 0) for k, i in enumerate(plain[:3])]
    assert compose(one)[0].activations == 100 + 20 + 100
    # The last one, or two, have no time to leave.
    assert compose(layers[:2])[0] == compose(plain[:2])[0]


def test_parameters_that_come_by_layer_are_there_for_two_instances_at_a_time() -> None:
    plain = [replace(i, parameters=()) for i in chain(3)]
    layers = [replace(i, by_layer_bytes=500) for i in plain]
    assert compose(layers)[0].peak == compose(plain)[0].peak + 1000
    # The last one and those that come next in backward: of different sizes.
    sizes = [replace(i, by_layer_bytes=n) for i, n in zip(plain, (50, 0, 5000), strict=True)]
    found, _ = compose(sizes)
    assert found.gathered_parameters == 5050
    # While the second one runs backward the third's have gone.
    assert compose(sizes[:2])[0].gathered_parameters == 50


def test_gradients_that_leave_are_there_for_one_instance_more() -> None:
    away, _ = compose(with_weight(chain(3), 500, stays=0))
    # While instance 1 runs backward, w2's is on its way; instance 0 keeps 100, 1 its own 170.
    assert (away.buckets, away.gradients) == (500, 0)
    assert away.peak == 500 + 100 + 10 + 170
    shared, _ = compose(with_weight(chain(3), 500, stays=125))
    # Instance 0 runs backward: quarters of two, the rest of the nearer one.
    assert shared.gradients == 250 and shared.buckets == 375


def test_a_tied_parameter_has_one_gradient() -> None:
    tied = with_weight(chain(3), 500, name="w")
    assert compose(tied)[0].gradients == 500
    # Buckets of several uses are added up at the end: until then each is there.
    bucketed = [
        replace(i, parameters=(replace(i.parameters[0], how="reduced"),)) for i in [*tied, *tied]
    ]
    assert compose(bucketed)[0].gradients > 500
    # Then both are there, and their sum.
    cast = [
        replace(i, parameters=(replace(i.parameters[0], how="cast"),))
        for i in with_weight(chain(2), 500, name="w")
    ]
    summing, _ = compose(cast)
    assert (summing.gradients, summing.transient, summing.peak) == (1000, 500, 1500)
    # Without buckets at once: gradients of both, their sum, that of the first's value.
    direct, _ = compose(with_weight(chain(2), 500, name="w"))
    assert direct.peak == 500 + (10 + 20) + 500
    large = [replace(i, memory=replace(LAYER, slot_gradient_bytes=(10, 500))) for i in chain(2)]
    direct, _ = compose(with_weight(large, 500, name="w"))
    assert (direct.gradients, direct.transient) == (500, 10 + 500 + 500)
    # What has a collective of its own is added to in place.
    alone = [replace(i, parameters=(replace(i.parameters[0], is_unbucketed=True),)) for i in cast]
    assert compose(alone)[0].peak < 1500


def test_a_value_lives_until_the_first_instance_that_keeps_it_is_done() -> None:
    # Instance 1 and 2 both read what 0 gives; only 1 keeps it.
    reads = replace(LAYER, saved_slots=frozenset())
    instances = [
        layer(None),
        layer((0, 0)),
        InstanceMemory(reads, {0: (0, 0)}, ()),
    ]
    big = replace(LAYER, output_bytes=(1000,))
    instances[0] = replace(instances[0], memory=big)
    estimate, kept = compose(instances)
    # Live through instance 2's forward and backward, and instance 1's.
    assert estimate.activations == 1000 + 100 + 100 + 100
    assert kept == (1100, 100, 100)


def test_a_gradient_that_its_op_made_is_added_to_in_place() -> None:
    """Instance 1 runs backward first: what it made is there when instance 0 gives the second."""
    first, last = with_weight(chain(2), 500, name="table")
    assert compose([first, last])[0].peak == 500 + 10 + 20 + 500

    def own(instance: InstanceMemory) -> InstanceMemory:
        (use,) = instance.parameters
        return replace(instance, parameters=(replace(use, adds_in_place=True),))

    assert compose([own(first), last])[0].peak == 500 + 10 + 20 + 500
    assert compose([first, own(last)])[0].peak < 500 + 10 + 20 + 500


def test_a_value_that_nobody_keeps_is_gone_before_the_backward() -> None:
    reads = replace(LAYER, saved_slots=frozenset())
    first = InstanceMemory(replace(LAYER, output_bytes=(1000,)), {}, ())
    estimate, kept = compose([first, InstanceMemory(reads, {0: (0, 0)}, ())])
    # Worst when instance 1 runs forward: kept by 0, the value, and what 1 makes.
    assert estimate.peak == 100 + 1000 + 130
    assert kept == (100, 100)


def test_an_output_on_a_slots_storage_is_the_makers() -> None:
    passing = replace(LAYER, output_roots=(-1,), output_bytes=(0,), saved_slots=frozenset())
    first = InstanceMemory(replace(LAYER, output_bytes=(1000,)), {}, ())
    instances = [first, InstanceMemory(passing, {0: (0, 0)}, ()), layer((1, 0))]
    _, kept = compose(instances)
    assert kept == (1100, 100, 100)


def test_a_model_output_stays_with_the_caller() -> None:
    wide = replace(LAYER, output_bytes=(5000,), backward_peak_bytes=170)
    last = replace(chain(2)[1], memory=wide)
    instances = [chain(2)[0], last]
    assert compose(instances)[0].activations < 5000
    found, _ = compose(instances, outputs=((0, 0), (1, 0)))
    assert found.activations == 100 + 10 + 100 + 5000


def test_the_gradient_that_a_backward_starts_with_stays_to_its_end() -> None:
    wide = replace(LAYER, output_bytes=(5000,), backward_peak_bytes=170)
    instances = [chain(2)[0], replace(chain(2)[1], memory=wide)]
    found, _ = compose(instances, outputs=((1, 0),))
    # The worst moment is in the backward of the other instance.
    assert (found.activations, found.transient) == (100 + 5000, 70 + 5000)


def test_uses_that_are_added_up_stay_in_the_buffers_of_others() -> None:
    update = update_of("adamw", (2250,), 9_000, 4)
    states = States(parameters=9_000, trained=9_000, buffers=0, inputs=0, update=update)
    use = ParameterUse(1, 9_000, 9_000, 9_000, 9_000, "reduced", name="w")
    memory = replace(LAYER, slot_gradient_bytes=(10, 9_000))
    instances = [replace(of, memory=memory, parameters=(use,)) for of in chain(2)]
    # Both gradients stay in their buffers while the optimizer has their sum.
    assert compose(instances, states)[0].gradients == 3 * 9_000


def test_slices_are_put_together_in_other_memory_than_their_gradients() -> None:
    update = update_of("adamw", (2250,), 9_000, 4)
    states = States(parameters=9_000, trained=9_000, buffers=0, inputs=0, update=update)
    whole = with_weight(chain(1), 9_000)
    sliced = [replace(whole[0], sliced_bytes=4_000), *whole[1:]]
    assert compose(sliced, states)[0].peak == compose(whole, states)[0].peak + 4_000


def test_gradients_between_instances_wait_for_their_maker() -> None:
    # Instance 2 gives instance 0 a gradient that waits while instance 1 runs backward.
    instances = [layer(None), layer(None), layer((0, 0))]
    skip = replace(LAYER, slot_gradient_bytes=(700, 20))
    instances[2] = replace(instances[2], memory=skip)
    estimate, _ = compose(instances)
    assert estimate.transient == 70 + 700


def test_gathered_parameters_of_two_regions_are_resident() -> None:
    estimate, _ = compose(chain(3, "gathered", stored=5))
    assert estimate.gathered_parameters == 40
    # Only one gathering instance: nothing else in flight.
    single = [*chain(2), layer((1, 0), "gathered", stored=5)]
    assert compose(single)[0].gathered_parameters == 20


def test_reductions_hold_their_buffers() -> None:
    # Small activations, so that the peak is at the reduction.
    def small(k: int, how: str, stored: int) -> InstanceMemory:
        memory = replace(
            LAYER,
            saved_bytes=0,
            saved_slots=frozenset(),
            forward_peak_bytes=0,
            backward_peak_bytes=510,
            reduction_bytes=510,
            slot_gradient_bytes=(10, 500),
        )
        use = ParameterUse(1, stored, 500, 500, stored, how)  # type: ignore[arg-type]
        return InstanceMemory(memory, {0: (k - 1, 0)} if k else {}, (use,))

    scattered, _ = compose([small(k, "gathered", 125) for k in range(3)])
    # Worst in the middle: own gradients 510, buffer 500, its shard 125, the buffer in flight of the
    # region after, that one's shard, and the parameters of the region before, gathered ahead.
    assert scattered.transient == 510 and scattered.buckets == 500 + 125 + 500
    assert scattered.gradients == 125 and scattered.gathered_parameters == 500
    reduced, _ = compose([small(k, "reduced", 500) for k in range(3)])
    # What is all-reduced is so in place.
    assert reduced.buckets == 500 and reduced.gradients == 1000


def test_a_value_that_is_done_with_is_not_there_at_the_reduction() -> None:
    memory = replace(
        LAYER,
        saved_bytes=0,
        forward_peak_bytes=0,
        backward_peak_bytes=510,
        reduction_bytes=510,
        slot_gradient_bytes=(10, 500),
    )
    use = ParameterUse(1, 500, 500, 500, 500, "reduced")
    first = InstanceMemory(replace(memory, backward_peak_bytes=10), {}, ())

    def held(done: frozenset[int], *outputs: InstanceOutput) -> int:
        last = InstanceMemory(replace(memory, done_slots=done), {0: (0, 0)}, (use,))
        estimate, _ = compose([first, last], outputs=outputs)
        assert estimate.buckets == 500
        return estimate.activations

    assert held(frozenset()) == 10
    assert held(frozenset({0, 1})) == 0
    # A result of the model stays.
    assert held(frozenset({0, 1}), (0, 0)) == 10


@pytest.mark.parametrize(
    ("optimizer", "states", "transient"), [("adamw", 2, 1), ("adamw_fused", 2, 0), ("sgd", 0, 0)]
)
def test_optimizer_states_and_what_its_step_makes(
    optimizer: str, states: int, transient: int
) -> None:
    update = update_of(optimizer, (2250,), 9_000, 4)
    large = States(parameters=10_000, trained=9_000, buffers=50, inputs=7, update=update)
    estimate, _ = compose(with_weight(chain(1), 9_000), large)
    assert estimate == MemoryEstimate(
        parameters=10_050,
        gradients=9_000,
        optimizer=states * 9_000,
        activations=7,
        gathered_parameters=0,
        buckets=0,
        transient=transient * (9_000 + TOGETHER_SCALARS_BYTES),
        reserve=0,
        capacity=1000,
    )


def test_frozen_parameters_have_no_gradient() -> None:
    frozen = replace(LAYER, slot_gradient_bytes=(10, 0))
    instances = [replace(i, memory=frozen) for i in chain(1)]
    assert compose(with_weight(instances, 500))[0].gradients == 0


@given(count=st.integers(1, 12), more=st.integers(1, 500))
def test_more_to_keep_or_more_layers_is_never_less_memory(count: int, more: int) -> None:
    peak = compose(chain(count))[0].peak
    assert compose(chain(count + 1))[0].peak >= peak
    fatter = replace(
        LAYER, saved_bytes=100 + more, backward_peak_bytes=170 + more, forward_peak_bytes=130 + more
    )
    assert compose([replace(i, memory=fatter) for i in chain(count)])[0].peak > peak
