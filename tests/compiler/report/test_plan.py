"""The page that shows a plan."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from support.programs.plans import example_plan

from meshfold.ir.mesh import Mesh
from meshfold.ir.plan import TimeEstimate
from meshfold.report.plan import plan_view, summary_view
from meshfold.report.search import explain_view


def page(view: RenderableType, width: int = 80, encoding: str = "utf-8") -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=stream, width=width).print(view)
    stream.seek(0)
    return [line.rstrip() for line in stream.read().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_and_says_everything(width: int) -> None:
    lines = page(plan_view(example_plan()), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for part in (
        "LlamaForCausalLM, 8.03 B parameters",
        "test-cluster: 2 x 4 test-80GB",
        "dp2 x tp4 (dp over network, tp over nvlink)",
        "dp2 x tp4+sp, zero3 (pinned: tp=4)",
        "Step time 341 ms",
        "communication before overlap: dp 50.0 ms, tp 30.0 ms",
        "Peak memory 30.9 GB of 42.9 GB, 72 %",
        "this plan dp2 x tp4+sp, zero3 341 ms 1.00 30.9 GB fits",
        "data parallel dp8 291 ms 0.85 140 GB OOM",
        "no plan of this search is faster than 320 ms: optimality gap 6.50 %; the memory limit "
        "costs 13.6 %",
        "decision tree 40 pruned: does not divide -3 left 37",
        "12 programs priced exactly, 5 of them did not fit",
        "dp8 500 ms - cannot be faster than 1.47 of this plan",
        "parameter lm_head.bias is unused",
        "B 32 model.layers.0 3.10 ms 6.30 ms dp 1.50 ms, tp 900 us 315 MB",
        "mlp.up_proj.weight 14336 x 4096 S0/4,S0 R,S0 14.7 MB",
        "input_layernorm S0,S1 S0,R all-gather reduce-scatter 16.8 MB 230 us",
        "1 parameter all-gather reduce-scatter 30.4 MB 1.50 ms",
        "B aten.cumsum.default",
    ):
        assert part in text, part


def test_the_margin_beside_the_budget_is_said() -> None:
    plan = example_plan()
    stated = " ".join(" ".join(page(summary_view(plan))).split())
    assert "the budget was stated; a device has 85.9 GB; predicted peaks of" in stated
    memory = replace(plan.memory, capacity=plan.cluster.budget_bytes)
    text = " ".join(" ".join(page(summary_view(replace(plan, memory=memory)))).split())
    assert "5 % of the device's 85.9 GB are left free as a margin, --memory states another" in text


def test_a_baseline_in_microbatches_that_is_faster_is_said() -> None:
    plan = replace(example_plan(), pins={"microbatches": 1})
    words = "ZeRO-3: faster in microbatches or stages, which a pin left out"
    sums = "ZeRO-3: faster as the search adds up times; the simulated step decided"
    for step_s, microbatches, is_said in ((0.3, 1, False), (0.34, 2, False), (0.3, 2, True)):
        strategy = replace(plan.baselines[1].strategy, microbatches=microbatches)
        row = replace(plan.baselines[1], strategy=strategy, step_s=step_s)
        text = " ".join(" ".join(page(summary_view(replace(plan, baselines=(row,))))).split())
        assert (words in text) == is_said
        assert (sums in text) == (step_s < 0.34 and microbatches == 1)
    free = summary_view(replace(plan, baselines=(replace(row, step_s=0.3),), pins={"zero": 1}))
    assert "best plan of that kind is slower" in " ".join(" ".join(page(free)).split())


def test_what_is_bucketed_is_said() -> None:
    plain, bucketed = (
        " ".join(page(summary_view(replace(example_plan(), reduce_bucket_bytes=n))))
        for n in (0, 25 * 10**6)
    )
    assert "buckets of" not in plain
    assert "reductions  in buckets of up to 25.0 MB" in bucketed


def test_the_summary_leaves_regions_out() -> None:
    text = "\n".join(page(summary_view(example_plan())))
    assert "Peak memory" in text
    assert "model.layers.0" not in text


def test_a_plan_for_one_device_has_no_axes_to_show() -> None:
    plan = replace(
        example_plan(),
        mesh=Mesh(()),
        regions=(),
        time=TimeEstimate(0.0, 0.0, 0.0, 0.0, {}),
        notes=(),
    )
    text = "\n".join(page(plan_view(plan)))
    assert "one rank" in text
    assert "before overlap" not in text
    assert "types per axis: none" in text


def test_a_region_that_runs_again_says_so() -> None:
    plan = example_plan()
    typing = replace(plan.regions[1].typing, recompute="full")
    regions = (plan.regions[0], replace(plan.regions[1], typing=typing))
    text = " ".join(" ".join(page(plan_view(replace(plan, regions=regions)), 120)).split())
    assert "model.layers.0, recompute full" in text
    assert "recompute" not in " ".join(page(plan_view(plan), 120))


def test_offload_is_shown_with_its_region_and_explained() -> None:
    plan = example_plan()
    first, layer = plan.regions
    strategy = replace(layer.strategy, recompute="selective", offload="optimizer")
    choice = replace(layer.choice, reason="taken for its bytes")
    layer = replace(
        layer,
        typing=replace(layer.typing, recompute="selective"),
        strategy=strategy,
        choice=choice,
    )
    planned = replace(plan, regions=(first, layer))
    shown = " ".join(" ".join(page(plan_view(planned), 160)).split())
    assert "model.layers.0, recompute selective, offload optimizer" in shown
    explained = " ".join(page(explain_view(planned, planned.regions), 160))
    assert "taken for its bytes" in " ".join(explained.split())
