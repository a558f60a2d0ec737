"""The loss of a microbatch stays a pending sum on dp, where that changes nothing else."""

from dataclasses import replace

from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.op_graph import FoldedGraph, OutputInfo
from meshfold.ir.options import CompileOptions
from meshfold.ir.spmd import INVARIANT, PARTIAL
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.split.loss_sums import loss_place, pending_axes, with_pending_loss


def llama() -> FoldedGraph:
    return capture(*tiny_model("llama", layers=2)).graph


def emitted(pins: dict[str, int]) -> EmittedPipeline:
    graph = llama()
    plan = find_plan_for(
        graph,
        resolve_cluster("dgx-a100-80", 4),
        CompileOptions(pins=pins),
        model_name="llama",
        batch_size=BATCH,
        probe=OpProber(),
    )
    found = emit_plan(graph, plan)
    assert isinstance(found, EmittedPipeline)
    # A plan that is emitted is one that its checks take.
    assert plan.simulated is not None
    return found


def test_the_loss_is_summed_once_over_dp() -> None:
    found = emitted({"pp": 2, "dp": 2, "microbatches": 2})
    assert found.loss_axes == ("dp",) and ("dp",) in found.axis_sets()
    last = found.stages[-1]
    source = last.folded.outputs[0].source
    of_loss = last.region_of(source.instance)
    text = str(of_loss.graph.graph)
    assert "all_reduce" not in text


def test_without_dp_there_is_nothing_to_sum() -> None:
    assert emitted({"pp": 2, "tp": 2, "microbatches": 2}).loss_axes == ()


def test_a_loss_that_something_reads_is_summed_at_once() -> None:
    graph = llama()
    place = loss_place(graph)
    assert place is not None
    first = graph.outputs[0]
    twice = replace(graph, outputs=(first, OutputInfo("again", first.source, (), "float32")))
    assert loss_place(twice) is None


def test_only_what_an_op_leaves_as_summands_stays_so() -> None:
    graph = llama()
    place = loss_place(graph)
    assert place is not None
    assert pending_axes((PARTIAL, INVARIANT), ("dp", "tp")) == ("dp",)
    assert with_pending_loss.__doc__ is not None
