"""Which parameters share a bucket, and what its copies cost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_graphs import costs_on

from meshfold.mesh import Mesh, MeshAxis
from meshfold.opgraph import Value
from meshfold.passes.parameter_buckets import bucket_copies, changed_axes, used_layout
from meshfold.passes.parameter_prices import BucketCopies, member_copies
from meshfold.shards import Assembly
from meshfold.spmd import INVARIANT, Shard, is_legal, parse_layout

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
    one, other = (member_copies(v, stored, (0,), mesh, costs) for v in (WEIGHT, bias))
    both = bucket_copies([(WEIGHT, stored), (bias, stored)], (0,), mesh, costs)
    assert both == one + other
    assert both.taken_s == pytest.approx(one.taken_s + other.taken_s) and other.taken_s > 0


def test_the_only_member_is_not_packed() -> None:
    mesh, costs, _ = costs_on(2, 2)
    rows, columns = (Shard(0), INVARIANT), (Shard(1), INVARIANT)
    reduced_s = member_copies(WEIGHT, rows, (0,), mesh, costs).reduced_s
    assert bucket_copies([(WEIGHT, rows)], (0,), mesh, costs) == BucketCopies(0, 0, reduced_s)
    cut = bucket_copies([(WEIGHT, columns)], (0,), mesh, costs)
    assert cut.packed_s == 0
    assert cut.taken_s == member_copies(WEIGHT, columns, (0,), mesh, costs).taken_s > 0
    master = replace(WEIGHT, dtype="bfloat16", master="float32")
    assert bucket_copies([(master, rows)], (0,), mesh, costs).packed_s > 0


TYPES = st.sampled_from([INVARIANT, Shard(0), Shard(1), Shard(0, 2), Shard(1, 2)])


@given(st.tuples(TYPES, TYPES), st.sets(st.integers(0, 1), min_size=1), st.integers(1, 3))
def test_what_is_free_is_a_view(stored, gather, rows) -> None:
    mesh, costs, _ = costs_on(2, 2)
    weight = Value((4 * rows, 8), "float32", True)
    axes = tuple(k for k in sorted(gather) if stored[k].is_shard)
    if not axes or not is_legal(weight.shape, stored, mesh.sizes):
        return
    copies = bucket_copies([(weight, stored)], axes, mesh, costs)
    is_view = Assembly(weight.shape, stored, mesh.sizes, axes).is_view
    assert is_view or copies.taken_s
    if not any(t.is_shard for k, t in enumerate(stored) if k not in axes):
        assert is_view == (not copies.taken_s)
