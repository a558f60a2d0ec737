"""The batch followed through the regions, and the stored layouts of parameters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.graphs.op_graphs import GraphBuilder, costs_on, folded_stack, mlp
from support.models.hugging_face import BATCH, tiny_model
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.op_graph import Dependence, Value
from meshfold.ir.spmd import (
    INVARIANT,
    REPLICATE,
    PaddedShard,
    Shard,
    is_legal,
    layout_text,
    parse_layout,
)
from meshfold.models.config_file import Configuration
from meshfold.models.from_argument import build_model
from meshfold.passes.graph.boundaries import find_boundaries
from meshfold.passes.memory.zero import zero3_layout
from meshfold.passes.region.data_parallel import batch_problem, follow_batch, stored_options
from meshfold.passes.rules.table import region_rules


def follow(batch_size: int, num_ranks: int = 2):
    folded = folded_stack(num_layers=3)
    _, costs, _ = costs_on(num_ranks, 1)
    rules = [region_rules(region.graph, (num_ranks,)) for region in folded.regions]
    boundaries = find_boundaries(folded)
    return boundaries, follow_batch(folded, boundaries, rules, costs, batch_size)


def test_batch_is_carried_through_the_layers():
    boundaries, found = follow(batch_size=4)
    (inputs,) = boundaries.inputs
    carried = boundaries.slots[1][0]
    assert found.types[inputs] == Shard(0)
    assert found.types[carried] == Shard(0)


def test_results_are_unsharded():
    boundaries, found = follow(batch_size=4)
    (result,) = boundaries.results
    assert found.types[result] == INVARIANT


def test_parameters_are_used_unsharded():
    _, found = follow(batch_size=4)
    layer = found.solutions[1].typing
    assert layer.slots[1:] == ((INVARIANT,), (INVARIANT,))
    first, _, second, _ = layer.ops
    assert first.inputs[1] == second.inputs[1] == (REPLICATE,)
    assert found.rules(1) == tuple(op.rules[0] for op in layer.ops)


def test_the_batch_stays_on_its_dim_where_sharing_the_table_of_positions_would_pay():
    # By itself the embedding would be sharded along positions, and every layer would go back and
    # forth: attention shards the batch.
    fields = {
        "model_type": "gpt2",
        "n_embd": 6144,
        "n_layer": 3,
        "n_head": 16,
        "n_positions": 2048,
        "dtype": "bfloat16",
    }
    model = build_model(Configuration(Path("wide.json"), fields), batch=32, sequence=2048)
    folded = capture(model.model, model.example_inputs).graph
    _, costs, _ = costs_on(8, 1, "dgx-a100-80x1")
    rules = [region_rules(region.graph, (8,)) for region in folded.regions]
    boundaries = find_boundaries(folded)
    found = follow_batch(folded, boundaries, rules, costs, 32)
    carried = boundaries.slots[1][0]
    assert carried is not None and boundaries.values[carried].shape == (32, 2048, 6144)
    assert found.types[carried] == Shard(0)


def test_another_first_dim_is_no_batch():
    _, found = follow(batch_size=8)
    assert set(found.types) == {INVARIANT}


def test_stored_options_are_what_users_read():
    graph = mlp()
    rules = region_rules(graph, (2,))
    assert stored_options(graph, 1, rules, 0) == [INVARIANT, Shard(0), Shard(1)]


def test_parameter_without_user_is_unsharded():
    b = GraphBuilder()
    x = b.slot(4, 8)
    unused = b.parameter(8, 8)
    graph = b.build(b.relu(x))
    assert stored_options(graph, unused, region_rules(graph, (2,)), 0) == [INVARIANT]


class Dense(nn.Module):
    """Each layer reads what all before it made, as in DenseNet; also a constant, if so asked."""

    def __init__(self, num_layers: int, has_constant: bool = False) -> None:
        super().__init__()
        self.has_constant = has_constant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8 + 4 * k, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
            for k in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        if self.has_constant:
            found.append(torch.ones(4, 4, 3, 3))
        return torch.cat(found, 1).mean()


@pytest.mark.parametrize("has_constant", [False, True])
def test_the_batch_is_followed_through_what_is_too_large_to_be_solved_exactly(has_constant):
    folded = capture(Dense(24, has_constant), {"x": torch.randn(4, 8, 3, 3)}).graph
    _, costs, _ = costs_on(2, 1)
    rules = [region_rules(region.graph, (2,)) for region in folded.regions]
    found = follow_batch(folded, find_boundaries(folded), rules, costs, 4)
    (solution,) = found.solutions
    assert solution.slack_s < 0.5 * solution.objective_s
    graph = folded.regions[0].graph
    pairs = zip(graph.ops, solution.typing.ops, strict=True)
    maps = [t.outputs[0][0] for op, t in pairs if len(graph.values[op.outputs[0]].shape) == 4]
    # A constant is made whole by all.
    assert [m for m in maps if m != INVARIANT] == [Shard(0)] * 97
    assert len(maps) == 97 + has_constant and solution.typing.outputs[-1] == (INVARIANT,)


@pytest.mark.parametrize(
    ("shape", "stored", "expected"),
    [
        ((8, 6), (INVARIANT, INVARIANT), (Shard(0), INVARIANT)),
        ((8, 6), (INVARIANT, Shard(0)), (Shard(0, 2), Shard(0))),
        ((8, 6), (INVARIANT, Shard(1)), (Shard(0), Shard(1))),
        ((24, 6), (INVARIANT, Shard(0, 3)), (Shard(0, 6), Shard(0, 3))),
        ((2, 8), (INVARIANT, Shard(0)), (Shard(1), Shard(0))),
        ((3, 5), (INVARIANT, INVARIANT), (INVARIANT, INVARIANT)),
        ((), (INVARIANT, INVARIANT), (INVARIANT, INVARIANT)),
        ((10, 7), (INVARIANT, INVARIANT), (PaddedShard(1), INVARIANT)),
        ((15, 6), (INVARIANT, Shard(1)), (PaddedShard(0), Shard(1))),
        ((10, 6), (INVARIANT, Shard(0)), (INVARIANT, Shard(0))),
    ],
)
def test_zero3_layout(shape, stored, expected):
    mesh = Mesh((MeshAxis("dp", 4 if 24 not in shape else 2), MeshAxis("tp", 2)))
    found = zero3_layout(Value(shape, "float32", True), stored, mesh, (0,))
    assert found == expected
    assert is_legal(shape, found, mesh.sizes)


@pytest.mark.parametrize(
    ("shape", "stored", "expected"),
    [
        ((16, 6), "I,I,I", "S0,S0/4,I"),  # one dim, consecutive pieces
        ((16, 6), "I,I,S0", "S0/2,S0/8,S0"),  # inside what tp cuts
        ((8, 6), "I,I,S0", "S0/2,S1,S0"),  # no dim for both
        ((10, 6), "I,I,I", "S0+,S1,I"),
        ((7, 3), "I,I,I", "S0+,I,I"),
    ],
)
def test_zero3_layout_over_two_axes(shape, stored, expected):
    mesh = Mesh((MeshAxis("dp", 4), MeshAxis("cp", 2), MeshAxis("tp", 2)))
    found = zero3_layout(Value(shape, "float32", True), parse_layout(stored), mesh, (0, 1))
    assert layout_text(found) == expected
    assert is_legal(shape, found, mesh.sizes)


@pytest.mark.parametrize(
    ("shape", "stored", "expected"),
    [
        ((16, 6), "I,I,I", "S0*4,S0/2,I"),  # 2 shards of dp, then 2 of cp
        ((16, 6), "I,I,S0", "S0/2*4,S0/4,S0"),
        ((3, 7), "I,I,I", "S1+*4,I,I"),  # dp pads, then no dim is left
    ],
)
def test_zero3_layout_inside_of_replicas(shape, stored, expected):
    mesh = Mesh((MeshAxis("dp", 8, replicas=4), MeshAxis("cp", 2), MeshAxis("tp", 2)))
    found = zero3_layout(Value(shape, "float32", True), parse_layout(stored), mesh, (0, 1))
    assert layout_text(found) == expected
    assert is_legal(shape, found, mesh.sizes)


def test_what_regions_take_that_is_made_of_parameters_is_followed_per_size() -> None:
    """As a table of positions is that has no gradient. The rules are those of one size: they
    agree. What has a gradient is computed by all ranks."""
    folded = folded_stack(num_layers=3)
    boundaries = find_boundaries(folded)
    rules = [region_rules(region.graph, (2,)) for region in folded.regions]
    table = Value((1, 4, 8, 8), "float32", False, Dependence.PARAMETER)
    trained = replace(table, requires_grad=True)
    plain = boundaries.values
    for values, num_keys in ((plain, 1), ((*plain, trained), 1), ((*plain, table), 2)):
        of = replace(boundaries, values=values)
        assert len({batch_problem(of, size, rules, batch_size=4) for size in (2, 4)}) == num_keys


def test_a_table_made_of_parameters_is_computed_by_all_ranks() -> None:
    """T5's position bias: no layer gathers rows of it, or sums its gradient."""
    folded = capture(*tiny_model("t5", layers=3)).graph
    _, costs, _ = costs_on(2, 1)
    rules = [region_rules(region.graph, (2,)) for region in folded.regions]
    boundaries = find_boundaries(folded)
    found = follow_batch(folded, boundaries, rules, costs, BATCH, pending=True)
    tables = [
        t
        for t, value in zip(found.types, boundaries.values, strict=True)
        if value.depends is Dependence.PARAMETER and value.requires_grad
    ]
    assert tables and set(tables) == {REPLICATE}
