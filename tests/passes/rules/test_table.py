"""The gate of the rule table: every (op, rule) runs on simulated ranks in float64 and is held
against the whole op, every result and every gradient."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.ops import SingleOp, check_typings, mesh_of
from support.graphs.rules import faults_of, is_legal_typing
from support.graphs.samples import (
    ATTENTION,
    BAGS,
    COMPLEX,
    CONTRACTION,
    EXPERTS,
    FUSED,
    INDEX,
    LOSS,
    NORMALIZATION,
    RANDOM,
    REDUCTION,
    RING,
    SAMPLES,
    SHAPE,
    SPATIAL,
    WINDOWS,
    Sample,
)
from support.graphs.tensors import flags, real, whole

from meshfold.ir.op_graph import Dependence, Hole, Op, OpGraph, Ref, Slot, SlotKind, Value
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Shard, SpmdType, is_legal
from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.ops.shape import view_labels
from meshfold.passes.rules.ops.shards import Divisions, grown_shardings
from meshfold.passes.rules.table import (
    OP_RULES,
    op_labels,
    region_rules,
    rule_inside,
    typing_of,
)


def name_of(sample: Sample) -> str:
    return sample[0]


def test_every_row_of_the_table_has_a_sample() -> None:
    assert {make().target for _, make in SAMPLES} == set(OP_RULES)


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_every_rule_computes_what_the_unsharded_op_computes(sample: Sample) -> None:
    op = sample[1]()
    check_typings(op, mesh_of(2), op.typings(2))


def test_a_sum_of_flags_in_flags_has_no_pending_sum() -> None:
    numbers, truth = (
        SingleOp("aten.sum.dim_IntList", flags(4, 8), [1], dtype=dtype)
        for dtype in (torch.int64, torch.bool)
    )
    assert any(PARTIAL in r.outputs for r in numbers.axis_rules(2))
    assert not any(PARTIAL in r.outputs for r in truth.axis_rules(2))


NOT_ELEMENTWISE = [
    *(*CONTRACTION, *REDUCTION, *NORMALIZATION, *SPATIAL, *ATTENTION),
    *(*EXPERTS, *INDEX, *LOSS, *SHAPE, *RANDOM, *RING, *COMPLEX, *WINDOWS, *BAGS, *FUSED),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sample", NOT_ELEMENTWISE, ids=name_of)
@pytest.mark.parametrize("size", [3, 4])
def test_on_more_ranks(sample: Sample, size: int) -> None:
    op = sample[1]()
    check_typings(op, mesh_of(size), op.typings(size))


TWO_AXES = [
    *(s for s in CONTRACTION if s[0] in ("linear.default", "addmm.default", "matmul.default")),
    *(s for s in REDUCTION if s[0] in ("mean.dim", "sum.dim_IntList", "layer_norm.default")),
    *(s for s in INDEX if s[0] in ("embedding.default", "index_add.default")),
    *(s for s in SHAPE if s[0] in ("view.default", "split.Tensor", "squeeze.dim")),
    *(s for s in CONTRACTION if s[0].startswith("conv2d")),
    *NORMALIZATION,
    *ATTENTION,
    *EXPERTS[1:3],
    *BAGS[4:8],
    *FUSED,
    *LOSS,
    *RANDOM,
]


@pytest.mark.parametrize("sample", TWO_AXES, ids=name_of)
def test_pairs_of_rules_on_two_axes(sample: Sample) -> None:
    op = sample[1]()
    typings = op.typings(2, 2)
    check_typings(op, mesh_of(2, 2), typings[:: max(1, len(typings) // 24)])


@pytest.mark.parametrize("sample", TWO_AXES, ids=name_of)
def test_a_rule_that_goes_on_inside_its_shards(sample: Sample) -> None:
    op = sample[1]()
    joint = []
    for rule in op.axis_rules(2):
        inside = rule_inside(op.graph, 0, rule, 2, 2)
        if inside is not None:
            assert rule.splits_work == inside.splits_work
            joint.append(typing_of(op.graph, 0, (rule, inside)))
    legal = [typing for typing in joint if is_legal_typing(op.graph, 0, typing, (2, 2))]
    check_typings(op, mesh_of(2, 2), legal[:: max(1, len(legal) // 12)])


def test_what_does_not_divide_twice_has_no_rule_inside() -> None:
    op = SingleOp("aten.linear.default", real(6, 12), real(24, 12))
    (rows,) = (rule for rule in op.axis_rules(2) if rule.name == "d0")
    assert rule_inside(op.graph, 0, rows, 2, 2) is None
    (inside,) = (rule_inside(op.graph, 0, rows, 2, 3),)
    assert inside is not None
    assert (inside.name, inside.inputs) == ("d0/2", (Shard(0, 2), REPLICATE))


def test_rules_have_a_name_and_an_emitter_and_the_first_is_invariant() -> None:
    faults = {
        f"{name} {k}": faults_of(make().axis_rules(2)) for k, (name, make) in enumerate(SAMPLES)
    }
    assert {name: found for name, found in faults.items() if found} == {}


def test_a_faulty_row_is_named() -> None:
    first, *others = SingleOp("aten.linear.default", real(36, 12), real(24, 12)).axis_rules(2)
    strange = dataclasses.replace(others[0], local="nowhere", splits_work=not others[0].splits_work)
    assert faults_of([first, *others]) == []
    assert faults_of([strange, strange]) == [
        f"{strange.name} stands twice",
        "the first rule is not invariant",
        *[f"{strange.name} has no emitter", f"{strange.name} splits work: {strange.splits_work}"]
        * 2,
    ]


def linear() -> SingleOp:
    return SingleOp("aten.linear.default", real(4, 12, 24), real(36, 24), real(36))


def changed(
    typing: OpTyping, inputs: dict[int, SpmdType] | None = None, output: SpmdType | None = None
) -> OpTyping:
    """A typing on one axis with some types exchanged."""
    new = tuple((inputs or {}).get(k, y[0]) for k, y in enumerate(typing.inputs))
    out = typing.outputs if output is None else ((output,),)
    return dataclasses.replace(typing, inputs=tuple((t,) for t in new), outputs=out)


def softmax() -> SingleOp:
    return SingleOp("aten.softmax.int", real(4, 12), -1)


def plus_one() -> SingleOp:
    return SingleOp("aten.add.Tensor", real(4, 12), 1.0)


def square() -> SingleOp:
    return SingleOp("aten.mul.Tensor", real(4, 12), real(4, 12))


def lookup() -> SingleOp:
    return SingleOp("aten.embedding.default", real(24, 12), whole(24, 4, 12), 5)


def loss() -> SingleOp:
    return SingleOp("aten.cross_entropy_loss.default", real(24, 36), whole(36, 24))


def norm() -> SingleOp:
    return SingleOp(
        "aten._native_batch_norm_legit_functional.default",
        *(real(24, 12, 2), real(12), real(12)),
        *(real(12, grad=False), real(12, grad=False), True, 0.1, 1e-5),
    )


def experts() -> SingleOp:
    weights = real(12, 24, 12), whole(12, 24), real(12, 24)
    return SingleOp("meshfold.expert_linear.default", real(24, 12), *weights)


WRONG: list[tuple[Callable[[], SingleOp], str, dict[int, SpmdType], SpmdType | None]] = [
    (linear, "k", {}, INVARIANT),
    (linear, "k", {}, REPLICATE),
    (linear, "k", {2: REPLICATE}, None),
    (linear, "k", {2: INVARIANT}, None),
    (linear, "o", {0: INVARIANT}, None),
    (linear, "o", {0: PARTIAL}, None),
    (linear, "d0", {1: INVARIANT}, None),
    (linear, "I", {1: REPLICATE}, None),
    (linear, "R", {}, INVARIANT),
    (linear, "R", {0: INVARIANT}, None),
    (linear, "R", {0: PARTIAL}, PARTIAL),
    (softmax, "d0", {0: Shard(1)}, Shard(1)),
    (softmax, "R", {0: PARTIAL}, PARTIAL),
    (plus_one, "R", {0: PARTIAL}, PARTIAL),
    (square, "R", {0: PARTIAL, 1: PARTIAL}, PARTIAL),
    (square, "P0", {0: PARTIAL}, INVARIANT),
    (lookup, "d1", {0: INVARIANT}, None),
    (lookup, "v", {}, INVARIANT),
    (experts, "e", {}, INVARIANT),
    (experts, "e", {0: INVARIANT}, None),
    (experts, "k", {3: REPLICATE}, None),
    (experts, "d0", {1: INVARIANT}, None),
    (loss, "v", {}, REPLICATE),
    (loss, "v", {}, PARTIAL),
    (loss, "d0", {}, INVARIANT),
    (norm, "d0", {1: INVARIANT}, None),
    (norm, "d0", {2: INVARIANT}, None),
    (norm, "R", {0: INVARIANT}, None),
    (norm, "I", {1: REPLICATE}, None),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda c: f"{c[0].__name__}-{c[1]}")
def test_the_gate_notices_a_wrong_rule(
    case: tuple[Callable[[], SingleOp], str, dict[int, SpmdType], SpmdType | None],
) -> None:
    make, name, inputs, output = case
    op, mesh = make(), mesh_of(2)
    (right,) = [t for t in op.typings(2) if t.rules == (name,)]
    check_typings(op, mesh, [right])
    with pytest.raises(AssertionError):
        check_typings(op, mesh, [changed(right, inputs, output)])


REFUSED = {
    "running statistics that change unseen": lambda: SingleOp(
        "aten.instance_norm.default",
        *(real(12, 12, 4), None, None, real(12, grad=False), real(12, grad=False)),
        *(True, 0.1, 1e-5, False),
    ),
    "gradients scaled by frequency": lambda: SingleOp(
        "aten.embedding.default", real(24, 12), whole(24, 12), -1, True
    ),
    "a sparse gradient": lambda: SingleOp(
        "aten.embedding.default", real(24, 12), whole(24, 12), -1, False, True
    ),
    "a mask as index": lambda: SingleOp("aten.index.Tensor", real(4, 12), [flags(4)]),
    "an op without a row": lambda: SingleOp("aten.kron.default", real(4, 4), real(4, 4)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_no_rule_handles_are_refused(what: str) -> None:
    assert [r.name for r in REFUSED[what]().axis_rules(2)] == ["I"]


def test_an_unknown_argument_is_refused() -> None:
    values = (Value((4,), "float64"), Value((4,), "float64"))
    op = Op("aten.relu.default", (Ref(0),), (("inplace", True),), (1,))
    graph = OpGraph((Slot(SlotKind.VALUE),), values, (op,), (1,))
    assert op_labels(graph, op) is None


def test_a_float_bound_per_instance_is_not_taken_for_zero() -> None:
    values = (Value((4,), "float64", True), Value((4,), "bool"), Value((4,), "float64", True))
    op = Op("aten.masked_fill.Scalar", (Ref(0), Ref(1), Hole(0)), (), (2,))
    graph = OpGraph((Slot(SlotKind.VALUE), Slot(SlotKind.VALUE)), values, (op,), (2,))
    assert [r.name for r in region_rules(graph, (2,))[0][0]] == ["I", "R", "d0"]


def test_a_repeated_operand_is_not_partial_on_one_side() -> None:
    values = (Value((4,), "float64", True), Value((4,), "float64", True))
    op = Op("aten.mul.Tensor", (Ref(0), Ref(0)), (), (1,))
    graph = OpGraph((Slot(SlotKind.VALUE),), values, (op,), (1,))
    assert [r.name for r in region_rules(graph, (2,))[0][0]] == ["I", "R", "d0"]


def test_constants_have_shards_and_no_pending_sums() -> None:
    values = tuple(Value((4,), "float64", False, Dependence.CONSTANT) for _ in range(2))
    op = Op("aten.neg.default", (Ref(0),), (), (1,))
    graph = OpGraph((Slot(SlotKind.CONSTANT),), values, (op,), (1,))
    names = [[r.name for r in axis] for axis in region_rules(graph, (2, 1))[0]]
    assert names == [["I", "d0"], ["I"]]


def test_a_single_rank_runs_invariant() -> None:
    sample = SingleOp("aten.neg.default", real(4))
    assert [r.name for r in region_rules(sample.graph, (1,))[0][0]] == ["I"]


def fused_qkv() -> OpGraph:
    """x [4, 8, 32] -> flattened -> one product for q, k and v -> heads of q [4, 8, 8, 4]."""

    def value(*shape: int) -> Value:
        return Value(shape, "float64", True)

    piece = value(4, 8, 32)
    values = (
        *(piece, value(32, 96), value(96), value(32, 32), value(32, 96), value(4, 8, 96)),
        *(piece, piece, piece, value(4, 8, 8, 4)),
    )
    ops = (
        Op("aten.view.default", (Ref(0), (-1, 32)), (), (3,)),
        Op("aten.addmm.default", (Ref(2), Ref(3), Ref(1)), (), (4,)),
        Op("aten.view.default", (Ref(4), (4, 8, 96)), (), (5,)),
        Op("aten.split.Tensor", (Ref(5), 32, 2), (), (6, 7, 8)),
        Op("aten.view.default", (Ref(6), (4, 8, 8, 4)), (), (9,)),
    )
    slots = (SlotKind.VALUE, SlotKind.PARAMETER, SlotKind.PARAMETER)
    return OpGraph(tuple(Slot(kind) for kind in slots), values, ops, (9,))


def test_blocks_grow_backwards_from_a_split_and_forwards_from_a_view() -> None:
    graph = fused_qkv()
    labels = [op_labels(graph, op) for op in graph.ops]
    candidates, _ = grown_shardings(graph, labels, Divisions(2))
    assert (1, 3, 0) in candidates[1], "columns of the fused weight in three blocks"
    assert (0, 4, 0) in candidates[3], "the flattened batch in blocks of a sequence"
    by_name = {r.name: r for r in region_rules(graph, (2,))[1][0]}
    assert by_name["o/3"].inputs == (Shard(0, 3), REPLICATE, Shard(1, 3))
    assert by_name["o/3"].outputs == (Shard(1, 3),)
    assert by_name["d0/4"].inputs == (REPLICATE, Shard(0, 4), REPLICATE)
    assert by_name["k"].inputs == (PARTIAL, Shard(1), Shard(0))
    assert by_name["k"].outputs == (PARTIAL,)


def test_typings_of_two_axes_put_one_rule_beside_the_other() -> None:
    graph = fused_qkv()
    dp, tp = region_rules(graph, (2, 2))[1]
    rules = {r.name: r for r in dp}["d0"], {r.name: r for r in tp}["o/3"]
    typing = typing_of(graph, 1, rules)
    assert typing.rules == ("d0", "o/3")
    assert typing.inputs == (
        (REPLICATE, Shard(0, 3)),
        (Shard(0), REPLICATE),
        (REPLICATE, Shard(1, 3)),
    )
    assert typing.outputs == ((Shard(0), Shard(1, 3)),)
    assert is_legal_typing(graph, 1, typing, (2, 2))
    twice = typing_of(graph, 1, ({r.name: r for r in dp}["d0"],) * 2)
    assert not is_legal_typing(graph, 1, twice, (2, 2))


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of one number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))

    def merged() -> tuple[int, ...]:
        shape = [1]
        for factor in factors:
            if draw(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        return tuple(shape[draw(st.integers(0, 1)) if shape[0] == 1 and len(shape) > 1 else 0 :])

    return merged(), merged()


@given(views())
def test_view_labels_are_digits_of_one_index(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """Dims of one label, in order, multiply to the same group on both sides, prefix by prefix."""
    groups = []
    for shape, dims in zip(shapes, view_labels(*shapes), strict=True):
        extent: dict[str, int] = {}
        for size, carried in zip(shape, dims, strict=True):
            if carried is None:
                assert size == 1
                continue
            label, prefix = carried
            assert prefix == extent.get(label, 1)
            extent[label] = prefix * size
        groups.append({label: size for label, size in extent.items() if size > 1})
    assert groups[0] == groups[1]


@given(views())
def test_views_of_any_shape_pass_the_gate(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    op = SingleOp("aten.view.default", real(*shapes[0]), list(shapes[1]))
    check_typings(op, mesh_of(2), op.typings(2))


def test_legal_types_only() -> None:
    for _, make in SAMPLES:
        op = make()
        for rule in op.axis_rules(3):
            typing = typing_of(op.graph, 0, (rule,))
            assert is_legal_typing(op.graph, 0, typing, (3,)), (op.target, rule)
    assert is_legal((3,), (Shard(0),), (3,))
