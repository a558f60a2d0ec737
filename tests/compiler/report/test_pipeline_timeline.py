"""Predicted timelines: spans that fit the plan's figures, as text, JSON and trace."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.programs.makespans import parse_action
from support.programs.plans import example_plan

from meshfold.cli.main import run
from meshfold.cost_models.pipeline.actions import Pass
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.plan import Plan, StageCosts, StagePlan
from meshfold.plan_file.io import load_plan, save_plan
from meshfold.report.pipeline_timeline import (
    both_text,
    bubble_share,
    predicted_spans,
    spans_json,
    spans_text,
    trace_json,
)
from meshfold.validation.measure_pipeline import measured_spans

ROOT = Path(__file__).resolve().parents[3]


def pipelined() -> Plan:
    """Two stages; the second takes twice as long."""
    plan = example_plan()
    stages = tuple(
        StagePlan(plan.stages[0].runs, StageCosts(f, 2 * f, 0.5, 0.0, held, 1))
        for f, held in ((1.0, 2), (2.0, 0))
    )
    return replace(plan, stages=stages, schedule="1f1b(2 x 2)")


def test_spans_follow_the_schedule() -> None:
    spans = {span.name: span for span in predicted_spans(pipelined()) if span.kind}
    assert (spans["0F0"].start_s, spans["0F0"].end_s) == (0.0, 1.0)
    assert (spans["1F0"].start_s, spans["1B0"].end_s) == (1.0, 7.0)
    assert (spans["0B0"].start_s, spans["0B0"].end_s) == (7.0, 9.0)
    assert (spans["1B1"].end_s, spans["0B1"].end_s) == (13.0, 15.0)
    assert {parse_action(name).kind for name in spans} == {Pass.FORWARD, Pass.BACKWARD}
    updates = [span for span in predicted_spans(pipelined()) if not span.kind]
    assert [(u.device, u.start_s, u.end_s) for u in updates] == [(0, 15.0, 15.5), (1, 13.0, 13.5)]


def test_text_has_a_row_per_device() -> None:
    first, second, last = spans_text(predicted_spans(pipelined())).splitlines()
    assert first.startswith("stage      0  |000000111111") and second.count("b") == 25
    assert first.rstrip("|").endswith("===") and "15.5 s as predicted" in last


def test_trace_has_microseconds() -> None:
    events = json.loads(trace_json(predicted_spans(pipelined())))["traceEvents"]
    (event,) = [e for e in events if e["name"] == "1B0"]
    assert (event["pid"], event["ts"], event["dur"]) == (1, 3e6, 4e6)


def test_measured_spans_stand_beside_the_predicted_ones() -> None:
    predicted = predicted_spans(pipelined())
    # 15 s from the first pass to the last, in which two devices work 6 s and 12 s.
    assert bubble_share(predicted) == pytest.approx(1 - 18 / 30)
    measured = [span.later(0.25) for span in predicted if span.kind]
    assert bubble_share(measured) == pytest.approx(bubble_share(predicted))
    text = both_text(predicted, measured)
    assert "15.5 s as predicted, bubble 40%" in text and "as measured, bubble 40%" in text
    assert len(text.splitlines()) == 6
    both = json.loads(spans_json(predicted, measured))
    assert [len(both[how]) for how in ("predicted", "measured")] == [10, 8]
    events = json.loads(trace_json(predicted, measured))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[3] == "device 1, measured" and len(names) == 4
    assert {e["ts"] for e in events if e["name"] == "1B0"} == {3e6, 3.25e6}


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_real_step_is_measured(tmp_path: Path) -> None:
    config = str(ROOT / "examples" / "configs" / "llama-tiny.json")
    pins = [f"--pin={pin}" for pin in ("pp=2", "microbatches=4", "schedule=1f1b")]
    path = tmp_path / "plan.json"
    assert run(["plan", config, "-c", "local-cpux2", "--batch=8", *pins, "-o", str(path)]) == 0
    plan = load_plan(path)
    spans = measured_spans(plan, config)
    expected = [str(a) for device in Schedule.parse(plan.schedule).actions() for a in device]
    assert [span.name for span in spans] == expected
    assert min(span.start_s for span in spans) == 0.0
    for a, b in pairwise(spans):
        assert a.device != b.device or a.start_s < a.end_s <= b.start_s
    assert 0 < bubble_share(spans) < 1


def test_what_has_no_stages_or_too_many_processes_is_not_measured() -> None:
    with pytest.raises(OptionError, match="in one pass, there are no stages to measure"):
        measured_spans(example_plan(), "a.json")
    axes = (MeshAxis("pp", 16),)
    with pytest.raises(MeshfoldError, match="--measured starts at most 8"):
        measured_spans(replace(pipelined(), mesh=Mesh(axes)), "a.json")


def test_a_plan_without_stages_is_refused() -> None:
    with pytest.raises(OptionError, match="in one pass, there are no stages to show"):
        predicted_spans(example_plan())


def test_the_command_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    save_plan(pipelined(), path)
    # A stage may hold nothing at the worst moment of its device.
    assert load_plan(path) == pipelined()
    assert run(["timeline", str(path), "--trace", str(trace)]) == 0
    assert "stage      1  |" in capsys.readouterr().out
    assert len(json.loads(trace.read_text())["traceEvents"]) == 10 + 2
    assert run(["timeline", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 10
