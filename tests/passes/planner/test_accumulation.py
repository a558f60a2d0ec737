"""Named baselines with the microbatches and stages that they need, against all of them."""

from functools import cache

from support.models.hugging_face import BATCH, tiny_model
from support.programs.schedules import nodes_of_two

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import PricedStrategy
from meshfold.ir.strategy import UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.planner.accumulation import MEGATRON_STAGES, fitting_rows
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.baselines import (
    MEGATRON,
    UniformPipeline,
    named_baselines,
    uniform_pipeline,
)

SIZE = 8 * BATCH
CLUSTER = nodes_of_two(4)
NAMED = named_baselines(CLUSTER)
PROBER = OpProber()


@cache
def graph() -> FoldedGraph:
    """Activations of its layers are most of its memory."""
    model, batch = tiny_model("gpt2", layers=6)
    return capture(model, {name: x.repeat(SIZE // BATCH, 1) for name, x in batch.items()}).graph


def request(memory_bytes: int) -> PlanRequest:
    options = CompileOptions(memory_bytes=memory_bytes)
    return PlanRequest(graph(), CLUSTER, options, "gpt2", SIZE, PROBER)


@cache
def problems() -> PipelineProblems:
    return PipelineProblems(graph(), CLUSTER, CompileOptions(), SIZE, PROBER)


@cache
def priced(**degrees: int) -> UniformPipeline:
    strategy = UniformStrategy(**degrees)
    found = uniform_pipeline(problems(), strategy)
    assert found is not None
    return found


def rows(memory_bytes: int, *known: PricedStrategy) -> dict[str, PricedStrategy]:
    return {row.name: row for row in fitting_rows(request(memory_bytes), known)}


def test_the_fewest_microbatches_that_fit() -> None:
    """Of 1, 2, 4, 8 (8 samples a rank) the first whose peak is within the budget."""
    peaks = {m: priced(dp=4, microbatches=m).peak_bytes for m in (1, 2, 4, 8)}
    assert sorted(peaks.values(), reverse=True) == list(peaks.values())
    found = rows(peaks[4])["DDP"]
    assert found.strategy == UniformStrategy(dp=4, microbatches=4)
    assert (found.peak_bytes, found.fits) == (peaks[4], True)
    assert found.step_s == priced(dp=4, microbatches=4).step_s
    assert rows(peaks[1])["DDP"].strategy.microbatches == 1
    assert "DDP" not in rows(peaks[8] - 1)


def test_rows_that_fit_stay_as_they_are_and_others_in_their_place() -> None:
    fits = PricedStrategy("DDP", NAMED["DDP"], 1.0, 1, True)
    tight = PricedStrategy("ZeRO-3", NAMED["ZeRO-3"], 1.0, 1, False, "1 B too much")
    uniform = PricedStrategy("best uniform strategy", NAMED["DDP"], 1.0, 1, True)
    peak = priced(dp=4, zero=3, microbatches=8).peak_bytes
    found = fitting_rows(request(peak), (fits, tight, uniform))
    assert [row.name for row in found][:2] == ["DDP", "ZeRO-3"]
    assert found[0] is fits and found[-1] is uniform
    assert found[1].fits and found[1].strategy.microbatches > 1
    # What fits in no form stays with what is said of it.
    assert tight in fitting_rows(request(1000), (fits, tight, uniform))


def test_megatron_takes_stages_where_microbatches_are_not_enough() -> None:
    alone = priced(dp=2, tp=2, sequence_parallel=True, microbatches=16).peak_bytes
    staged = {
        m: priced(dp=1, tp=2, pp=2, sequence_parallel=True, microbatches=m) for m in (8, 16, 32)
    }
    budget = alone - 1
    fitting = [x for x in staged.values() if x.peak_bytes <= budget]
    assert fitting, "stages keep less than microbatches alone"
    found = rows(budget)
    assert MEGATRON not in found
    assert found[MEGATRON_STAGES].step_s == min(x.step_s for x in fitting)
    assert found[MEGATRON_STAGES].strategy.pp == 2
    assert MEGATRON_STAGES not in rows(alone) and rows(alone)[MEGATRON].strategy.microbatches == 16
