"""Programs split into stages: every layer once, what crosses a boundary, what is recomputed."""

from collections import Counter
from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model
from support.models.padded import padded_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import Dependence, FoldedGraph, SourceKind
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.split.stage_graphs import StageGraph, stage_graphs
from meshfold.validation.float64_mode import float64_everywhere


@cache
def typed(family: str) -> tuple[FoldedGraph, tuple[RegionTyping, ...]]:
    """A model of three layers, T5 of three per stack, typed for one rank."""
    is_padded = family == "padded llama"
    model, batch = padded_model("llama") if is_padded else tiny_model(family, layers=3)
    with float64_everywhere():
        folded = capture(model, batch).graph
    cluster = resolve_cluster("local-cpu", 1)
    search = MeshSearch(folded, cluster, build_mesh(cluster, 1, 1), BATCH)
    return folded, tuple(search.solve(zero=0, mode="tensor").typings)


CASES = [
    ("gpt2", [0, 1, 4]),
    pytest.param("t5", [0, 2, 4, 6], marks=pytest.mark.slow),
]
"""Families, and the instances with which stages begin."""


def stages_of(family: str, first: list[int]) -> tuple[StageGraph, ...]:
    return stage_graphs(*typed(family), first)


@pytest.mark.parametrize(("family", "first"), CASES)
def test_every_layer_is_in_one_stage(family: str, first: list[int]) -> None:
    folded, _ = typed(family)
    stages = stages_of(family, first)
    own = [
        [n for n in stage.numbers if n >= begin] for stage, begin in zip(stages, first, strict=True)
    ]
    assert [n for numbers in own for n in numbers] == list(range(len(folded.instances)))
    for stage in stages:
        for k, instance in enumerate(stage.folded.instances):
            graph = stage.folded.regions[instance.region].graph
            assert len(instance.sources) == len(graph.slots)
            assert len(stage.typings[instance.region].ops) == len(graph.ops)
            sources = [s for s in instance.sources if s.kind is SourceKind.VALUE]
            assert all(s.instance < k for s in sources)


@pytest.mark.parametrize(("family", "first"), CASES)
def test_only_what_depends_on_the_batch_crosses(family: str, first: list[int]) -> None:
    stages = stages_of(family, first)
    assert stages[0].arrives == () and stages[-1].leaves == ()
    for before, stage in zip(stages, stages[1:], strict=False):
        assert before.leaves == stage.arrives
        assert all(b.value.depends is Dependence.BATCH for b in stage.arrives)
        names = {b.name for b in stage.arrives}
        read = {
            s.name
            for i in stage.folded.instances
            for s in (*i.sources, *(o.source for o in stage.folded.outputs))
            if s.kind is SourceKind.BOUNDARY
        }
        assert read == names
    # The one thing that a stage returns beside its boundary is the loss, and the last one does.
    assert [len(s.folded.outputs) - len(s.leaves) for s in stages] == [0] * (len(first) - 1) + [1]


def test_masks_of_a_padded_batch_are_made_where_they_are_read() -> None:
    """Inputs are in every stage; only hidden states cross."""
    for stage in stages_of("padded llama", [0, 1, 3])[1:]:
        (hidden,) = stage.arrives
        assert hidden.value.requires_grad
    again = stages_of("padded llama", [0, 1, 3])[1].folded.instances[0]
    assert {s.name for s in again.sources if s.kind is SourceKind.INPUT} == {
        "attention_mask",
        "position_ids",
    }


def test_rotary_tables_are_recomputed() -> None:
    for stage in stages_of("llama", [0, 1, 3])[1:]:
        copy = stage.folded.instances[0]
        assert stage.numbers[0] == 0 and stage.folded.regions[copy.region].name == "A_again"
        kinds = {s.kind for s in copy.sources}
        assert not kinds & {SourceKind.PARAMETER, SourceKind.INPUT}
        assert "model.embed_tokens.weight" not in {p.name for p in stage.folded.parameters}


def test_a_tied_embedding_is_in_its_two_stages() -> None:
    names_by_stage = [
        {p.name for p in stage.folded.parameters} for stage in stages_of("gpt2", [0, 1, 4])
    ]
    assert ["transformer.wte.weight" in names for names in names_by_stage] == [True, False, True]


def test_position_biases_are_in_every_stage_that_reads_them() -> None:
    """And the encoder's output goes past the stages that do not read it."""
    stages = stages_of("t5", [0, 2, 5, 6])
    holders = Counter(p.name for stage in stages for p in stage.folded.parameters)
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert holders[bias] == 2
    assert holders["encoder.block.1.layer.0.SelfAttention.q.weight"] == 1
    encoded = {b.name for b in stages[2].arrives} & {b.name for b in stages[3].arrives}
    assert encoded


def test_what_nobody_reads_is_in_the_first_stage() -> None:
    for stage in stages_of("t5", [0, 2, 4, 6])[1:]:
        used = {s.name for i in stage.folded.instances for s in i.sources}
        assert {p.name for p in stage.folded.parameters} <= used
    folded, _ = typed("t5")
    names = {p.name for stage in stages_of("t5", [0, 2, 4, 6]) for p in stage.folded.parameters}
    assert names == {p.name for p in folded.parameters}
