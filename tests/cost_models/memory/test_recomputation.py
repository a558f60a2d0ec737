"""What stays resident, what is recomputed, and the memory that follows, by hand."""

from dataclasses import replace

from meshfold.cost_models.memory.live_ranges import LocalProgram, simulate_region
from meshfold.cost_models.memory.op_memory import NEW_STORAGE, OpProbe, ProbedOutput, TensorSpec
from meshfold.cost_models.memory.recomputation import LocalStep, plan_recompute


def spec(size: int) -> TensorSpec:
    """A tensor of `size` bytes."""
    return TensorSpec((size,), (1,), "uint8", True)


def new(size: int) -> ProbedOutput:
    return ProbedOutput(spec(size), NEW_STORAGE, size)


def product(size: int, made: int, weight: int) -> OpProbe:
    return OpProbe(
        (new(made),), saved_operands=(0, 1), gradients=(1, 2), fresh_gradient_bytes=(size, weight)
    )


def pointwise(size: int) -> OpProbe:
    return OpProbe((new(size),), saved_operands=(0,), gradients=(1,), fresh_gradient_bytes=(size,))


NORM = OpProbe(
    (new(10),), saved_operands=(0,), saved_bytes=1, gradients=(1,), fresh_gradient_bytes=(10,)
)
ADD = OpProbe((new(10),), gradients=(0, 0))

# x -> norm -> up -> gelu -> down -> + x, as in a transformer's MLP.
X, UP, DOWN, NORMED, WIDE, ACTIVE, NARROW, OUT = range(8)
STEPS = (
    LocalStep((X,), (NORMED,), NORM),
    LocalStep((NORMED, UP), (WIDE,), product(10, 40, 7)),
    LocalStep((WIDE,), (ACTIVE,), pointwise(40)),
    LocalStep((ACTIVE, DOWN), (NARROW,), product(40, 10, 7)),
    LocalStep((NARROW, X), (OUT,), ADD),
)
SIZES = (10, 7, 7, 10, 40, 40, 10, 10)


PRODUCTS = frozenset((1, 3))


def program(recomputes: bool, kept: frozenset[int] | None = None) -> LocalProgram:
    specs = tuple(map(spec, SIZES))
    return LocalProgram(3, specs, STEPS, (OUT,), recomputes=recomputes, kept=kept)


def test_only_what_a_backward_misses_is_resident_and_recomputed() -> None:
    recompute = plan_recompute(STEPS, 3, PRODUCTS)
    # The down product is added and read by nobody: not held. Norm and gelu feed products.
    assert recompute.saved == {X, UP, DOWN, WIDE}
    assert recompute.steps == {0, 2}
    # The norm's result until `up` has noted it, the wide value until gelu has read it.
    assert recompute.released == ((), (NORMED,), (WIDE,), (ACTIVE,), (), ())
    # The norm keeps statistics, both products what it or gelu makes; gelu what is there.
    assert recompute.waiting == {0, 1, 3}


def test_full_recomputation_repeats_a_prefix_and_holds_the_slots() -> None:
    recompute = plan_recompute(STEPS, 3)
    # `down` keeps operands only: they are noted, it does not run.
    assert recompute.saved == {X, UP, DOWN} and recompute.steps == {0, 1, 2}
    assert recompute.released == ((), (NORMED,), (WIDE,), (), (), (ACTIVE,))


def test_memory_lies_between_keeping_all_and_keeping_nothing() -> None:
    none = simulate_region(program(recomputes=False))
    selective = simulate_region(program(recomputes=True, kept=PRODUCTS))
    full = simulate_region(program(recomputes=True))
    # All: statistics, normed, wide, active. Selective: wide.
    assert (none.saved_bytes, selective.saved_bytes, full.saved_bytes) == (91, 40, 0)
    # Both ends of `down`, what is held before it.
    assert selective.forward_peak_bytes == 40 + 40 + 10
    assert full.forward_peak_bytes == 40 + 40
    # The gradient that comes in, everything there again, gradients of `active` and a weight.
    peaks = [m.backward_peak_bytes for m in (none, selective, full)]
    assert peaks == [91 + 10 + 40 + 7] * 3
    assert selective.saved_slots == full.saved_slots == {X, UP, DOWN}
    assert none.slot_gradient_bytes == selective.slot_gradient_bytes == (10, 7, 7)


def test_what_an_op_without_recomputation_saves_stays_resident() -> None:
    # Attention keeps what it made and statistics; a mask makes another value of it, then a product.
    attention = OpProbe(
        (new(10),),
        saved_operands=(0,),
        saved_outputs=(0,),
        saved_bytes=3,
        gradients=(1,),
        fresh_gradient_bytes=(10,),
    )
    steps = (
        LocalStep((0,), (2,), attention),
        LocalStep((2,), (3,), pointwise(10)),
        LocalStep((3, 1), (4,), product(10, 10, 7)),
    )
    kept, specs = frozenset((0, 2)), tuple(map(spec, (10, 7, 10, 10, 10)))
    local = LocalProgram(2, specs, steps, (4,), recomputes=True, kept=kept)
    recompute = plan_recompute(steps, 2, kept)
    assert (recompute.saved, recompute.steps) == ({0, 1, 2}, {1})
    assert simulate_region(local).saved_bytes == 10 + 3


def test_a_view_of_what_is_resident_costs_nothing() -> None:
    view = OpProbe((ProbedOutput(spec(10), 0, 0),), gradients=(0,))
    steps = (
        LocalStep((0, 1), (2,), product(10, 10, 7)),
        LocalStep((2,), (3,), view),
        LocalStep((3, 1), (4,), product(10, 10, 7)),
    )
    kept, specs = frozenset((0, 2)), tuple(map(spec, (10, 7, 10, 10, 10)))
    local = LocalProgram(2, specs, steps, (4,), recomputes=True, kept=kept)
    memory = simulate_region(local)
    assert plan_recompute(steps, 2, kept).steps == {1}
    assert memory.saved_bytes == 10
    plain = replace(local, recomputes=False)
    assert memory.backward_peak_bytes == simulate_region(plain).backward_peak_bytes
