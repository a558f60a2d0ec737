"""Layers of one region that do different things: the split graph, and the numbers it gives."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.graphs.fold import mlp_stack
from support.models.hugging_face import tiny_model
from support.models.vision import images, small_resnet
from support.programs.local_programs import Rank, capture, local_part, on_ranks
from torch import Tensor

from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.strategy import RegionTyping, TpMode
from meshfold.passes.fold.find_regions import fold
from meshfold.passes.graph.variants import split_regions
from meshfold.passes.region.typing import MeshSearch
from meshfold.validation.float64_mode import float64_everywhere

PLAIN, SHARDED, AGAIN = "zero0, sp", "zero3", "zero3, recompute full"


def folded_stack() -> FoldedGraph:
    return fold(*mlp_stack(5))


def test_layers_that_agree_keep_their_region() -> None:
    folded = folded_stack()
    assert split_regions(folded, ["a"] * len(folded.instances)) == folded


def test_layers_that_differ_get_regions_of_their_own() -> None:
    folded = folded_stack()
    (region, first, count) = max(folded.runs, key=lambda run: run[2])
    choices = [k >= first + 2 for k in range(len(folded.instances))]
    split = split_regions(folded, choices)
    name = folded.regions[region].name
    assert [(split.regions[r].name, n) for r, k, n in split.runs if first <= k < first + count] == [
        (name + "1", 2),
        (name + "2", count - 2),
    ]
    assert all(
        split.regions[a.region].graph is folded.regions[b.region].graph
        and (a.sources, a.floats, a.scope) == (b.sources, b.floats, b.scope)
        for a, b in zip(split.instances, folded.instances, strict=True)
    )


def typings_of(search: MeshSearch, choice: str) -> Sequence[RegionTyping]:
    zero = 0 if choice == PLAIN else 3
    typings = search.solve(zero=zero, mode="sequence" if choice == PLAIN else "tensor").typings
    recompute = "full" if choice == AGAIN else "none"
    return [replace(typing, recompute=recompute) for typing in typings]


def mixed_program(folded: FoldedGraph, choices: Sequence[str]) -> EmittedProgram:
    cluster = resolve_cluster("local-cpu", 4)
    mesh = build_mesh(cluster, 2, 2)
    search = MeshSearch(folded, cluster, mesh, 4)
    by_choice = {choice: typings_of(search, choice) for choice in set(choices)}
    split = split_regions(folded, choices)
    typings = {
        new.region: by_choice[choice][old.region]
        for new, old, choice in zip(split.instances, folded.instances, choices, strict=True)
    }
    ordered = [typings[r] for r in range(len(split.regions))]
    return emit_typed(split, ordered, search.costs)


def mixed_choices(folded: FoldedGraph) -> list[str]:
    """All three in turn, in what repeats."""
    choices = [PLAIN] * len(folded.instances)
    for _, first, count in folded.runs:
        if count > 1:
            choices[first : first + count] = [(PLAIN, AGAIN, SHARDED)[k % 3] for k in range(count)]
    return choices


def check_gradients(
    rank: Rank, program: EmittedProgram, batch: dict[str, Tensor], expected: dict[str, Tensor]
) -> float:
    """The loss of a step whose gradients are those of one process."""
    own = rank.loss(batch)
    own.backward()
    for name, parameter in rank.parameters.items():
        whole = local_part(program, name, expected[name], rank.mesh)
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(grad, whole, rtol=1e-12, atol=1e-12)
    return own.item()


@pytest.mark.parametrize("degrees", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("head", ["tensor", "sequence"])
def test_a_data_parallel_trunk_under_a_sharded_head(degrees: tuple[int, int], head: TpMode) -> None:
    model, batch = small_resnet((3,)), images(4, 16, 8)
    captured = capture(copy.deepcopy(model), batch)
    loss = model(**batch)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    cluster = resolve_cluster("local-cpu", 4)
    search = MeshSearch(captured.graph, cluster, build_mesh(cluster, *degrees), 4)
    trunk = search.solve(zero=0, mode="data").typings
    last = search.solve(zero=0, mode=head).typings[-1]
    program = emit_typed(captured.graph, [*trunk[:-1], last], search.costs)
    assert program.stored["head.weight"][-1].is_shard
    assert not any(t.is_shard for t in program.stored["stem.weight"])

    def body(rank: Rank) -> float:
        # A rank may pass its part along dp alone: tp takes its own from that.
        count = degrees[0]
        part = {n: t.chunk(count)[rank.mesh.rank // (4 // count)] for n, t in batch.items()}
        return check_gradients(rank, program, part, expected)

    for found in on_ranks(small_resnet((3,)), captured, program, body):
        assert found == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_mix_trains_like_one_process(family: str) -> None:
    """Neighbours that differ in sequence parallelism, in what is stored, in what is kept."""
    model, batch = tiny_model(family, layers=4)
    with float64_everywhere():
        captured = capture(model, batch)
        loss = model(**batch).loss
    loss.backward()
    expected = {p.name: model.get_parameter(p.name).grad for p in captured.graph.parameters}
    program = mixed_program(captured.graph, mixed_choices(captured.graph))

    def body(rank: Rank) -> float:
        return check_gradients(rank, program, batch, expected)

    for found in on_ranks(model, captured, program, body):
        assert found == pytest.approx(loss.item(), rel=1e-12)
