"""Two plans side by side, and why a plan is what it is: on the terminal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.programs.plans import BLOCK, GIB, MEMORY, example_plan, simulated_plan

from meshfold.cli.main import cli, run
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import INVARIANT
from meshfold.ir.strategy import UniformStrategy
from meshfold.plan_file.io import save_plan
from meshfold.report.plan_diff import compare_plans


def other_plan() -> Plan:
    plan = example_plan()
    (parameter,) = BLOCK.parameters
    stored = (INVARIANT, parameter.stored[1])
    block = replace(
        BLOCK,
        strategy=UniformStrategy(dp=2, tp=4, sequence_parallel=True),
        choice=replace(BLOCK.choice, name="dp2 x tp4+sp"),
        parameters=(replace(parameter, stored=stored),),
    )
    memory = replace(MEMORY, parameters=4 * GIB)
    return replace(plan, regions=(plan.regions[0], block), memory=memory)


def saved(plan: Plan, folder: Path, name: str) -> str:
    save_plan(plan, folder / name)
    return str(folder / name)


def test_equal_plans_have_no_choices_that_differ() -> None:
    found = compare_plans(example_plan(), example_plan())
    assert found.choices == ()
    assert all(figure.first == figure.second for figure in found.figures)


def test_differences_go_down_to_the_parameter() -> None:
    found = compare_plans(example_plan(), other_plan())
    assert [(d.what, d.first, d.second) for d in found.choices] == [
        ("region B", "dp2 x tp4+sp, zero3", "dp2 x tp4+sp"),
        ("region B, mlp.up_proj.weight", "S0/4,S0", "I,S0"),
    ]
    figures = {figure.what.strip(): figure for figure in found.figures}
    assert figures["parameters"].first != figures["parameters"].second
    assert figures["step time"].first == figures["step time"].second


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("mode", "scheduled"),
        ("precision", "bf16"),
        ("optimizer", "sgd"),
        ("schedule", "1f1b(2 x 4)"),
    ],
)
def test_what_the_whole_plan_says_is_compared(what: str, value: str) -> None:
    plan = example_plan()
    found = compare_plans(plan, replace(plan, **{what: value}))  # type: ignore[arg-type]
    assert [(d.what, d.first, d.second) for d in found.choices] == [
        (what, getattr(plan, what), value)
    ]


def test_simulated_steps_are_compared() -> None:
    plan = simulated_plan()
    assert plan.simulated is not None
    longer = replace(plan.simulated, exposed_s=plan.simulated.exposed_s + 1.0)
    found = compare_plans(plan, replace(plan, simulated=longer))
    (row,) = [figure for figure in found.figures if figure.what == "step time"]
    assert row.first != row.second and found.choices == ()
    # A sum is held against a sum.
    names = [f.what for f in compare_plans(plan, replace(plan, simulated=None)).figures]
    assert names[0] == "step as added up" and "step time" not in names


def test_diff_says_so_in_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = saved(example_plan(), tmp_path, "first.json")
    second = saved(other_plan(), tmp_path, "second.json")
    assert run(["diff", first, first]) == 0
    assert "Both plans choose the same." in capsys.readouterr().out
    assert run(["diff", first, second]) == 1
    out, err = capsys.readouterr()
    assert "mlp.up_proj.weight" in out
    words = "choose differently; 'meshfold explain' says why each does"
    assert err == f"meshfold diff: {first} and {second} {words}\n"
    assert run(["diff", first, second, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["choices"]) == 2


def test_explain_names_the_losers_and_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(example_plan(), tmp_path, "plan.json")
    assert run(["explain", path, "B"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Region B 32 x model.layers.0" in out and "Region A" not in out
    assert "dp2 x tp4, zero3 13.1 ms 996 MB 600 us slower and holds more" in out
    assert "pruned: does not divide" in out
    assert run(["explain", path]) == 0
    assert "Region A" in capsys.readouterr().out


def test_explain_of_an_unknown_region_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(example_plan(), tmp_path, "plan.json")
    assert run(["explain", path, "Z"]) == 2
    assert capsys.readouterr().err == f"meshfold explain: no region Z in {path}; it has A, B\n"


def test_help_has_an_example() -> None:
    for command in ("explain", "diff", "check"):
        assert "Example:" in CliRunner().invoke(cli, [command, "--help"]).output
