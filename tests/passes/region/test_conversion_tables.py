"""Conversion matrices against the conversions that will be emitted."""

import itertools

import numpy as np
import pytest
from support.graphs.op_graphs import costs_on

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Layout, Shard, is_legal
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.region.conversion_tables import ConversionTables
from meshfold.passes.region.roles import UNDONE_SHARD_S, AxisRole, SearchCosts

KINDS = (INVARIANT, REPLICATE, PARTIAL)


def tables_on(costs: CostModel, *roles: AxisRole) -> ConversionTables:
    roles = roles or (AxisRole.ANY,) * len(costs.mesh.axes)
    return ConversionTables(SearchCosts(costs, roles))


def layouts_of(value: Value, sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    shards = [Shard(d, g) for d in range(len(value.shape)) for g in (1, 2, 4)]
    combinations = itertools.product((*KINDS, *shards), repeat=len(sizes))
    return tuple(x for x in combinations if is_legal(value.shape, x, sizes))


@pytest.mark.parametrize("degrees", [(1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_equals_the_price_of_emitted_conversions(degrees, requires_grad):
    mesh, costs, _ = costs_on(*degrees)
    tables = tables_on(costs)
    value = Value((8, 16), "float32", requires_grad)
    layouts = layouts_of(value, mesh.sizes)
    matrix = tables.matrix(value, layouts)
    for (a, source), (b, target) in itertools.product(enumerate(layouts), repeat=2):
        emitted = conversion_cost(value, source, target, tables.costs).total_s
        # Blocks change the way through an intermediate layout, hardly its price.
        assert matrix[a, b] == pytest.approx(emitted, rel=1e-9, abs=1e-12)


def test_no_axes():
    mesh, costs, _ = costs_on(1, 1)
    assert tables_on(costs).matrix(Value((8,), "float32"), ((),)).tolist() == [[0.0]]


def test_tensor_role_forbids_cutting_and_gathering():
    mesh, costs, _ = costs_on(1, 2)
    tables = tables_on(costs, AxisRole.TENSOR)
    layouts = ((INVARIANT,), (REPLICATE,), (PARTIAL,), (Shard(0),))
    matrix = tables.matrix(Value((8, 16), "float32", True), layouts)
    assert np.isinf(matrix[:3, 3]).all() and np.isinf(matrix[3, :3]).all()
    assert np.isfinite(matrix[:3, :3]).all() and matrix[3, 3] == 0
    without_gradient = tables.matrix(Value((8, 16), "float32", False), layouts)
    assert np.isfinite(without_gradient).all()


def test_sequence_role_pays_for_both_halves():
    mesh, costs, _ = costs_on(1, 8)
    layouts = ((INVARIANT,), (REPLICATE,), (PARTIAL,), (Shard(0),))
    value = Value((4096, 4096), "bfloat16", True)
    matrix = tables_on(costs, AxisRole.SEQUENCE).matrix(value, layouts)
    assert matrix[2, 1] == pytest.approx(matrix[2, 3] + matrix[3, 1])


def test_roles_are_per_axis():
    mesh, costs, _ = costs_on(2, 2)
    tables = tables_on(costs, AxisRole.ANY, AxisRole.TENSOR)
    layouts = ((INVARIANT, INVARIANT), (Shard(0), INVARIANT), (INVARIANT, Shard(0)))
    matrix = tables.matrix(Value((8, 16), "float32", True), layouts)
    assert np.isfinite(matrix[1, 0])
    assert np.isinf(matrix[2, 0])


def test_data_role_keeps_shards():
    mesh, costs, _ = costs_on(2, 1)
    layouts = ((INVARIANT,), (Shard(0),))
    value = Value((8, 16), "float32", True)
    kept = tables_on(costs, AxisRole.DATA).matrix(value, layouts)
    free = tables_on(costs).matrix(value, layouts)
    assert kept[1, 0] == pytest.approx(free[1, 0] + UNDONE_SHARD_S)
    assert kept[0, 1] == free[0, 1]
