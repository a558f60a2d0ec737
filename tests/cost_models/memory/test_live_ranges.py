"""Live ranges of small local programs, against peaks worked out by hand."""

from dataclasses import replace

from meshfold.cost_models.memory.live_ranges import LocalProgram, RegionMemory, simulate_region
from meshfold.cost_models.memory.op_memory import (
    NEW_STORAGE,
    NO_GRADIENT,
    OpProbe,
    ProbedOutput,
    TensorSpec,
    dense_spec,
)
from meshfold.cost_models.memory.recomputation import LocalStep

# Tensors of `size` bytes: uint8 in name only, so that the numbers below are bytes.


def spec(size: int, grad: bool = True) -> TensorSpec:
    return TensorSpec((size,), (1,), "uint8", grad)


def new(size: int, grad: bool = True) -> ProbedOutput:
    return ProbedOutput(spec(size, grad), NEW_STORAGE, size)


def program(slots: list[TensorSpec], steps: list[LocalStep], outputs: list[int]) -> LocalProgram:
    made = [o.spec for s in steps for o in s.probe.outputs]
    return LocalProgram(len(slots), (*slots, *made), tuple(steps), tuple(outputs))


def linear(size: int, weight: int) -> OpProbe:
    """Reads x of `size` and a weight, keeps both, makes as many bytes."""
    return OpProbe(
        outputs=(new(size),),
        saved_operands=(0, 1),
        gradients=(1, 2),
        fresh_gradient_bytes=(size, weight),
    )


def test_what_is_saved_stays_resident_and_the_rest_is_freed_at_its_last_use() -> None:
    # x -> exp (keeps its output) -> neg (keeps nothing) -> mul by the exp (keeps both)
    exp = OpProbe((new(10),), saved_outputs=(0,), gradients=(1,), fresh_gradient_bytes=(10,))
    neg = OpProbe((new(10),), gradients=(1,), fresh_gradient_bytes=(10,))
    mul = OpProbe(
        (new(10),), saved_operands=(0, 1), gradients=(1, 2), fresh_gradient_bytes=(10, 10)
    )
    steps = [LocalStep((0,), (1,), exp), LocalStep((1,), (2,), neg), LocalStep((1, 2), (3,), mul)]
    memory = simulate_region(program([spec(10)], steps, [3]))
    # exp, neg, mul results at once
    assert memory.forward_peak_bytes == 30
    # exp and neg results; the output is counted by whoever composes
    assert memory.saved_bytes == 20 and memory.output_bytes == (10,)
    # mul: kept 20 + incoming 10 + two new gradients
    assert memory.backward_peak_bytes == 50
    assert memory.slot_gradient_bytes == (10,)


def test_without_gradients_nothing_is_saved() -> None:
    step = OpProbe((new(10, grad=False),), gradients=(NO_GRADIENT,))
    steps = [LocalStep((0,), (1,), step), LocalStep((1,), (2,), step), LocalStep((2,), (3,), step)]
    memory = simulate_region(program([spec(10, grad=False)], steps, [3]))
    assert memory == RegionMemory(
        saved_bytes=0,
        saved_slots=frozenset(),
        output_roots=(0,),
        output_bytes=(10,),
        saved_outputs=(False,),
        forward_peak_bytes=20,
        backward_peak_bytes=0,
        reduction_bytes=0,
        slot_gradient_bytes=(0,),
    )


def test_parameters_and_inputs_are_outside_storage() -> None:
    steps = [LocalStep((0, 1), (2,), linear(10, 100))]
    memory = simulate_region(program([spec(10), spec(100)], steps, [2]))
    assert memory.saved_bytes == 0 and memory.saved_slots == {0, 1}
    assert memory.forward_peak_bytes == 10
    # incoming gradient, gradients of x and of the weight
    assert memory.backward_peak_bytes == 120
    assert memory.slot_gradient_bytes == (10, 100)


def test_a_view_lives_on_its_base() -> None:
    view = OpProbe((ProbedOutput(spec(4), 0, 0),), gradients=(1,), fresh_gradient_bytes=(10,))
    keep = OpProbe((new(4),), saved_operands=(0,), gradients=(1,), fresh_gradient_bytes=(4,))
    first = OpProbe((new(10),), gradients=(1,), fresh_gradient_bytes=(10,))
    steps = [LocalStep((0,), (1,), first), LocalStep((1,), (2,), view), LocalStep((2,), (3,), keep)]
    memory = simulate_region(program([spec(10)], steps, [3]))
    # Keeping four bytes of a view keeps the ten below it.
    assert memory.saved_bytes == 10


