"""What selective recomputation keeps: the cut against every choice there is."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold.cost_models.memory.live_ranges import LocalProgram, simulate_region
from meshfold.cost_models.memory.op_memory import NEW_STORAGE, OpProbe, ProbedOutput, TensorSpec
from meshfold.cost_models.memory.recomputation import LocalStep
from meshfold.ir.strategy import SELECTIVE
from meshfold.passes.memory.kept_results import Cut, cheapest_kept


def spec(size: int) -> TensorSpec:
    """A tensor of `size` bytes."""
    return TensorSpec((size,), (1,), "uint8", True)


def program(*steps: tuple[tuple[int, ...], OpProbe]) -> LocalProgram:
    """Steps in a row on one slot of 10 bytes, each with one result."""
    specs = (spec(10), *(probe.outputs[0].spec for _, probe in steps))
    local = tuple(LocalStep(reads, (1 + k,), probe) for k, (reads, probe) in enumerate(steps))
    return LocalProgram(1, specs, local, (len(steps),))


def made(size: int, *saved: int, own: bool = False, inside: int = 0, view: int = -1) -> OpProbe:
    """An op with a result of `size` bytes, or a view of an operand. saved: operands that autograd
    keeps; own: whether it keeps the result; inside: bytes that it keeps beside."""
    output = ProbedOutput(spec(size), view, 0 if view != NEW_STORAGE else size)
    return OpProbe((output,), saved, (0,) if own else (), inside, gradients=(0,))


def test_the_dearest_for_its_bytes_is_kept() -> None:
    # Norm and gelu are cheap, the product is dear; its result feeds gelu, whose feeds the next.
    local = program(
        ((0,), made(10, 0, inside=1)),
        ((1,), made(40, 0)),
        ((2,), made(40, 0)),
        ((3,), made(10, 0)),
    )
    assert cheapest_kept(local, [1.0, 20.0, 2.0, 20.0])["selective"] == {1}


def test_what_is_made_of_kept_results_alone_needs_nothing_else() -> None:
    # Widened tenfold for nothing: kept before it is wide.
    local = program(((0,), made(1, 0)), ((1,), made(100, 0)), ((2,), made(100, 0)))
    assert cheapest_kept(local, [5.0, 0.1, 5.0])["selective"] == {0}


def test_where_no_choice_beats_the_mix_everything_is_kept() -> None:
    # The last result leaves the region: it is there in any case.
    local = program(((0,), made(10, own=True)), ((0,), made(10, own=True)), ((1, 2), made(10)))
    kept = cheapest_kept(local, [1.0, 1.0, 1.0])
    assert kept == dict.fromkeys(SELECTIVE, {0, 1})


def test_a_view_is_kept_with_what_it_views() -> None:
    local = program(
        ((0,), made(10, 0)), ((1,), made(10, view=0)), ((2,), made(40, 0)), ((3,), made(10, 0))
    )
    kept = cheapest_kept(local, [9.0, 0.0, 1.0, 9.0])["selective"]
    assert kept == {0}
    selective = LocalProgram(1, local.specs, local.steps, local.outputs, recomputes=True, kept=kept)
    assert simulate_region(selective).saved_bytes == 10


@st.composite
def programs(draw: st.DrawFn) -> tuple[LocalProgram, list[float]]:
    steps = []
    for k in range(draw(st.integers(2, 6))):
        reads = tuple(draw(st.lists(st.integers(0, k), min_size=1, max_size=2, unique=True)))
        saved = [j for j in range(len(reads)) if draw(st.booleans())]
        if draw(st.integers(0, 4)) == 0:
            steps.append((reads, made(10, view=0)))
            continue
        own, inside = draw(st.booleans()), draw(st.sampled_from((0, 0, 3)))
        steps.append((reads, made(draw(st.integers(1, 50)), *saved, own=own, inside=inside)))
    return program(*steps), [float(draw(st.integers(0, 20))) for _ in steps]


def all_choices(cut: Cut) -> list[frozenset[int]]:
    """Every set of steps that may be kept."""
    steps = sorted(cut.steps)
    return [frozenset(c) for n in range(len(steps) + 1) for c in combinations(steps, n)]


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from((0.01, 0.2, 1.0, 7.0)))
def test_no_choice_costs_less(case: tuple[LocalProgram, list[float]], price_s: float) -> None:
    local, seconds = case
    cut = Cut(local, seconds)

    def total_s(kept: frozenset[int]) -> float:
        spent_s, num_bytes = cut.cost(cut.needed(kept))
        return spent_s + price_s * num_bytes

    choices = all_choices(cut)
    assert total_s(cut.kept(price_s)) <= min(map(total_s, choices)) + 1e-9


@settings(max_examples=60, deadline=None)
@given(programs())
def test_points_lie_furthest_below_the_mixes_beside_them(
    case: tuple[LocalProgram, list[float]],
) -> None:
    local, seconds = case
    cut = Cut(local, seconds)
    points = cheapest_kept(local, seconds)
    costs = [cut.cost(cut.needed(kept)) for kept in all_choices(cut)]
    everything = cut.needed(cut.steps)
    none, nothing = (0.0, cut.cost(everything)[1]), cut.cost(frozenset())
    middle = cut.cost(points["selective"])
    ends = {"selective": (none, nothing)}
    if points["selective"] != everything:
        ends |= {"light": (none, middle), "heavy": (middle, nothing)}
    for recompute, ((least_s, most_bytes), (most_s, least_bytes)) in ends.items():
        if most_bytes <= least_bytes:
            continue
        price_s = (most_s - least_s) / (most_bytes - least_bytes)
        of_mix_s = least_s + price_s * most_bytes
        least = min(spent_s + price_s * num_bytes for spent_s, num_bytes in costs)
        if least < of_mix_s - 1e-6 * (1 + of_mix_s):
            found_s, found_bytes = cut.cost(points[recompute])
            assert found_s + price_s * found_bytes <= least + 1e-6 * (1 + abs(least))
        else:
            same = everything if recompute == "selective" else points["selective"]
            assert points[recompute] == same or of_mix_s - least <= 1e-6 * (1 + of_mix_s)
