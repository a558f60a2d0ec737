"""What a parameter costs between where it is stored and where it is used."""

import math
from dataclasses import replace

import pytest
from support.graphs.op_graphs import costs_on

from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Shard
from meshfold.passes.price.parameters import (
    BUCKET_BYTES,
    GroupCopies,
    is_grouped,
    local_bytes,
    member_copies,
)
from meshfold.passes.region.parameter_tables import ParameterPrices
from meshfold.passes.region.roles import AxisRole, SearchCosts

WEIGHT = Value((64, 32), "float32", True)
FROZEN = Value((64, 32), "float32", False)


def prices_on(role: AxisRole) -> ParameterPrices:
    mesh, costs, _ = costs_on(1, 2)
    return ParameterPrices(SearchCosts(costs, (role,)))


def price(found: ParameterPrices, value: Value, stored, used) -> float:
    return float(found.tables(value, [(stored,)], [(used,)])[0][0, 0])


def test_local_bytes():
    assert local_bytes(WEIGHT, (Shard(0), INVARIANT), (2, 4)) == 64 * 32 * 4 // 2
    assert local_bytes(WEIGHT, (Shard(0, 2), Shard(0)), (4, 2)) == 64 * 32 * 4 // 8


def test_a_parameter_without_elements_has_no_copies():
    _, costs, _ = costs_on(1, 2)
    empty = Value((64, 0), "float32", True)
    assert member_copies(empty, (Shard(0),), (0,), costs) == GroupCopies()


def test_bucketed_kinds():
    assert is_grouped(INVARIANT, REPLICATE) and is_grouped(Shard(1), REPLICATE)
    assert not is_grouped(INVARIANT, Shard(0)) and not is_grouped(Shard(0), INVARIANT)


def memory_s(num_bytes: float) -> float:
    """Seconds of so many bytes read and written, no launch."""
    _, costs, _ = costs_on(1, 2)
    return num_bytes / (costs.device.memory_bytes_per_s * costs.device.memory_efficiency)


def test_reduction_pays_its_share_of_a_bucket():
    found = prices_on(AxisRole.ANY)
    _, costs, _ = costs_on(1, 2)
    num_bytes = 64 * 32 * 4
    expected = num_bytes / BUCKET_BYTES * costs.collective_s("all_reduce", BUCKET_BYTES, (0,))
    expected += memory_s(2 * num_bytes)
    assert price(found, WEIGHT, INVARIANT, REPLICATE) == pytest.approx(expected)
    assert price(found, FROZEN, INVARIANT, REPLICATE) == 0


def test_copies_of_a_member_by_hand():
    """A weight of 2,048 elements, kept in float32 and read in bfloat16, gathered over two ranks."""
    mesh, costs, _ = costs_on(2, 1)
    weight = Value((64, 32), "bfloat16", True, master="float32")
    layout = tuple(Shard(0) if axis.name == "dp" else INVARIANT for axis in mesh.axes)
    found = member_copies(weight, layout, (0,), costs)
    here, whole = 1024, 2048
    assert found.packed_s == pytest.approx(memory_s(here * (4 + 2)) + memory_s(here * 2 * 2))
    assert found.unpacked_s == pytest.approx(costs.launch_s + memory_s(whole * 2 * 2))
    assert found.reduced_s == pytest.approx(costs.launch_s + memory_s(whole * (2 + 4)))
    reduced = member_copies(WEIGHT, (INVARIANT,) * len(mesh.axes), (), costs)
    assert (reduced.packed_s, reduced.unpacked_s) == (0, 0)
    assert reduced.reduced_s == pytest.approx(costs.launch_s + memory_s(whole * (4 + 4)))
    assert member_copies(FROZEN, (INVARIANT,) * len(mesh.axes), (), costs) == GroupCopies()


def test_shards_are_used_as_they_are():
    found = prices_on(AxisRole.TENSOR)
    assert price(found, WEIGHT, Shard(0), Shard(0)) == 0
    for used in (Shard(1), REPLICATE, INVARIANT, PARTIAL):
        assert math.isinf(price(found, WEIGHT, Shard(0), used))
    assert 0 < price(found, WEIGHT, INVARIANT, Shard(0)) < math.inf


def test_data_axis_gathers_and_charges_nothing():
    found = prices_on(AxisRole.DATA)
    assert price(found, WEIGHT, Shard(0), REPLICATE) == 0
    assert price(found, WEIGHT, INVARIANT, REPLICATE) == 0
    assert math.isinf(price(found, WEIGHT, Shard(0), Shard(0)))
    assert price(found, WEIGHT, Shard(0), INVARIANT) > 0


def test_tables_repeat_columns():
    found = prices_on(AxisRole.ANY)
    used = [(REPLICATE,), (INVARIANT,), (REPLICATE,)]
    matrix, num_bytes = found.tables(WEIGHT, [(INVARIANT,), (Shard(0),)], used)
    assert matrix.shape == (2, 3)
    assert (matrix[:, 0] == matrix[:, 2]).all()
    assert matrix[0, 1] == 0
    assert num_bytes.tolist() == found.num_bytes(WEIGHT, used).tolist()


def test_tables_of_parameters_of_other_sizes_are_their_own():
    found = prices_on(AxisRole.ANY)
    layouts = [[(INVARIANT,), (Shard(0),)], [(REPLICATE,), (Shard(0),)]]
    wide = replace(WEIGHT, shape=(2 * WEIGHT.shape[0], *WEIGHT.shape[1:]))
    (narrow_s, narrow), (wide_s, doubled) = (found.tables(v, *layouts) for v in (WEIGHT, wide))
    assert doubled.tolist() == (2 * narrow).tolist()
    fresh_s, _ = prices_on(AxisRole.ANY).tables(wide, *layouts)
    assert wide_s.tolist() == fresh_s.tolist()
    assert wide_s[0, 0] > narrow_s[0, 0]


def test_layouts_that_two_axes_shard_are_asked_about_for_every_size():
    mesh, costs, _ = costs_on(2, 2)
    found = ParameterPrices(SearchCosts(costs, (AxisRole.ANY,) * 2))
    layouts = [(INVARIANT, Shard(0))], [(Shard(0, 2), Shard(0))]
    for rows, is_allowed in ((2, False), (4, True), (6, False), (8, True)):
        seconds, _ = found.tables(Value((rows, 32), "float32", True), *layouts)
        assert math.isfinite(seconds[0, 0]) == is_allowed
