"""Predicted timelines: spans that fit the plan's figures, as text, JSON and trace."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support_plans import example_plan

from meshfold.cli import run
from meshfold.cost_models.schedules import Action, Pass
from meshfold.errors import OptionError
from meshfold.plan import Plan, StageFigures, StagePlan
from meshfold.plan_io import load_plan, save_plan
from meshfold.timeline import predicted_spans, spans_text, trace_json


def pipelined() -> Plan:
    """Two stages; the second takes twice as long."""
    plan = example_plan()
    stages = tuple(
        StagePlan(plan.stages[0].runs, StageFigures(f, 2 * f, 0.5, 0.0, held, 1))
        for f, held in ((1.0, 2), (2.0, 0))
    )
    return replace(plan, stages=stages, schedule="1f1b(2 x 2)")


def test_spans_follow_the_schedule() -> None:
    spans = {span.name: span for span in predicted_spans(pipelined()) if span.kind}
    assert (spans["0F0"].start_s, spans["0F0"].end_s) == (0.0, 1.0)
    assert (spans["1F0"].start_s, spans["1B0"].end_s) == (1.0, 7.0)
    assert (spans["0B0"].start_s, spans["0B0"].end_s) == (7.0, 9.0)
    assert (spans["1B1"].end_s, spans["0B1"].end_s) == (13.0, 15.0)
    assert {Action.parse(name).kind for name in spans} == {Pass.FORWARD, Pass.BACKWARD}
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
    assert len(json.loads(trace.read_text())["traceEvents"]) == 10
    assert run(["timeline", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 10
