"""Texts in the plan file: layouts, ops, slots, JSON for people."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Layout, Shard
from meshfold.ir.strategy import OpTyping
from meshfold.plan_file.text import (
    json_text,
    read_layout,
    read_op,
    read_slot,
    write_layout,
    write_op,
    write_slot,
)

TYPES = st.one_of(
    st.sampled_from([INVARIANT, REPLICATE, PARTIAL]),
    st.builds(Shard, st.integers(0, 5), st.integers(1, 12)),
)
RULES = st.text("abIR/_012-", min_size=1, max_size=5).filter(lambda text: text != "-")
NAMES = st.text("abz._019", max_size=20)


def layouts(num_axes: int) -> st.SearchStrategy[Layout]:
    return st.tuples(*[TYPES] * num_axes)


@st.composite
def typings(draw: st.DrawFn) -> tuple[int, OpTyping]:
    num_axes = draw(st.integers(0, 3))
    rules = draw(st.tuples(*[RULES] * num_axes))
    inputs = tuple(draw(st.lists(layouts(num_axes), max_size=3)))
    outputs = tuple(draw(st.lists(layouts(num_axes), max_size=3)))
    return num_axes, OpTyping(rules, inputs, outputs)


@given(NAMES, typings())
def test_ops_round_trip(target: str, case: tuple[int, OpTyping]) -> None:
    num_axes, typing = case
    assert read_op(write_op(target, typing), num_axes) == (target, typing)


@given(NAMES, st.integers(0, 3).flatmap(layouts))
def test_slots_and_layouts_round_trip(name: str, layout: Layout) -> None:
    assert read_slot(write_slot(name, layout), len(layout)) == (name, layout)
    assert read_layout(write_layout(layout), len(layout)) == layout


def test_an_op_reads_as_one_short_line() -> None:
    column = OpTyping(
        ("b", "o"),
        ((Shard(0), REPLICATE), (INVARIANT, Shard(0, 3))),
        ((Shard(0), Shard(2)),),
    )
    line = write_op("aten.linear.default", column)
    assert line == "aten.linear.default  b,o  S0,R I,S0/3 -> S0,S2"
    assert write_op("", OpTyping((), (), ((),))) == "?  -  -> -"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no op"),
        ("aten.add.Tensor  b", "no op"),
        ("aten.add.Tensor -> b I", "no op"),
        ("aten.add.Tensor  b  I -> I -> I", "no op"),
        ("aten.add.Tensor  b,o  I -> I", "names 2 rules, the mesh has 1 axes"),
        ("aten.add.Tensor  b  I,I -> I", "has 2 types, the mesh has 1 axes"),
        ("aten.add.Tensor  b  X -> I", "no SPMD type"),
    ],
)
def test_a_broken_op_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_op(line, 1)


def test_a_broken_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="no slot"):
        read_slot("weight", 1)


def test_json_is_laid_out_for_people() -> None:
    value = {
        "short": [1, 2, 3],
        "record": {"name": "dp", "shape": [2, 4]},
        "ops": ["aten.add.Tensor  b  I -> I"],
        "deep": [[[1, 2]]],
        "long": ["x" * 60, "y" * 60],
        "none": {},
    }
    assert json_text(value).splitlines() == [
        "{",
        '  "short": [1, 2, 3],',
        '  "record": {"name": "dp", "shape": [2, 4]},',
        '  "ops": [',
        '    "aten.add.Tensor  b  I -> I"',
        "  ],",
        '  "deep": [',
        "    [[1, 2]]",
        "  ],",
        '  "long": [',
        f'    "{"x" * 60}",',
        f'    "{"y" * 60}"',
        "  ],",
        '  "none": {}',
        "}",
    ]


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(JSON)
def test_json_reads_back(value: Any) -> None:
    assert json.loads(json_text(value)) == value


def test_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"step_s": float("nan")})
