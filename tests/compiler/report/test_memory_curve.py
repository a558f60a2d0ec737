"""Memory over a step: its peak is the predicted one, and how it is drawn."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from support.programs.plans import MEMORY, example_plan, simulated_plan

from meshfold.cost_models.pipeline.schedules import Schedule, resident_by_virtual_stage
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.plan import Plan, StageCosts, StagePlan
from meshfold.report.memory_curve import (
    PLOT_ROWS,
    MemoryCurve,
    MemoryPlot,
    MemoryRows,
    memory_curves,
)

SCHEDULES = (
    "gpipe(3 x 4)",
    "1f1b(3 x 6)",
    "zero_bubble(3 x 7)",
    "interleaved(2 x 4, 2 virtual stages)",
    "interleaved_zero_bubble(2 x 4, 2 virtual stages)",
    "zbv(2 x 5, 2 virtual stages)",
)


def printed(view: RenderableType, encoding: str = "utf-8") -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=stream, width=80).print(view)
    stream.seek(0)
    return stream.read().splitlines()


def pipelined(schedule: Schedule, kept: list[int]) -> Plan:
    """Stages that keep so many bytes of a microbatch, as many as the schedule has in flight at the
    moment that is worst for their device, beside states of 1000 bytes."""
    base, stages = example_plan(), list[StagePlan | None]([None] * schedule.num_stages)
    for device, moments in enumerate(resident_by_virtual_stage(schedule)):
        own = schedule.stages_of(device)
        worst = max(moments, key=lambda n: sum(c * kept[s] for c, s in zip(n, own, strict=True)))
        most = sum(c * kept[s] for c, s in zip(worst, own, strict=True))
        memory = MemoryEstimate(1000, 0, 0, most, 0, 0, 0, 0, 10**6)
        for in_flight, s in zip(worst, own, strict=True):
            costs = StageCosts(1.0, 2.0, 0.5, 0.0, in_flight, 1000 + most, memory, kept[s])
            stages[s] = StagePlan(base.stages[0].runs, costs)
    found = tuple(stage for stage in stages if stage is not None)
    return replace(base, stages=found, schedule=str(schedule))


@pytest.mark.parametrize("text", SCHEDULES)
@given(data=st.data())
def test_the_most_of_a_curve_is_the_predicted_peak(text: str, data: st.DataObject) -> None:
    schedule = Schedule.parse(text)
    kept = [data.draw(st.integers(1, 1000)) for _ in range(schedule.num_stages)]
    plan = pipelined(schedule, kept)
    curves = memory_curves(plan)
    assert len(curves) == schedule.num_devices
    for device, curve in enumerate(curves):
        costs = plan.stages[schedule.stages_of(device)[0]].costs
        assert costs is not None and curve.peak_bytes == costs.peak_bytes
        assert curve.samples[0][1] == curve.samples[-1][1] == 1000


def test_a_plan_that_says_too_little_has_no_curves() -> None:
    assert memory_curves(example_plan()) == ()
    plan = pipelined(Schedule.parse("1f1b(2 x 2)"), [1, 1])
    costs = plan.stages[0].costs
    assert costs is not None
    older = replace(plan.stages[0], costs=replace(costs, memory=None))
    assert memory_curves(replace(plan, stages=(older, plan.stages[1]))) == ()
    assert memory_curves(replace(plan, schedule="1f1b(4 x 2)")) == ()


def test_one_pass_has_the_curve_of_its_simulated_step() -> None:
    plan = simulated_plan()
    (curve,) = memory_curves(plan)
    assert plan.simulated is not None
    assert (curve.peak_bytes, curve.peak_s) == (plan.simulated.peak_bytes, plan.simulated.peak_s)


def test_components_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="components of memory add up to .* plan again"):
        StageCosts(1.0, 1.0, 1.0, 1.0, 1, 5, MEMORY)


CURVE = MemoryCurve("stage 0", ((0.0, 50), (0.5, 100), (0.75, 1)), 1.0)


@pytest.mark.parametrize(("encoding", "full", "least"), [("utf-8", "█", "▁"), ("ascii", "#", "_")])
def test_a_plot_reaches_from_nothing_to_the_peak(encoding: str, full: str, least: str) -> None:
    *rows, axis = printed(MemoryPlot(CURVE), encoding)
    assert len(rows) == PLOT_ROWS and rows[0].startswith("  100 B |") and axis.endswith("1.00 s")
    columns = ["".join(column) for column in zip(*(r.split("|")[1] for r in rows), strict=True)]
    assert columns[0] == " " * (PLOT_ROWS // 2) + full * (PLOT_ROWS // 2)
    assert set(columns[len(columns) * 5 // 8]) == {full}
    assert columns[-1].strip() == least


def test_rows_of_devices_have_one_scale() -> None:
    half = MemoryCurve("stage 1", ((0.0, 50),), 1.0)
    first, second, _ = printed(MemoryRows((CURVE, half)))
    assert "█" in first and set(second.split("|")[1]) == {"▅"}
