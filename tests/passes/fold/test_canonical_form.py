"""Canonical forms: equal for what one region can stand for, different for anything else."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from support.graphs.fold import GraphBuilder

from meshfold.ir.op_graph import OpGraph, Ref, SlotKind, Value
from meshfold.passes.fold.canonical_form import Segment, canonical_segment, flat_index

Draw = Callable[[st.SearchStrategy], object]


def segment(graph: OpGraph, start: int = 0, persistent: frozenset[str] = frozenset()) -> Segment:
    return canonical_segment(flat_index(graph, persistent), start, len(graph.ops))


def binary(first: str, second: str, target: str = "aten.sub.Tensor", **slot: object) -> Segment:
    """One op on two slots, or on one slot twice."""
    b = GraphBuilder()
    slots = {name: b.slot(name, **slot) for name in dict.fromkeys(("a", "b"))}
    return segment(b.graph([b.op(target, Ref(slots[first]), Ref(slots[second]))]))


def test_names_and_order_of_slots_do_not_count() -> None:
    assert binary("a", "b").form == binary("b", "a").form
    assert binary("a", "b").slots != binary("b", "a").slots


def test_a_tie_counts() -> None:
    assert binary("a", "a").form != binary("a", "b").form


def two_subs(swap: bool) -> Segment:
    b = GraphBuilder()
    x = b.slot("x")
    y = b.op("aten.exp.default", Ref(x))
    args = (Ref(y), Ref(x)) if swap else (Ref(x), Ref(y))
    return segment(b.graph([b.op("aten.sub.Tensor", *args)]))


def test_swapped_operands_count() -> None:
    assert two_subs(swap=False).form != two_subs(swap=True).form


def constant(value: object) -> Segment:
    b = GraphBuilder()
    return segment(b.graph([b.op("aten.mul.Scalar", Ref(b.slot("x")), value)]))


def test_floats_are_bindings_and_anything_else_is_form() -> None:
    assert constant(0.1).form == constant(0.2).form
    assert (constant(0.1).floats, constant(0.2).floats) == ((0.1,), (0.2,))
    forms = [constant(v).form for v in (1, 2, 1.0, True, False, None, "1", (1,), ((1,),))]
    assert len(set(forms)) == len(forms)


def test_facts_of_slots_count() -> None:
    forms = [
        binary("a", "b").form,
        binary("a", "b", shape=(2, 8)).form,
        binary("a", "b", requires_grad=True).form,
        binary("a", "b", kind=SlotKind.PARAMETER).form,
        binary("a", "b", kind=SlotKind.BUFFER).form,
        binary("a", "b", target="aten.add.Tensor").form,
    ]
    assert len(set(forms)) == len(forms)


def test_facts_of_results_count() -> None:
    def made(shape: tuple[int, ...]) -> Segment:
        b = GraphBuilder()
        return segment(b.graph([b.op("aten.exp.default", Ref(b.slot("x")), shape=shape)]))

    assert made((4, 4)).form != made((2, 8)).form


def test_persistence_of_a_buffer_and_identity_of_a_constant_count() -> None:
    b = GraphBuilder()
    graph = b.graph([b.op("aten.exp.default", Ref(b.slot("table", SlotKind.BUFFER)))])
    assert segment(graph).form != segment(graph, persistent=frozenset({"table"})).form

    def read(name: str) -> Segment:
        b = GraphBuilder()
        return segment(b.graph([b.op("aten.exp.default", Ref(b.slot(name, SlotKind.CONSTANT)))]))

    assert read("constant_1").form != read("constant_2").form


def test_what_lives_on_outside_counts() -> None:
    b = GraphBuilder()
    x = b.op("aten.exp.default", Ref(b.slot("x")))
    y = b.op("aten.sin.default", Ref(x))
    assert segment(b.graph([y])).form != segment(b.graph([x, y])).form
    b.op("aten.cos.default", Ref(x))
    outer = canonical_segment(flat_index(b.graph([y]), frozenset()), 0, 2)
    assert outer.outputs == (x, y)


def test_a_buffer_update_counts_and_binds_its_slot() -> None:
    b = GraphBuilder()
    state, other = b.slot("state", SlotKind.BUFFER), b.slot("other", SlotKind.BUFFER)
    x = b.op("aten.exp.default", Ref(state))
    without = segment(b.graph([x]))
    b.mutations.append((state, x))
    own = segment(b.graph([x]))
    b.mutations[:] = [(other, x)]
    foreign = segment(b.graph([x]))
    assert len({without.form, own.form, foreign.form}) == 3
    assert own.slots == (state,)
    assert foreign.slots == (state, other)


TARGETS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor")


@st.composite
def programs(draw: Draw) -> tuple[int, list[tuple[str, int, int]]]:
    """A number of slots, and binary ops over slots and earlier results."""
    num_slots = draw(st.integers(1, 4))
    ops = []
    for k in range(draw(st.integers(1, 8))):
        operand = st.integers(0, num_slots + k - 1)
        ops.append((draw(st.sampled_from(TARGETS)), draw(operand), draw(operand)))
    return num_slots, ops


def build(num_slots: int, ops: list[tuple[str, int, int]], order: list[int]) -> OpGraph:
    """The program with its slots made in another order."""
    b = GraphBuilder()
    made = {old: b.slot(f"slot{old}") for old in order}
    for k, (target, left, right) in enumerate(ops):
        made[num_slots + k] = b.op(target, Ref(made[left]), Ref(made[right]))
    return b.graph([made[num_slots + len(ops) - 1]])


@given(programs(), st.data())
def test_renumbering_values_changes_nothing(
    program: tuple[int, list[tuple[str, int, int]]], data: st.DataObject
) -> None:
    num_slots, ops = program
    order = data.draw(st.permutations(range(num_slots)))
    plain = segment(build(num_slots, ops, list(range(num_slots))))
    other = segment(build(num_slots, ops, order))
    assert plain.form == other.form
    assert [order[s] for s in other.slots] == list(plain.slots)


def meaning(program: tuple[int, list[tuple[str, int, int]]]) -> object:
    """The program as trees over slots in order of first use: what the form must decide."""
    num_slots, ops = program
    first_use: dict[int, int] = {}
    rows = []
    for target, *operands in ops:
        for v in operands:
            if v < num_slots:
                first_use.setdefault(v, len(first_use))
        rows.append(
            (target, [("s", first_use[v]) if v < num_slots else v - num_slots for v in operands])
        )
    return rows


@given(programs(), programs())
def test_equal_forms_are_equal_programs(
    left: tuple[int, list[tuple[str, int, int]]], right: tuple[int, list[tuple[str, int, int]]]
) -> None:
    graphs = [build(n, ops, list(range(n))) for n, ops in (left, right)]
    same_form = segment(graphs[0]).form == segment(graphs[1]).form
    assert same_form == (meaning(left) == meaning(right))


@given(programs(), st.data())
def test_swapping_operands_is_seen(
    program: tuple[int, list[tuple[str, int, int]]], data: st.DataObject
) -> None:
    num_slots, ops = program
    k = data.draw(st.integers(0, len(ops) - 1))
    target, left, right = ops[k]
    swapped = [*ops[:k], (target, right, left), *ops[k + 1 :]]
    order = list(range(num_slots))
    plain, other = segment(build(num_slots, ops, order)), segment(build(num_slots, swapped, order))
    same = meaning((num_slots, ops)) == meaning((num_slots, swapped))
    assert (plain.form == other.form) == same


def test_the_value_table_is_not_read_beyond_the_segment() -> None:
    b = GraphBuilder()
    x = b.slot("x")
    y = b.op("aten.exp.default", Ref(x))
    short = canonical_segment(flat_index(b.graph([y]), frozenset()), 0, 1)
    b.op("aten.sin.default", Ref(x))
    b.values[-1] = Value((9,), "int64")
    assert canonical_segment(flat_index(b.graph([y]), frozenset()), 0, 1).form == short.form
