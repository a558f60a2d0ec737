"""Prices and orders of conversions. What they compute is tests/compiler/test_convert_ops."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.layouts import FlatCosts
from support.graphs.ops import mesh_of

from meshfold.ir.conversion_step import Step, exchange_is_even
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Shard,
    SpmdType,
    is_legal,
    parse_layout,
)
from meshfold.passes.price.conversions import (
    COLLECTIVES,
    CONVERSIONS,
    axis_conversion,
    conversion_cost,
    conversion_steps,
    step_actions,
)

X = Value((8, 16), "float32", requires_grad=True)
X_BYTES = 8 * 16 * 4
FLAT = FlatCosts(mesh_of(2))
COPY_S = FLAT.compute_s(0.0, 2 * X_BYTES, "float32")
HALF_COPY_S = FLAT.compute_s(0.0, X_BYTES, "float32")


def collective_s(kind: str, num_bytes: int) -> float:
    return FLAT.collective_s(kind, num_bytes, (0,))


def test_the_table_names_known_actions() -> None:
    local = {"none", "slice", "mask", "zero_pad"}
    for conversion in CONVERSIONS.values():
        assert {conversion.forward, conversion.backward} <= local | COLLECTIVES


def test_backward_of_backward_is_forward() -> None:
    """The gradient of a conversion is the conversion of the gradient's types, from target to
    source: I is the gradient type of P, R has a pending sum as gradient."""
    gradient = {"I": "I", "R": "P", "P": "I", "S": "S"}
    same = {"zero_pad": "zero_pad", "mask": "mask", "none": "none"}
    for (source, target), conversion in CONVERSIONS.items():
        pair = gradient[target], gradient[source]
        if pair[0] == pair[1] != "S":
            # P -> I and I -> P: gradients are the same everywhere; nothing to do.
            # R -> R cannot be: source and target differ.
            assert conversion.backward == "none"
            continue
        expected = CONVERSIONS[pair].forward
        assert same.get(conversion.backward, conversion.backward) == expected, (source, target)


CASES = [
    ("I", "R", 0.0, collective_s("all_reduce", X_BYTES), (), ("all_reduce",)),
    ("P", "I", collective_s("all_reduce", X_BYTES), 0.0, ("all_reduce",), ()),
    (
        *("P", "S0", collective_s("reduce_scatter", X_BYTES), collective_s("all_gather", X_BYTES)),
        *(("reduce_scatter",), ("all_gather",)),
    ),
    (
        *("S1", "R", collective_s("all_gather", X_BYTES) + COPY_S),
        collective_s("reduce_scatter", X_BYTES) + COPY_S,
        *(("all_gather",), ("reduce_scatter",)),
    ),
    (
        *("S0", "S1", *(collective_s("all_to_all", X_BYTES // 2) + HALF_COPY_S,) * 2),
        *(("all_to_all",), ("all_to_all",)),
    ),
    (
        *("S0", "I", collective_s("all_gather", X_BYTES), FLAT.compute_s(0.0, X_BYTES, "")),
        *(("all_gather",), ()),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_prices_by_hand(
    case: tuple[str, str, float, float, tuple[str, ...], tuple[str, ...]],
) -> None:
    source, target, forward_s, backward_s, forward, backward = case
    cost = conversion_cost(X, parse_layout(source), parse_layout(target), FlatCosts(mesh_of(2)))
    assert (cost.forward_s, cost.backward_s) == pytest.approx((forward_s, backward_s))
    assert (cost.forward, cost.backward) == (forward, backward)
    copies_s = 2 * {"S1-R": COPY_S, "S0-S1": HALF_COPY_S}.get(f"{source}-{target}", 0.0)
    assert cost.by_axis_s == pytest.approx((cost.total_s - copies_s,))


INNER = [
    # X is [8, 16]; parts of dim 0 are pieces of memory, those of dim 1 are not.
    ("P", "S0", (0, 0), (0, 0)),
    ("P", "S1", (1, 0), (0, 1)),
    ("S0", "R", (0, 0), (0, 0)),
    ("S1", "R", (0, 1), (1, 0)),
    ("S1", "I", (0, 1), (0, 0)),
    ("I", "S1", (0, 0), (0, 1)),
    ("S0", "S1", (1, 0), (0, 1)),
    ("S1", "S0", (0, 1), (1, 0)),
    ("I", "R", (0, 0), (0, 0)),
]


@pytest.mark.parametrize("case", INNER, ids=lambda c: f"{c[0]}-{c[1]}")
def test_parts_of_inner_dims_are_copied(
    case: tuple[str, str, tuple[int, int], tuple[int, int]],
) -> None:
    source, target, *expected = case
    step = Step(0, *parse_layout(source), *parse_layout(target), parse_layout(source))
    for action, copies in zip(step_actions(X, step, FlatCosts(mesh_of(2))), expected, strict=True):
        copy_s = FLAT.compute_s(0.0, 2 * action.num_bytes, "float32")
        assert (action.before_s, action.after_s) == tuple(n * copy_s for n in copies)


def test_one_row_on_every_rank_is_not_copied() -> None:
    """Eight ranks of the other axis have one of the eight rows each: dim 1 is one piece there."""
    before = parse_layout("S0,S1")
    step = Step(1, before[1], REPLICATE, before)
    for ranks, is_copied in ((8, False), (4, True)):
        there, back = step_actions(X, step, FlatCosts(mesh_of(ranks, 2)))
        assert bool(there.after_s) == bool(back.before_s) == is_copied


def test_bytes_are_what_the_other_axes_leave() -> None:
    mesh = mesh_of(2, 2)
    cost = conversion_cost(X, parse_layout("S0,S1"), parse_layout("S0,R"), FlatCosts(mesh))
    assert cost.num_bytes == X_BYTES // 2
    assert cost.by_axis_s[0] == 0.0


def test_without_gradient_the_backward_is_free() -> None:
    ids = Value((8, 16), "int64")
    same = conversion_cost(ids, (INVARIANT,), (REPLICATE,), FlatCosts(mesh_of(2)))
    assert same.total_s == 0.0
    gathered = conversion_cost(ids, (Shard(0),), (REPLICATE,), FlatCosts(mesh_of(2)))
    assert gathered.backward_s == 0.0 and gathered.backward == ()


def test_an_axis_of_one_rank_is_free() -> None:
    assert conversion_cost(X, (PARTIAL,), (REPLICATE,), FlatCosts(mesh_of(1))).total_s == 0.0


def test_the_cheap_order_shrinks_before_it_communicates() -> None:
    """Reduce-scatter on one axis first, then all-reduce half of the bytes on the other."""
    source, target = (PARTIAL, PARTIAL), (INVARIANT, Shard(0))
    steps = conversion_steps(X, source, target, FlatCosts(mesh_of(2, 2)))
    assert steps == (
        Step(1, PARTIAL, Shard(0), source),
        Step(0, PARTIAL, INVARIANT, (PARTIAL, Shard(0))),
    )
    assert steps[-1].after == target


def test_shards_that_trade_places_make_room_first() -> None:
    source, target = (Shard(0), Shard(0, 2)), (Shard(0, 2), Shard(0))
    steps = conversion_steps(X, source, target, FlatCosts(mesh_of(2, 2)))
    assert steps[0].target == INVARIANT
    assert steps[-1].after == target
    assert all(is_legal(X.shape, s.after, (2, 2)) for s in steps)


def test_overlapping_shards_of_one_dim_gather() -> None:
    assert exchange_is_even(Shard(0), Shard(0, 2), 2)
    assert exchange_is_even(Shard(0, 3), Shard(1), 2)
    assert not exchange_is_even(Shard(0), Shard(0, 3), 2)
    assert axis_conversion(Shard(0), Shard(0, 3), 2).forward == "all_gather"
    assert axis_conversion(Shard(0), Shard(0, 2), 2).forward == "all_to_all"


TYPES: tuple[SpmdType, ...] = (INVARIANT, REPLICATE, PARTIAL, Shard(0), Shard(0, 2), Shard(1))
LAYOUTS = [
    layout for layout in itertools.product(TYPES, TYPES) if is_legal(X.shape, layout, (2, 2))
]


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_steps_lead_from_source_to_target_legally(source: Layout, target: Layout) -> None:
    now = source
    for step in conversion_steps(X, source, target, FlatCosts(mesh_of(2, 2))):
        assert step.before == now and step.source == now[step.axis] != step.target
        now = step.after
        assert is_legal(X.shape, now, (2, 2))
    assert now == target
