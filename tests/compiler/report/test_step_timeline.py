"""The timeline of a step without a pipeline: rows, table, JSON, trace."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.programs.plans import example_plan, example_step

from meshfold.cli.main import run
from meshfold.cost_models.simulation.step import simulate
from meshfold.errors import OptionError
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import save_plan
from meshfold.report.pipeline_timeline import COLUMNS
from meshfold.report.step_timeline import timeline_of


def simulated_plan() -> Plan:
    events = example_step()
    return replace(example_plan(), events=events, simulated=simulate(events).step)


def rows_of(text: str) -> dict[str, str]:
    """The cells of every stream by its name."""
    lines = [line for line in text.splitlines() if line.endswith("|")]
    return {line.split("|")[0].strip(): line.split("|")[1] for line in lines}


def test_rows_are_streams_and_memory() -> None:
    rows = rows_of(timeline_of(simulated_plan()).text)
    assert list(rows) == ["compute", "nvlink", "infiniband", "memory"]
    assert {len(row) for row in rows.values()} == {COLUMNS}
    compute = rows["compute"].replace(" ", "")
    assert "".join(sorted(compute, key="FB=".index)) == compute
    # A forward is a third of a layer; gathers stay hidden behind it, reductions behind backwards.
    assert 0.25 < compute.count("F") / COLUMNS < 0.4
    assert set(rows["infiniband"]) <= set("gGsS ") and rows["infiniband"].count("s") > 20
    # A gigabyte of states is most of it, whatever else comes and goes.
    assert set(rows["memory"]) == {"█"} or "▇" in rows["memory"]


def test_the_table_adds_up_to_the_figures() -> None:
    plan = simulated_plan()
    assert plan.simulated is not None
    text = timeline_of(plan).text
    assert "slowed down by" in text and "peak memory" in text
    document = json.loads(timeline_of(plan).json)
    exposed_s = sum(c["exposed_s"] for c in document["collectives"])
    assert exposed_s == pytest.approx(document["exposed_s"])
    parts = document["compute_s"] + document["contention_s"] + document["exposed_s"]
    assert parts == pytest.approx(document["step_s"])
    # One line per kind and axes; the gather of the embedding's neighbour is exposed, no other.
    (row,) = [line for line in text.splitlines() if line.startswith("all-gather") and "dp" in line]
    assert row.split()[2] == "63"


def test_memory_falls_where_activations_go() -> None:
    events = replace(example_step(), fixed_bytes=0)
    peak = simulate(events).step
    row = rows_of(timeline_of(replace(simulated_plan(), events=events)).text)["memory"]
    assert "█" in row and len(set(row)) > 2
    assert row.index("█") == pytest.approx(peak.peak_s / peak.step_s * COLUMNS, abs=25)


def test_the_trace_has_a_thread_per_stream() -> None:
    plan = simulated_plan()
    events = json.loads(timeline_of(plan).trace)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["compute", "nvlink", "infiniband"]
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert plan.simulated is not None and last == pytest.approx(1e6 * plan.simulated.step_s)
    assert any(e["ph"] == "C" and e["args"]["bytes"] > 10**9 for e in events)


def test_a_plan_without_events_is_refused() -> None:
    with pytest.raises(OptionError, match="the plan has no simulated step: its file is of"):
        timeline_of(example_plan())


def test_the_command_shows_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    save_plan(simulated_plan(), path)
    assert run(["timeline", str(path), "--trace", str(trace)]) == 0
    assert "reduce-scatter" in capsys.readouterr().out
    assert json.loads(trace.read_text())["displayTimeUnit"] == "ms"
    assert run(["timeline", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["collectives"]) == 63 + 32 + 32 + 1
    save_plan(example_plan(), path)
    assert run(["timeline", str(path)]) == 2
    assert capsys.readouterr().err.startswith(
        "meshfold timeline: dp2 x tp4+sp, zero3: the plan has no"
    )


def test_links_and_kinds_that_nobody_knows_are_shown_all_the_same() -> None:
    """A plan that was edited by hand may name them."""
    plan = simulated_plan()
    network = replace(plan.cluster.network, name="[/]")
    odd = replace(plan, cluster=replace(plan.cluster, network=network))
    assert json.loads(timeline_of(odd).trace)["traceEvents"]
