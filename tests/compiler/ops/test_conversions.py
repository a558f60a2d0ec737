"""Conversions on simulated ranks: value and gradient, against the definition of the types."""

import itertools

import pytest
import torch
from support.graphs.conversions import apply_step
from support.graphs.layouts import FlatCosts, cut, gradient_layout, put_together
from support.processes.ranks import CollectiveMismatchError, run_on_simulated_ranks
from torch import Tensor, fx

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.conversion_step import Step
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    PaddedShard,
    Shard,
    SpmdType,
    is_legal,
    layout_text,
)
from meshfold.ops.conversions import emit_step, start_all_reduce, wait_all_reduce
from meshfold.passes.price.conversions import CONVERSIONS, conversion_steps, has_conversion

ONE_AXIS: tuple[SpmdType, ...] = (
    INVARIANT,
    REPLICATE,
    PARTIAL,
    Shard(0),
    Shard(1),
    Shard(1, 2),
    Shard(1, 3),
)


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(
        tuple(MeshAxis(name, n) for name, n in zip(("dp", "tp", "cp"), sizes, strict=False))
    )


def check(mesh: Mesh, shape: tuple[int, ...], source: Layout, targets: list[Layout]) -> None:
    """Converts a random value to every target and pulls a random gradient back."""
    generator = torch.Generator().manual_seed(0)
    value = Value(shape, "float64", requires_grad=True)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    cotangent = torch.randn(shape, generator=generator, dtype=torch.float64)
    inputs = cut(x, source, mesh, generator)
    steps = [conversion_steps(value, source, target, FlatCosts(mesh)) for target in targets]
    cotangents = [cut(cotangent, gradient_layout(target), mesh, generator) for target in targets]

    def body(rank_mesh: RankMesh) -> list[tuple[Tensor, Tensor]]:
        out = []
        for k in range(len(targets)):
            x = inputs[rank_mesh.rank].requires_grad_()
            y = x * 1.0
            for step in steps[k]:
                y = apply_step(rank_mesh, y, step, value)
            (gradient,) = torch.autograd.grad(y, x, cotangents[k][rank_mesh.rank])
            out.append((y.detach(), gradient))
        return out

    results = run_on_simulated_ranks(mesh, body)
    for k, target in enumerate(targets):
        y = put_together([r[k][0] for r in results], shape, target, mesh)
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
        gradients = [r[k][1] for r in results]
        gradient = put_together(gradients, shape, gradient_layout(source), mesh)
        torch.testing.assert_close(gradient, cotangent, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_unsharded_becomes_a_padded_shard(size: int) -> None:
    """Three blocks of five units on 2, 3 and 4 ranks; rows of 7 beside a shard of another axis."""
    fused = PaddedShard(1, 3, 4)
    for source in (INVARIANT, REPLICATE):
        check(mesh_of(size), (2, 60), (source,), [(fused,)])
        layouts = [(source, Shard(1)), (source, INVARIANT)]
        for before in layouts:
            after = (PaddedShard(0), before[1])
            check(mesh_of(size, 2), (7, 6), before, [after])
            assert has_conversion(before[0], after[0]) and not has_conversion(after[0], before[0])


@pytest.mark.parametrize("source", [INVARIANT, REPLICATE])
@pytest.mark.parametrize("target", [Shard(0), Shard(1), Shard(1, 3)])
def test_a_shard_does_not_keep_the_full_tensor_alive(source: SpmdType, target: SpmdType) -> None:
    mesh, value = mesh_of(2), Value((4, 12), "float64", requires_grad=True)
    steps = conversion_steps(value, (source,), (target,), FlatCosts(mesh))

    def body(rank_mesh: RankMesh) -> int:
        y = torch.ones(4, 12, dtype=torch.float64)
        for step in steps:
            y = apply_step(rank_mesh, y, step, value)
        return y.untyped_storage().nbytes()

    assert run_on_simulated_ranks(mesh, body) == [2 * 12 * 8] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_pair_on_one_axis(size: int) -> None:
    mesh = mesh_of(size)
    for source in ONE_AXIS:
        check(mesh, (12, 72, 2), (source,), [(t,) for t in ONE_AXIS if t != source])


def test_the_table_is_complete() -> None:
    kinds = {(s.kind, t.kind) for s, t in itertools.permutations(ONE_AXIS, 2)}
    assert kinds == set(CONVERSIONS)


TYPES = (INVARIANT, REPLICATE, PARTIAL, Shard(0), Shard(0, 2), Shard(1), Shard(1, 4))


@pytest.mark.parametrize("source", [*itertools.product(TYPES, TYPES)], ids=layout_text)
def test_every_pair_of_layouts_on_two_axes(source: Layout) -> None:
    mesh, shape = mesh_of(2, 2), (8, 16)
    if not is_legal(shape, source, mesh.sizes):
        pytest.skip("illegal layout")
    targets = itertools.product(TYPES, TYPES)
    check(mesh, shape, source, [t for t in targets if is_legal(shape, t, mesh.sizes)])


def test_three_axes_on_one_dim() -> None:
    mesh = mesh_of(2, 2, 2)
    nested = (Shard(0), Shard(0, 2), Shard(0, 4))
    for source in itertools.permutations(nested):
        targets = [(INVARIANT, Shard(1), REPLICATE), (Shard(0, 4), Shard(0, 2), Shard(0))]
        check(mesh, (16, 4), source, targets)


def test_emitted_nodes_start_and_wait_by_axis_name() -> None:
    mesh = mesh_of(2, 2)
    value = Value((8, 16), "float64", requires_grad=True)
    graph = fx.Graph()
    context_node, x = graph.placeholder("context"), graph.placeholder("x")
    layout = (INVARIANT, PARTIAL)
    step = Step(1, PARTIAL, Shard(0), layout)
    y = emit_step(graph, context_node, x, step, mesh, value)
    graph.output(y)
    assert [n.name for n in graph.nodes if n.op == "call_function"] == [
        "start_reduce_scatter",
        "wait_reduce_scatter",
    ]
    module = fx.GraphModule({}, graph)
    local = torch.arange(128, dtype=torch.float64).reshape(8, 16)
    outputs = run_on_simulated_ranks(mesh, lambda rank_mesh: module(StepContext(rank_mesh), local))
    torch.testing.assert_close(outputs[1], 2 * local[4:])


def test_a_value_without_gradient_converts_without_backward_communication() -> None:
    mesh = mesh_of(2)
    ids = Value((8,), "int64")
    whole = torch.arange(8)

    def body(rank_mesh: RankMesh) -> tuple[Tensor, Tensor]:
        same = apply_step(rank_mesh, whole, Step(0, INVARIANT, REPLICATE, (INVARIANT,)), ids)
        part = apply_step(rank_mesh, whole, Step(0, INVARIANT, Shard(0), (INVARIANT,)), ids)
        return same, part

    results = run_on_simulated_ranks(mesh, body)
    assert all(same is whole for same, _ in results)
    assert torch.cat([part for _, part in results]).equal(whole)


def test_simulated_ranks_notice_a_mismatch() -> None:
    def body(rank_mesh: RankMesh) -> Tensor:
        x = torch.ones(2 + rank_mesh.rank)
        return rank_mesh.wait(rank_mesh.start_all_reduce(x, ("dp",)))

    with pytest.raises(CollectiveMismatchError, match="ranks started"):
        run_on_simulated_ranks(mesh_of(2), body)


def test_simulated_ranks_pass_on_an_exception() -> None:
    def body(rank_mesh: RankMesh) -> Tensor:
        if rank_mesh.rank == 1:
            raise KeyError("rank 1")
        return rank_mesh.wait(rank_mesh.start_all_reduce(torch.ones(2), ("dp",)))

    with pytest.raises(KeyError, match="rank 1"):
        run_on_simulated_ranks(mesh_of(2), body)


def test_an_early_read_shows_and_a_forgotten_wait_raises() -> None:
    def body(rank_mesh: RankMesh) -> Tensor:
        in_flight, _ = start_all_reduce(StepContext(rank_mesh), torch.ones(2), "dp", "none")
        assert in_flight.isnan().all()
        return in_flight

    with pytest.raises(AssertionError, match="never waited for"):
        run_on_simulated_ranks(mesh_of(2), body)


def test_what_stands_between_start_and_wait_overlaps_in_backward_too() -> None:
    order: list[str] = []

    def body(rank_mesh: RankMesh) -> None:
        x, context = torch.ones(4, requires_grad=True), StepContext(rank_mesh)
        in_flight = start_all_reduce(context, x, "dp", "all_reduce")
        z = x.sin()
        y = wait_all_reduce(context, in_flight, "dp", "all_reduce")
        if rank_mesh.rank == 0:
            assert in_flight[1].grad_fn is not None
            in_flight[1].grad_fn.register_prehook(lambda _: order.append("wait"))
            assert z.grad_fn is not None
            z.grad_fn.register_prehook(lambda _: order.append("sin"))
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda _: order.append("start"))
        (y + z).sum().backward()  # type: ignore[no-untyped-call]

    run_on_simulated_ranks(mesh_of(2), body)
    assert order == ["start", "sin", "wait"]
