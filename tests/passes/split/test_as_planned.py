"""The graph that a plan is of."""

from support.programs.schedules import captured_family

from meshfold.passes.split.as_planned import rewritten

LOSS = "meshfold.linear_cross_entropy.default"


def test_a_loss_in_chunks_keeps_its_head_whole() -> None:
    folded = captured_family("llama").graph
    both = rewritten(folded, chunked_loss=True, slices=8)
    targets = {op.target for region in both.regions for op in region.graph.ops}
    sliced = {s.name for i in both.instances for s in i.sources if s.slice}
    assert LOSS in targets and "lm_head.weight" not in sliced and sliced
    assert "lm_head.weight" in {
        s.name
        for i in rewritten(folded, chunked_loss=False, slices=8).instances
        for s in i.sources
        if s.slice
    }
    assert rewritten(folded, chunked_loss=False, slices=1) is folded
    assert rewritten(both, chunked_loss=True, slices=8) is both
