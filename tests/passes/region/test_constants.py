"""Masks and positions on shards, where no op reads them unsharded."""

from functools import cache

import pytest
import torch
from support.models.hugging_face import BATCH, tiny_model
from support.programs.local_programs import Rank, emit_uniform, local_part, on_ranks
from torch import nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import Dependence, OpGraph
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping, UniformStrategy
from meshfold.passes.price.parameters import local_bytes
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.rules.joint import is_constant_op
from meshfold.validation.float64_mode import float64_everywhere


@cache
def captured(family: str) -> Captured:
    model, batch = tiny_model(family)
    with float64_everywhere():
        return capture(model, batch)


@cache
def typings_of(family: str, dp: int, tp: int) -> tuple[RegionTyping, ...]:
    cluster = resolve_cluster("local-cpu", dp * tp)
    mesh = build_mesh(cluster, dp, tp)
    search = MeshSearch(captured(family).graph, cluster, mesh, BATCH)
    return search.solve(zero=0, mode="tensor").typings


def constants_of_the_batch(graph: OpGraph, typing: RegionTyping) -> list[tuple[int, Layout]]:
    """(value, layout) of what constant ops make with one entry per sample and query."""
    return [
        (op.outputs[0], typing.ops[k].outputs[0])
        for k, op in enumerate(graph.ops)
        if is_constant_op(graph, k)
        and len(graph.values[op.outputs[0]].shape) == 4
        and graph.values[op.outputs[0]].shape[0] == BATCH
    ]


def test_masks_are_made_for_the_local_batch() -> None:
    """Of T5, whose masks are summands of its position biases; others are proven causal and gone."""
    graph = captured("t5").graph
    found = [
        (region.graph.values[v], layout)
        for region, typing in zip(graph.regions, typings_of("t5", 2, 1), strict=True)
        for v, layout in constants_of_the_batch(region.graph, typing)
    ]
    large = [(value, layout) for value, layout in found if min(value.shape[2:]) > 1]
    assert large
    for value, layout in large:
        assert value.depends is Dependence.CONSTANT
        assert local_bytes(value, layout, (2,)) == value.num_bytes // 2


@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_the_numbers_stay(family: str, dp: int, tp: int) -> None:
    model, batch = tiny_model(family)
    with float64_everywhere():
        loss = model(**batch).loss
    loss.backward()
    found = captured(family)
    program = emit_uniform(found, UniformStrategy(dp=dp, tp=tp), BATCH)

    def body(rank: Rank) -> float:
        own = rank.loss(batch)
        own.backward()
        for name, parameter in rank.parameters.items():
            expected = local_part(program, name, model.get_parameter(name).grad, rank.mesh)
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12)
        return own.item()

    for own in on_ranks(model, found, program, body):
        assert own == pytest.approx(loss.item(), rel=1e-12)


class Divergence(nn.Module):
    """From a fixed distribution, whose mean and deviation are broadcast together."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.mean(x)
        fixed = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        found = torch.distributions.Normal(mean, mean.exp())
        return torch.distributions.kl_divergence(found, fixed).mean()


def test_constants_made_together_are_made_for_the_local_batch() -> None:
    graph = capture(Divergence(), {"x": torch.ones(BATCH, 8)}).graph
    cluster = resolve_cluster("local-cpu", 2)
    search = MeshSearch(graph, cluster, build_mesh(cluster, 2, 1), BATCH)
    (typing,) = search.solve(zero=0, mode="tensor").typings
    (region,) = graph.regions
    together = [k for k, op in enumerate(region.graph.ops) if "broadcast" in op.target]
    constant = [k for k in together if is_constant_op(region.graph, k)]
    assert constant and len(region.graph.ops[constant[0]].outputs) == 2
    assert all(layout[0].is_shard for layout in typing.ops[constant[0]].outputs)
