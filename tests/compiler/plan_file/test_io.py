"""The plan file: round trips, equal bytes, whole files, one-line faults."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.plans import BLOCK, example_plan

from meshfold.errors import PlanFormatError
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.mesh import Mesh
from meshfold.ir.plan import Plan, StagePlan, TimeEstimate
from meshfold.ir.strategy import RegionTyping, UniformStrategy
from meshfold.plan_file import io as plan_io
from meshfold.plan_file.io import load_plan, plan_from_json, plan_to_json, save_plan

COUNT = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)
TEXT = st.text(max_size=12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """The hand-made plan with figures and texts drawn at random."""
    plan = example_plan()
    time = TimeEstimate(*draw(st.tuples(*[SECONDS] * 4)), draw(st.dictionaries(TEXT, SECONDS)))
    strategy = draw(
        st.builds(
            UniformStrategy,
            dp=st.integers(1, 64),
            tp=st.integers(1, 64),
            zero=st.sampled_from([0, 3]),
            sequence_parallel=st.booleans(),
        )
    )
    return replace(
        plan,
        model=replace(plan.model, name=draw(TEXT), num_parameters=draw(COUNT)),
        strategy=strategy,
        pins=draw(st.dictionaries(TEXT, st.integers(0, 9), max_size=3)),
        seed=draw(COUNT),
        memory=MemoryEstimate(*draw(st.tuples(*[COUNT] * 9))),
        time=time,
        baselines=plan.baselines[: draw(st.integers(0, 3))],
        notes=tuple(draw(st.lists(TEXT, max_size=3))),
    )


@given(plans())
def test_round_trip(plan: Plan) -> None:
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert plan_to_json(plan_from_json(text)) == text


def test_a_plan_for_one_device_round_trips() -> None:
    region = replace(
        BLOCK,
        typing=RegionTyping(slots=((),), ops=(), outputs=((),)),
        parameters=(),
        conversions=(),
        communication_s={},
        op_targets=(),
        slot_names=(),
    )
    plan = replace(
        example_plan(),
        mesh=Mesh(()),
        strategy=UniformStrategy(),
        regions=(region,),
        stages=(StagePlan(()),),
    )
    assert plan_from_json(plan_to_json(plan)) == plan


def test_recomputation_is_in_the_file() -> None:
    plan = example_plan()
    typing = replace(BLOCK.typing, recompute="full")
    strategy = replace(BLOCK.strategy, recompute="full")
    full = replace(
        plan, regions=(plan.regions[0], replace(BLOCK, typing=typing, strategy=strategy))
    )
    text = plan_to_json(full)
    assert plan_from_json(text) == full
    document = json.loads(text)
    assert [r["strategy"]["recompute"] for r in document["regions"]] == ["none", "full"]
    document["regions"][0]["strategy"]["recompute"] = "half"
    with pytest.raises(PlanFormatError, match=r"recompute: input should be 'none', 'light', 'sel"):
        plan_from_json(json.dumps(document))


def test_people_come_first() -> None:
    text = plan_to_json(example_plan())
    keys = list(json.loads(text))
    assert keys[0] == "version"
    assert keys.index("memory") < keys.index("regions")
    assert '"strategy": {\n    "label": "dp2 x tp4+sp, zero3",\n' in text
    assert '"aten.linear.default  b,o  S0,R I,S0 -> S0,S2"' in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version: found 1, this meshfold reads 2; plan it again with 'meshfold p"),
        ({"version": 3}, "version: found 3, this meshfold reads 2; plan it again with"),
        ({"version": "1"}, "version: found '1', this meshfold reads 2"),
        ({"version": True}, "version: found True"),
        ({"seed": "0"}, 'seed: input should be a valid integer, found "0"'),
        ({"surprise": 1}, "surprise: unknown field"),
        ({"seed": None, "surprise": 1}, r"\(and 1 more\)"),
        ({"mesh": [{"name": "dp", "size": 0, "link": ""}]}, r"mesh\[0\].size: input should be gr"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    document = json.loads(plan_to_json(example_plan())) | change
    with pytest.raises(PlanFormatError, match=message):
        plan_from_json(json.dumps(document))


def test_a_missing_field_is_named() -> None:
    document = json.loads(plan_to_json(example_plan()))
    del document["memory"]["parameters_bytes"]
    with pytest.raises(PlanFormatError, match="memory.parameters_bytes: missing field"):
        plan_from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"version": 1'])
def test_text_that_is_no_json(text: str) -> None:
    with pytest.raises(PlanFormatError, match="not JSON"):
        plan_from_json(text)


@pytest.mark.parametrize("text", ["[]", "{}", "1", '{"model": 1}'])
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(PlanFormatError, match="version: missing, so this is no plan file"):
        plan_from_json(text)


def test_load_names_the_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    with pytest.raises(PlanFormatError, match=r"missing.json: cannot be read \(No such file"):
        load_plan(missing)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFormatError, match="binary.json: cannot be read .not UTF-8 text"):
        load_plan(binary)
    empty = tmp_path / "empty.json"
    empty.touch()
    with pytest.raises(PlanFormatError, match="empty.json: not JSON"):
        load_plan(empty)


def test_save_gives_equal_bytes_and_an_ordinary_file(tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    save_plan(example_plan(), first)
    save_plan(load_plan(first), second)
    assert first.read_bytes() == second.read_bytes()
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(first.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_failing_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    save_plan(example_plan(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(plan_io.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_plan(replace(example_plan(), seed=7), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_infinite_figure_is_not_written(tmp_path: Path) -> None:
    plan = replace(example_plan(), time=TimeEstimate(float("inf"), 0, 0, 0, {}))
    with pytest.raises(ValueError, match="finite"):
        save_plan(plan, tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())
