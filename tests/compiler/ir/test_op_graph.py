"""The op graph's derived facts."""

from hypothesis import given
from hypothesis import strategies as st
from support.graphs.op_graphs import folded_stack

from meshfold.ir.op_graph import (
    FoldedGraph,
    Instance,
    Op,
    OpGraph,
    Ref,
    Region,
    Slot,
    SlotKind,
    Source,
    SourceKind,
    Symbol,
    Value,
)


def graph() -> OpGraph:
    v = Value((2, 4), "float32", True)
    return OpGraph(
        slots=(Slot(SlotKind.VALUE, "x"), Slot(SlotKind.PARAMETER, "weight")),
        values=(v, Value((4, 4), "float32", True), v, v),
        ops=(
            Op("aten.linear.default", (Ref(0), Ref(1)), (), (2,), "fc", "model.py:3"),
            Op("aten.add.Tensor", (Ref(2), Ref(2)), (("alpha", 1),), (3,)),
        ),
        outputs=(3,),
    )


def test_operands_keep_order_and_repeats_and_look_into_tuples() -> None:
    g = graph()
    assert g.ops[0].operands == (0, 1)
    assert g.ops[1].operands == (2, 2)
    nested = Op("aten.cat.default", ((Ref(1), Ref(0)), 0), (("dtype", Symbol("dtype", "f")),), (2,))
    assert nested.operands == (1, 0)


def test_users_and_producers() -> None:
    g = graph()
    assert g.users == ((0,), (0,), (1,), ())
    assert g.producers == (-1, -1, 0, 1)


def test_where_an_op_came_from_is_not_part_of_what_it_is() -> None:
    a, b = graph().ops[0], Op("aten.linear.default", (Ref(0), Ref(1)), (), (2,))
    assert a == b and hash(a) == hash(b)


def test_runs_are_maximal() -> None:
    source = Source(SourceKind.INPUT, "x")
    folded = FoldedGraph(
        regions=(Region("A", graph()), Region("B", graph())),
        instances=tuple(Instance(r, f"l{k}", (source,)) for k, r in enumerate([0, 1, 1, 1, 0])),
        parameters=(),
        buffers=(),
        inputs=(),
        outputs=(),
    )
    assert folded.runs == ((0, 0, 1), (1, 1, 3), (0, 4, 1))
    assert folded.num_ops == 10


def test_complex_values_have_bytes_and_gradients() -> None:
    value = Value((3, 2), "complex64")
    assert (value.num_bytes, value.is_float) == (48, True)


def test_tied_parameters_are_slots_that_share_one():
    assert folded_stack(num_layers=3).tied_slots == ()
    assert folded_stack(num_layers=3, tied=True).tied_slots == (((0, 1), (2, 1)),)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from("abcde"), max_size=3))))
def test_slots_are_tied_along_chains_of_shared_parameters(reads: list[tuple[int, list[str]]]):
    instances = tuple(
        Instance(region, "", tuple(Source(SourceKind.PARAMETER, name) for name in names))
        for region, names in reads
    )
    pairs = [((r, i), name) for r, names in reads for i, name in enumerate(names)]
    group = {slot: {slot} for slot, _ in pairs}
    for _ in pairs:  # as long as a chain can be
        for one, name in pairs:
            for other, same in pairs:
                if name == same:
                    group[one] = group[one] | group[other]
    order = list(dict.fromkeys(slot for slot, _ in pairs))
    wanted = dict.fromkeys(tuple(s for s in order if s in group[slot]) for slot in order)
    folded = FoldedGraph((), instances, (), (), (), ())
    assert folded.tied_slots == tuple(g for g in wanted if len(g) > 1)


def test_an_op_on_other_values_reads_and_makes_those() -> None:
    op = Op("aten.cat.default", ((Ref(3), Ref(1)), 0), (("out", Ref(1)),), (4, 5))
    other = op.on_values([7, 8, 9], [2, 6])
    assert other == Op("aten.cat.default", ((Ref(7), Ref(8)), 0), (("out", Ref(9)),), (2, 6))
    assert op.renumbered({1: 0, 3: 1, 4: 2, 5: 3}).operands == (1, 0, 0)


def test_the_floats_of_a_region_are_those_of_its_first_instance() -> None:
    folded = folded_stack(3)
    found = dict[int, tuple[float, ...]]()
    for instance in folded.instances:
        found.setdefault(instance.region, instance.floats)
    assert folded.first_floats == found
