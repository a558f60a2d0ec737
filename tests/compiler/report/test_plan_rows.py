"""Rows of plans: figures, table, JSON and CSV."""

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from support.programs.plans import example_plan

from meshfold.report.plan_rows import (
    PlanFigures,
    PlanRow,
    RowTable,
    Setting,
    rows_csv,
    rows_json,
    rows_view,
)


def figures(step_s: float = 0.5, tokens: int = 1_000_000) -> PlanFigures:
    """Of a million tokens in half a second on 8 devices."""
    rate = tokens / step_s
    return PlanFigures("dp8", step_s, 16 / step_s, rate, 0.4, 10**9, 0.01, 8e6 / (rate or 32))


def table(price: float | None = None) -> RowTable:
    rows = (
        PlanRow(Setting(8, 16, 512, 10**10), figures()),
        PlanRow(Setting(8, 16, 512, 10**9), None, "nothing fits"),
    )
    return RowTable("memory", rows, price)


def test_figures_of_a_plan() -> None:
    plan = example_plan()
    found = PlanFigures.of(plan)
    assert found.tokens_per_s == pytest.approx(16 * 4096 / plan.step_s)
    assert found.rate == found.tokens_per_s
    # 8 devices; so many device-seconds buy a million tokens
    assert found.device_s_per_million == pytest.approx(8 * plan.step_s / (16 * 4096) * 1e6)
    assert found.mfu is None and found.gap == plan.gap
    assert (found.strategy, found.peak_bytes) == (plan.strategy.label, plan.memory.peak)


def test_a_model_without_tokens_counts_samples() -> None:
    plan = example_plan()
    model = replace(plan.model, inputs=(("x", (16, 64), "float32"),))
    unproven = replace(plan.search, lower_bound_s=0.0)
    found = PlanFigures.of(replace(plan, model=model, search=unproven))
    assert found.tokens_per_s == 0 and found.gap is None
    assert found.rate == found.samples_per_s == pytest.approx(16 / plan.step_s)
    assert RowTable("devices", (PlanRow(Setting(8), found),)).unit == "samples"


def test_costs_by_hand() -> None:
    """2 M tokens/s on 8 devices: a million tokens take 4 device-seconds, which cost
    4 / 3600 x 9 = 0.01."""
    found = figures()
    assert found.device_s_per_million == 4.0
    assert found.cost(9.0) == pytest.approx(0.01)


def page(shown: RowTable) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(rows_view(shown))
    return stream.getvalue()


def test_the_table_fits_a_terminal_and_says_why_there_is_no_plan() -> None:
    lines = page(table()).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "memory plan step tokens/s MFU peak gap cost",
        "10.0 GB dp8 500 ms 2.00 M 40.0 % 1.00 GB 1.00 % 4.00",
        "1.00 GB none",
        "peak memory; optimality gap; cost of a million tokens, device-seconds",
        "memory 1.00 GB: nothing fits",
    ]
    priced = page(table(price=990.0))
    assert "at 990 per device-hour" in priced and " 1.10 " in priced


def test_json_and_csv_hold_the_same_rows() -> None:
    found = json.loads(rows_json(table(9.0), ["a note"]))
    assert found["over"] == "memory" and found["notes"] == ["a note"]
    first, second = found["rows"]
    assert first["strategy"] == "dp8" and first["price_per_million"] == pytest.approx(0.01)
    assert second["step_s"] is None and second["refusal"] == "nothing fits"
    rows = list(csv.DictReader(io.StringIO(rows_csv(table(9.0)))))
    assert [list(row) for row in rows] == [list(first), list(second)]
    assert rows[0]["devices"] == "8" and float(rows[0]["step_s"]) == 0.5
    assert rows[1]["step_s"] == "" and rows[0]["refusal"] == ""
