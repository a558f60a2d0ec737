"""Memory by component, as it is printed."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, Group
from support.programs.plans import MEMORY, example_plan, simulated_plan

from meshfold.ir.plan import Plan, StageCosts, StagePlan
from meshfold.report.memory import COMPONENTS, components, memory_view


def page(plan: Plan, encoding: str = "utf-8") -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=stream, width=80).print(Group(*memory_view(plan)))
    stream.seek(0)
    return [line.rstrip() for line in stream.read().splitlines()]


def pipelined() -> Plan:
    """The second of two stages has half of the states, and logits."""
    plan = example_plan()
    other = replace(MEMORY, optimizer=MEMORY.optimizer // 2, loss=2**30)
    stages = tuple(
        StagePlan(plan.stages[0].runs, StageCosts(1.0, 2.0, 0.5, 0.0, 1, m.peak, m, 2**20))
        for m in (MEMORY, other)
    )
    return replace(plan, stages=stages, schedule="1f1b(2 x 2)")


def test_components_are_all_and_add_up() -> None:
    assert sum(amount for _, _, amount in components(MEMORY)) == MEMORY.peak
    assert len({letter for letter, _, _ in COMPONENTS}) == len(COMPONENTS)


def test_free_and_margin_are_what_the_device_has_beside_the_peak() -> None:
    lines = page(example_plan())
    assert "  free                 12.1 GB" in lines
    assert "  outside the budget   42.9 GB" in lines


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_pipeline_has_a_bar_and_a_curve_per_stage(encoding: str) -> None:
    lines = page(pipelined(), encoding)
    first, second, legend = lines[lines.index("Peak memory by stage") + 1 :][:3]
    assert first.startswith("  stage 0  30.9 GB  PP") and second.startswith("  stage 1")
    assert abs(first.count("O") - 2 * second.count("O")) <= 1
    assert "L" not in first and "L" in second
    assert "P parameters, G gradients, O optimizer states" in legend
    assert sum(line.startswith("  stage ") and "|" in line for line in lines) == 2


def test_one_pass_has_one_curve_and_no_stages() -> None:
    text = "\n".join(page(simulated_plan()))
    assert "Memory over the step, as simulated: most" in text and "by stage" not in text
    assert "over the step" not in "\n".join(page(example_plan()))