def test_outputs_that_are_views_of_slots_or_of_each_other_have_no_bytes() -> None:
    view = OpProbe((ProbedOutput(spec(10), 0, 0),), gradients=(0,))
    make = OpProbe((new(10),), gradients=(1,), fresh_gradient_bytes=(10,))
    steps = [LocalStep((0,), (1,), view), LocalStep((0,), (2,), make), LocalStep((2,), (3,), view)]
    memory = simulate_region(program([spec(10)], steps, [1, 2, 3]))
    assert memory.output_roots == (-1, 1, 1)
    assert memory.output_bytes == (0, 10, 0)


ADD = OpProbe((new(10),), gradients=(0, 0))


def test_gradient_of_an_add_is_the_incoming_one() -> None:
    steps = [LocalStep((0, 1), (2,), ADD)]
    memory = simulate_region(program([spec(10), spec(10)], steps, [2]))
    assert memory.backward_peak_bytes == 10
    # Both slots share it.
    assert memory.slot_gradient_bytes == (10, 10)


def test_a_residual_sums_two_gradients_in_place() -> None:
    branch = OpProbe((new(10),), saved_operands=(0,), gradients=(1,), fresh_gradient_bytes=(10,))
    steps = [LocalStep((0,), (1,), branch), LocalStep((0, 1), (2,), ADD)]
    memory = simulate_region(program([spec(10)], steps, [2]))
    # incoming, which the residual path keeps, and the branch's: the sum needs no third buffer
    assert memory.backward_peak_bytes == 20
    assert memory.slot_gradient_bytes == (10,)


def test_gradients_on_shared_storage_are_summed_in_a_third_buffer() -> None:
    # Two adds hand x two gradients, each also held by another slot.
    steps = [
        LocalStep((0, 1), (3,), ADD),
        LocalStep((0, 2), (4,), ADD),
    ]
    memory = simulate_region(program([spec(10)] * 3, steps, [3, 4]))
    assert memory.backward_peak_bytes == 30
    assert memory.slot_gradient_bytes == (10, 10, 10)


def test_bucketed_gradients_are_reduced_when_the_first_reader_is_done() -> None:
    # slots x, v, w; y = exp(x) keeps y; z = y @ v; out = z @ w: v and w are reduced together.
    exp = OpProbe((new(10),), saved_outputs=(0,), gradients=(1,), fresh_gradient_bytes=(10,))
    steps = [
        LocalStep((0,), (3,), exp),
        LocalStep((3, 1), (4,), linear(10, 100)),
        LocalStep((4, 2), (5,), linear(10, 200)),
    ]
    plain = program([spec(10), spec(100), spec(200)], steps, [5])
    memory = simulate_region(replace(plain, grouped=frozenset({1, 2})))
    # Both gradients, that of y, and y, which exp still needs.
    assert memory.reduction_bytes == 100 + 200 + 10 + 10
    assert simulate_region(plain).reduction_bytes == 0


def test_values_saved_for_the_first_reader_are_gone_when_it_is_done() -> None:
    # slots x, z, v; out = (x @ v) * z: both values are saved, and v is reduced last of all.
    mul = OpProbe((new(10),), saved_operands=(0, 1), gradients=(1, 2), fresh_gradient_bytes=(9, 9))
    steps = [LocalStep((0, 2), (3,), linear(10, 100)), LocalStep((3, 1), (4,), mul)]
    plain = program([spec(10), spec(10), spec(100)], steps, [4])
    grouped = replace(plain, grouped=frozenset({2}))
    assert simulate_region(grouped).done_slots == {0, 1, 2}
    # Before it a step saves x, too, whose backward is still to come.
    keep = OpProbe((new(10),), saved_operands=(0,), gradients=(1,), fresh_gradient_bytes=(10,))
    later = replace(
        program(
            [spec(10), spec(10), spec(100)],
            [
                LocalStep((0,), (3,), keep),
                LocalStep((3, 2), (4,), linear(10, 100)),
                LocalStep((4, 1), (5,), mul),
            ],
            [5],
        ),
        grouped=frozenset({2}),
    )
    assert simulate_region(later).done_slots == {1, 2}
    # What recomputation starts from stays until all of its gradients are there.
    assert simulate_region(replace(grouped, recomputes=True)).done_slots == {0, 1, 2}


