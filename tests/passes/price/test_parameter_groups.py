"""Which parameters share a bucket, and what its copies cost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.op_graphs import costs_on

from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, REPLICATE, Shard, is_legal, parse_layout
from meshfold.passes.price.parameter_groups import (
    changed_axes,
    group_copies,
    is_unbucketed,
    parameter_copies,
    parameter_group_key,
    used_layout,
)
from meshfold.passes.price.parameters import GroupCopies, member_copies
from meshfold.sharding.layout import Assembly

MESH = Mesh((MeshAxis("dp", 2), MeshAxis("tp", 2)))
WEIGHT = Value((64, 32), "float32", True)


def test_only_changes_to_replicate_are_done_in_buckets() -> None:
    cases = {
        ("S0,S1", "R,S1"): "R,S1",  # ZeRO-3 over a row shard
        ("I,I", "R,R"): "R,R",  # gradient all-reduce
        ("S0,I", "R,S1"): "R,I",  # the slice is done in the graph
        ("I,S0", "R,I"): "R,S0",  # so is a gather to Invariant
        ("S0,I", "I,I"): "S0,I",
    }
    for (stored, demand), used in cases.items():
        found = used_layout(parse_layout(stored), parse_layout(demand), MESH)
        assert found == parse_layout(used)


def test_axes_of_one_rank_change_nothing() -> None:
    alone = Mesh((MeshAxis("dp", 1), MeshAxis("tp", 2)))
    assert used_layout(parse_layout("I,I"), parse_layout("R,R"), alone) == parse_layout("I,R")


def test_changed_axes_tells_gathers_from_reductions() -> None:
    assert changed_axes(parse_layout("S0,I"), parse_layout("R,R")) == ((0,), (1,))
    assert changed_axes(parse_layout("I,I"), parse_layout("R,R")) == ((), (0, 1))


def test_copies_of_a_bucket_are_those_of_its_members() -> None:
    mesh, costs, _ = costs_on(2, 2)
    stored = (Shard(0), INVARIANT)
    bias = replace(WEIGHT, shape=(64,))
    one, other = (member_copies(v, stored, (0,), costs) for v in (WEIGHT, bias))
    both = group_copies([(WEIGHT, stored), (bias, stored)], (0,), costs)
    assert both == one + other
    assert (
        both.unpacked_s == pytest.approx(one.unpacked_s + other.unpacked_s) and other.unpacked_s > 0
    )


def test_the_only_member_is_not_packed() -> None:
    mesh, costs, _ = costs_on(2, 2)
    rows, columns = (Shard(0), INVARIANT), (Shard(1), INVARIANT)
    assert group_copies([(WEIGHT, rows)], (0,), costs) == GroupCopies()
    cut = group_copies([(WEIGHT, columns)], (0,), costs)
    assert cut.packed_s == 0
    assert cut.unpacked_s == member_copies(WEIGHT, columns, (0,), costs).unpacked_s > 0
    master = replace(WEIGHT, dtype="bfloat16", master="float32")
    cast = group_copies([(master, rows)], (0,), costs)
    assert cast.packed_s > 0 and not cast.unpacked_s
    assert cast.reduced_s == member_copies(master, rows, (0,), costs).reduced_s > 0


def test_large_parameters_have_buckets_of_their_own() -> None:
    """Where copies take longer than the start of two gathers and a reduction."""
    mesh, costs, _ = costs_on(2, 2)
    stored, used = (Shard(0), INVARIANT), (REPLICATE, INVARIANT)
    starts_s = sum(
        costs.collective_s(kind, 1, (0,)) for kind in ("all_gather", "all_gather", "reduce_scatter")
    )
    rows = 2
    while not is_unbucketed(replace(WEIGHT, shape=(rows, 4096)), stored, (0,), costs):
        rows *= 2
    for size, is_expected in ((rows // 2, False), (rows, True), (4 * rows, True)):
        weight = replace(WEIGHT, shape=(size, 4096))
        copies = member_copies(weight, stored, (0,), costs)
        saved_s = 2 * copies.gathered_s + copies.reduced_s
        assert (saved_s > starts_s) == is_expected
        key = parameter_group_key(7, weight, stored, used, costs)
        assert key is not None and key.unbucketed == ((7, used) if is_expected else None)
        alone = group_copies([(weight, stored)], (0,), costs)
        found = parameter_copies(weight, stored, (0,), costs)
        assert found == (alone if is_expected else copies)
    columns = (Shard(1), INVARIANT)
    assert not is_unbucketed(replace(WEIGHT, shape=(4 * rows, 4096)), columns, (0,), costs)


def test_a_parameter_that_is_read_in_two_layouts_has_two_buckets() -> None:
    mesh, costs, _ = costs_on(2, 2)
    weight = replace(WEIGHT, shape=(4096, 4096))
    stored = (Shard(0), INVARIANT)
    found = {
        parameter_group_key(0, weight, stored, used_layout(stored, demand, mesh), costs)
        for demand in ((REPLICATE, INVARIANT), (REPLICATE, REPLICATE))
    }
    assert len(found) == 2 and None not in {key and key.unbucketed for key in found}


TYPES = st.sampled_from([INVARIANT, Shard(0), Shard(1), Shard(0, 2), Shard(1, 2)])


@given(st.tuples(TYPES, TYPES), st.sets(st.integers(0, 1), min_size=1), st.integers(1, 3))
def test_what_is_free_is_a_view(stored, gather, rows) -> None:
    mesh, costs, _ = costs_on(2, 2)
    weight = Value((4 * rows, 8), "float32", True)
    axes = tuple(k for k in sorted(gather) if stored[k].is_shard)
    if not axes or not is_legal(weight.shape, stored, mesh.sizes):
        return
    copies = group_copies([(weight, stored)], axes, costs)
    is_view = Assembly(weight.shape, stored, mesh.sizes, axes).is_view
    assert is_view or copies.unpacked_s
    if not any(t.is_shard for k, t in enumerate(stored) if k not in axes):
        assert is_view == (not copies.unpacked_s)
