"""Collectives as they ran beside those predicted: notes, pairs, reasons, and a real run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.models.factories import regression
from support.processes.pool import Pools
from support.programs.events import eager
from support.programs.memory import EmittedStep
from support.programs.plans import example_plan, example_step
from support.programs.schedules import nodes_of_two

from meshfold.api import find_plan
from meshfold.cli import torch_commands as cli_torch
from meshfold.cli.main import run
from meshfold.cost_models.simulation.step import simulate
from meshfold.cost_models.simulation.streams import Transfer
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.node_groups import ACROSS_NODES
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import CollectiveEvent
from meshfold.ir.strategy import UniformStrategy
from meshfold.plan_file.io import plan_to_json, save_plan
from meshfold.validation.measure_overlap import (
    Compared,
    MeasuredOverlap,
    Note,
    compare,
    measure_overlap,
    notes_of,
    overlap_json,
    overlap_text,
)

MODEL = "support.models.factories:regression"


def predicted(hidden_s: float, exposed_s: float, kind: str = "all_gather") -> Transfer:
    total_s = hidden_s + exposed_s
    of = CollectiveEvent(kind, ("dp",), "network", 1, total_s)
    return Transfer(of, 3, 0.0, 0.0, 0.0, total_s, exposed_s)


def note(lead_s: float, flight_s: float, queued: int = 0, kind: str = "all_gather") -> Note:
    return Note(kind, ("dp",), 0.0, lead_s, flight_s, queued)


def one(transfer: Transfer, *steps: Note) -> Compared:
    (found,), unmatched = compare([transfer], [[step] for step in steps])
    assert unmatched == 0
    return found


def test_what_was_to_hide_and_did() -> None:
    found = one(predicted(2.0, 0.0), note(2.0, 2.1), note(9.0, 9.0), note(3.0, 3.2))
    assert found.is_hidden and found.was_to_hide and not found.reason
    # Medians over steps.
    assert (found.hidden_s, found.exposed_s) == (3.0, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (note(0.1, 9.0), "started only 100 ms before it was needed"),
        (note(2.0, 9.0, queued=1), "queued behind another one in flight"),
        (note(2.0, 9.0, queued=3), "queued behind 3 others in flight"),
        (
            note(2.0, 9.0),
            "took 9.00 s, predicted 2.00 s, and there was 2.00 s of compute to overlap",
        ),
    ],
)
def test_what_was_to_hide_and_did_not_has_a_reason(step: Note, reason: str) -> None:
    found = one(predicted(2.0, 0.0), step)
    assert not found.is_hidden and found.reason.startswith(reason)


def test_what_was_exposed_anyway_needs_no_reason() -> None:
    assert not one(predicted(0.0, 2.0), note(0.0, 5.0)).reason


def test_pairs_are_made_by_kind_and_number() -> None:
    transfers = [predicted(1.0, 0.0), predicted(0.0, 1.0, "all_reduce"), predicted(2.0, 0.0)]
    log = [note(4.0, 4.0), note(5.0, 5.0), note(6.0, 6.0), note(0.0, 7.0, kind="all_to_all")]
    found, unmatched = compare(transfers, [log])
    # The all-reduce did not run; a third all-gather and an all-to-all were not predicted.
    assert [(c.predicted_hidden_s, c.hidden_s) for c in found] == [(1.0, 4.0), (2.0, 5.0)]
    assert unmatched == 3


def test_notes_are_taken_of_every_collective_that_is_waited_for() -> None:
    case = eager("llama", UniformStrategy(dp=4, zero=3))
    step = EmittedStep(case.model, case.captured, case.program, case.batch)
    mesh = step.runner.mesh
    with notes_of(mesh) as notes:
        step.forward().backward()
    right = [(t.collective.kind, t.collective.axes) for t in simulate(case.events).transfers]
    assert [(n.kind, n.axes) for n in notes] == right
    assert all(0 <= n.lead_s <= n.flight_s for n in notes)
    # Reductions are waited for at the end, so the first one meets all that follow.
    scatters = [n for n in notes if n.kind == "reduce_scatter"]
    assert scatters[0].lead_s > scatters[-1].lead_s
    assert "wait" not in vars(mesh)


def example() -> MeasuredOverlap:
    found, unmatched = compare(
        [predicted(2.0, 0.0), predicted(0.0, 1.0)], [[note(0.1, 9.0), note(0.0, 3.0)]]
    )
    return MeasuredOverlap(2, 5.0, 12.0, found, unmatched)


def test_text_and_json_name_what_failed() -> None:
    text = overlap_text(example())
    assert "one step on 2 local processes: 12.0 s, predicted 5.00 s" in text
    assert "1 were to hide and did not:" in text
    assert "all-gather over dp of layer 3: waited 8.90 s; started only 100 ms before" in text
    document = json.loads(overlap_json(example()))
    assert [c["reason"] != "" for c in document["collectives"]] == [True, False]
    fine = replace(example(), collectives=example().collectives[1:])
    assert overlap_text(fine).endswith("all that was to hide did\n")


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, inputs = regression()
    options = CompileOptions(pins={"dp": 2, "zero": 3})
    return find_plan(model, "local-cpux2", inputs, options=options)


@pytest.mark.multiprocess
def test_a_real_run_has_the_collectives_that_were_predicted(pools: Pools, plan: Plan) -> None:
    step_s, logs = pools.run(2, "support.processes.overlap:measured", plan_to_json(plan), MODEL)[0]
    assert plan.events is not None
    course = simulate(plan.events)
    found, unmatched = compare(course.transfers, logs)
    assert unmatched == 0 and len(found) == len(course.transfers) > 0
    # Waiting is part of the step.
    assert 0 < sum(c.exposed_s for c in found) <= 1.5 * step_s


@pytest.mark.multiprocess
@pytest.mark.slow
def test_steps_of_reductions_are_found_again(pools: Pools) -> None:
    model, inputs = regression()
    options = CompileOptions(pins={"dp": 4, "zero": 0, "hierarchical_all_reduce": "64B"})
    plan = find_plan(model, nodes_of_two(4), inputs, options=options)
    _, logs = pools.run(4, "support.processes.overlap:measured", plan_to_json(plan), MODEL)[0]
    assert plan.events is not None
    course = simulate(plan.events)
    found, unmatched = compare(course.transfers, logs)
    assert unmatched == 0 and len(found) == len(course.transfers)
    assert ("dp", ACROSS_NODES) in {c.axes for c in found}


def test_what_cannot_be_measured_is_refused() -> None:
    plan = example_plan()
    with pytest.raises(OptionError, match="--measured is for plans that run a batch in one pass"):
        measure_overlap(replace(plan, schedule="1f1b(2 x 2)"), MODEL)
    events = example_step()
    with_events = replace(plan, events=events, simulated=simulate(events).step)
    with pytest.raises(OptionError, match="no simulated step"):
        measure_overlap(plan, MODEL)
    wide = replace(plan.mesh.axes[0], size=16)
    with pytest.raises(MeshfoldError, match="the plan is for 16 processes, --measured starts at"):
        measure_overlap(replace(with_events, mesh=replace(plan.mesh, axes=(wide,))), MODEL)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    save_plan(example_plan(), path)
    assert run(["timeline", str(path), "--measured"]) == 2
    assert "--measured runs the model; say which with --model" in capsys.readouterr().err
    trace = ["--trace", str(tmp_path / "t.json")]
    assert run(["timeline", str(path), "--measured", "--model", MODEL, *trace]) == 2
    assert "--trace is of the prediction" in capsys.readouterr().err
    monkeypatch.setattr(cli_torch, "measure_overlap", lambda *_: example())
    assert run(["timeline", str(path), "--measured", "--model", MODEL]) == 0
    assert "1 were to hide and did not" in capsys.readouterr().out
