"""Emissions that share work are the same as without."""

from dataclasses import replace

from support.programs.schedules import captured_family, planned

from meshfold.codegen.emit.memo import EmissionMemo
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.refine.program_events import with_program_events


def test_every_variant_is_emitted_as_without_a_memo() -> None:
    graph = captured_family("llama").graph
    whole = planned("llama", "tp+sp")
    chunked = planned("llama", "tp+sp", parts=2)
    assert any(region.chunking.count > 1 for region in chunked.regions)
    assert all(
        region.typing == r.typing for region, r in zip(whole.regions, chunked.regions, strict=True)
    )
    memo = EmissionMemo(graph, whole)
    eager = [
        replace(r, chunking=w.chunking) for r, w in zip(chunked.regions, whole.regions, strict=True)
    ]
    for plan in (whole, chunked, whole, replace(whole, mode="eager", regions=tuple(eager))):
        assert emit(graph, plan, memo=memo).digest == emit(graph, plan).digest
        assert with_program_events(plan, graph, memo) == with_program_events(plan, graph)
