"""The step time of a plan: one figure, its rates, how far such figures were from real runs."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from support.programs.plans import example_plan

from meshfold.cost_models.hardware.error_bands import ErrorBand, ErrorBands, Kind
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import OverlapRow, SimulatedStep
from meshfold.report import step_time
from meshfold.report.plan import summary_view
from meshfold.report.search import explain_view
from meshfold.report.step_time import band_text, precision_text, step_view

OVERLAP = (OverlapRow("all_gather", ("dp",), 3, 0.09, 0.01),)
SIMULATED = SimulatedStep(0.3, 0.02, 0.05, OVERLAP, 0, 0.0)


def text_of(view: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(view)
    return " ".join(stream.getvalue().split())


def with_flops(plan: Plan, dtype: str = "bfloat16") -> Plan:
    return replace(plan, model=replace(plan.model, flops=1e15, compute_dtype=dtype))


def known(bands: dict[Kind, ErrorBand], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "error_bands", lambda: ErrorBands(bands))


def test_the_sum_is_the_step_time_where_nothing_is_simulated() -> None:
    page = text_of(step_view(example_plan()))
    assert page.startswith("Step time 341 ms")
    assert "optimizer 5.10 ms" in page
    assert "layers added up, not simulated" in page
    assert "communication before overlap: dp 50.0 ms, tp 30.0 ms" in page


def test_the_simulated_step_is_the_step_time_and_the_sum_is_explained() -> None:
    plan = replace(example_plan(), simulated=SIMULATED)
    page = text_of(summary_view(plan))
    assert "Step time 370 ms" in page
    assert "compute 300 ms" in page
    assert "slower beside collectives 20.0 ms" in page
    assert "simulated: 90 % of communication hidden, 50.0 ms exposed" in page
    for of_the_sum in ("341 ms", "291 ms", "320 ms"):  # this plan, a baseline, the bound
        assert of_the_sum not in page
    assert "dp8 0.85 140 GB OOM" in page
    assert "optimality gap 6.50 % as the search adds up times; the memory limit costs" in page
    explained = text_of(explain_view(plan, plan.regions))
    assert "Step time as added up 341 ms" in explained
    assert "baselines, added up: data parallel: 291 ms" in explained
    assert "Step time as added up" not in text_of(explain_view(example_plan(), ()))


def test_the_bubble_of_a_simulated_pipeline_is_part_of_its_step() -> None:
    plan = replace(example_plan(), simulated=replace(SIMULATED, bubble_s=0.13))
    page = text_of(step_view(plan))
    assert page.startswith("Step time 500 ms")
    assert "bubble 130 ms" in page
    assert "bubble" not in text_of(step_view(replace(plan, simulated=SIMULATED)))


def test_rates_are_of_the_step_time_that_is_stated() -> None:
    plan = with_flops(replace(example_plan(), simulated=SIMULATED))
    found = plan.throughput
    assert found is not None
    # 16 x 4096 tokens in 0.37 s; 1e15 flops on 8 devices.
    assert found.tokens_per_s == pytest.approx(65536 / 0.37)
    assert found.samples_per_s == pytest.approx(16 / 0.37)
    assert found.tflops_per_device == pytest.approx(1e15 / 0.37 / 8 / 1e12)
    peak = plan.cluster.groups[0].device.peak("bfloat16")
    assert found.mfu == pytest.approx(1e15 / 0.37 / (8 * peak))
    assert "177 k tokens/s, 338 TFLOP/s per device, MFU" in text_of(step_view(plan))


def test_a_model_without_tokens_has_samples() -> None:
    plan = with_flops(example_plan())
    plan = replace(plan, model=replace(plan.model, inputs=(("image", (16, 3, 8, 8), "float32"),)))
    assert plan.model.tokens == 0
    assert "46.9 samples/s" in text_of(step_view(plan))


def test_a_plan_that_does_not_know_its_flops_has_no_rates() -> None:
    assert example_plan().throughput is None
    assert "MFU" not in text_of(step_view(example_plan()))


def test_the_band_of_the_kind_stands_beside_the_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Kind = ("test", "one pass", "several nodes")
    known({kind: ErrorBand(7, -0.02, -0.12, 0.09)}, monkeypatch)
    page = text_of(step_view(example_plan()))
    assert "Step time 341 ms (published runs of this kind: -12 % to +9 %)" in page
    assert "10th to 90th percentile of 7 runs on test, one pass, several nodes; mean -2 %" in page


def test_too_few_runs_make_no_band(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Kind = ("test", "one pass", "several nodes")
    known({kind: ErrorBand(2, -0.2, -0.3, -0.1)}, monkeypatch)
    page = text_of(step_view(example_plan()))
    assert "Step time 341 ms (2 published runs of this kind: -20 %)" in page
    assert "on test, one pass, several nodes: too few runs for a band" in page


def test_a_kind_without_runs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    known({}, monkeypatch)
    assert band_text(example_plan()) == "no published run of this kind was compared"
    page = text_of(step_view(example_plan()))
    assert "(no published run of this kind was compared)" in page and "percentile" not in page


def test_precision_is_said_in_one_line() -> None:
    plan = with_flops(replace(example_plan(), precision="bf16"))
    stored = [
        replace(r, parameters=tuple(replace(p, dtype="float32") for p in r.parameters))
        for r in plan.regions
    ]
    said = precision_text(replace(plan, regions=tuple(stored)))
    assert said == ("computes in bfloat16; weights, gradients' sum and Adam's states in float32")
    as_it_is = replace(plan, precision="model", optimizer="sgd")
    assert precision_text(as_it_is) == (
        "computes in bfloat16; weights and gradients' sum in bfloat16, as the model is"
    )