def test_scratch_counts_at_its_moment_only() -> None:
    first = OpProbe(
        (new(10),),
        saved_bytes=5,
        forward_scratch_bytes=100,
        gradients=(1,),
        fresh_gradient_bytes=(10,),
        backward_scratch_bytes=50,
    )
    second = OpProbe((new(10),), gradients=(1,), fresh_gradient_bytes=(10,))
    steps = [LocalStep((0,), (1,), first), LocalStep((1,), (2,), second)]
    memory = simulate_region(program([spec(10)], steps, [2]))
    assert memory.forward_peak_bytes == 115
    assert memory.saved_bytes == 5
    # kept 5 + incoming 10 + new 10 + scratch 50, the second op's own gradient is gone
    assert memory.backward_peak_bytes == 75


def test_an_output_without_a_reader_gives_no_gradient() -> None:
    two = OpProbe((new(10), new(7, grad=False)), gradients=(2,), fresh_gradient_bytes=(10,))
    steps = [LocalStep((0,), (1, 2), two)]
    memory = simulate_region(program([spec(10)], steps, [1]))
    assert memory.forward_peak_bytes == 17 and memory.output_bytes == (10,)
    assert memory.backward_peak_bytes == 20


def test_dense_specs_have_row_major_strides() -> None:
    made = dense_spec((2, 3, 4), "float32", True)
    assert made.strides == (12, 4, 1) and made.num_bytes == 96
    assert dense_spec((), "int64", False).num_bytes == 8
    assert dense_spec((2, 0, 3), "float32", False).num_bytes == 0


def test_recomputation_keeps_slots_and_rebuilds_the_inside() -> None:
    # x -> exp (keeps its output) -> linear (keeps operands) -> neg (keeps nothing)
    exp = OpProbe((new(10),), saved_outputs=(0,), gradients=(1,), fresh_gradient_bytes=(10,))
    neg = OpProbe((new(10),), gradients=(1,), fresh_gradient_bytes=(10,))
    steps = [
        LocalStep((0,), (2,), exp),
        LocalStep((2, 1), (3,), linear(10, 100)),
        LocalStep((3,), (4,), neg),
    ]
    kept = simulate_region(program([spec(10), spec(100)], steps, [4]))
    again = replace(program([spec(10), spec(100)], steps, [4]), recomputes=True)
    memory = simulate_region(again)
    assert (kept.saved_bytes, kept.saved_slots) == (10, {1})
    assert (memory.saved_bytes, memory.saved_slots) == (0, {0, 1})
    # Without the kept exp result, but for two values at a time.
    assert (kept.forward_peak_bytes, memory.forward_peak_bytes) == (30, 20)
    # neg's gradient is there when exp runs again; the linear does not run. Then as without.
    assert memory.backward_peak_bytes == kept.backward_peak_bytes == 10 + 10 + 110
    assert memory.slot_gradient_bytes == kept.slot_gradient_bytes


def test_the_second_forward_can_be_the_worst_moment() -> None:
    wide = OpProbe((new(1000),), gradients=(1,), fresh_gradient_bytes=(10,))
    narrow = OpProbe((new(10),), gradients=(1,), fresh_gradient_bytes=(1000,))
    keep = OpProbe((new(10),), saved_outputs=(0,), gradients=(1,), fresh_gradient_bytes=(10,))
    steps = [
        LocalStep((0,), (1,), wide),
        LocalStep((1,), (2,), narrow),
        LocalStep((2,), (3,), keep),
    ]
    again = replace(program([spec(10)], steps, [3]), recomputes=True)
    memory = simulate_region(again)
    # The incoming gradient, wide, and narrow's result; later the gradient of wide's result.
    assert memory.backward_peak_bytes == 10 + 1000 + 10
    assert memory.forward_peak_bytes == 1000 + 10


def test_what_keeps_nothing_does_not_hold_its_slots() -> None:
    neg = OpProbe((new(10),), gradients=(1,), fresh_gradient_bytes=(10,))
    plain = program([spec(10)], [LocalStep((0,), (1,), neg)], [1])
    assert simulate_region(replace(plain, recomputes=True)) == simulate_region(plain)
