"""Records as JSON: a field is declared once, in its class."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import pytest
from pydantic_core import ValidationError

from meshfold.ir.limits import Count, Seconds
from meshfold.ir.plan import Plan
from meshfold.plan_file.documents import RECORDS
from meshfold.plan_file.records import Form, Records, first_fault, text
from meshfold.plan_file.schema import plan_schema


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclass(frozen=True)
class Leg:
    start: Point
    seconds: Seconds
    pairs: tuple[tuple[Count, str], ...] = ()

    def __post_init__(self) -> None:
        if self.seconds > 100:
            raise ValueError("too slow")


@dataclass(frozen=True)
class Route:
    name: str
    legs: tuple[Leg, ...]
    kind: Literal["car", "foot"] = "foot"
    sizes: Mapping[str, float | None] = field(default_factory=dict)
    colour: complex = 0j

    @property
    def total_s(self) -> Seconds:
        """Of all legs."""
        return sum(leg.seconds for leg in self.legs)


RECORD = Route("home", (Leg(Point(1, 2), 3.5, ((1, "a"),)), Leg(Point(4), 0.5)), sizes={"a": None})
ROUTES = Records({complex: text(complex, str)}, {Route: Form(derived=("total_s",))})
DOCUMENT = {
    "total_s": 4.0,
    "name": "home",
    "legs": [
        {"start": {"x": 1, "y": 2}, "seconds": 3.5, "pairs": [[1, "a"]]},
        {"start": {"x": 4, "y": 0}, "seconds": 0.5, "pairs": []},
    ],
    "kind": "foot",
    "sizes": {"a": None},
    "colour": "0j",
}


def test_a_record_is_written_and_read_as_its_fields() -> None:
    document = ROUTES.write(RECORD)
    assert document == DOCUMENT and list(document) == list(DOCUMENT)
    assert ROUTES.validator(Route).validate_python(json.loads(json.dumps(document))) == RECORD


def test_a_new_field_is_one_line_in_its_class() -> None:
    @dataclass(frozen=True)
    class Longer(Route):
        tolls: tuple[Count, ...] = ()

    assert ROUTES.write(Longer("a", (), tolls=(3,)))["tolls"] == [3]
    found = ROUTES.validator(Longer).validate_python({"name": "a", "legs": [], "tolls": [3]})
    assert found == Longer("a", (), tolls=(3,))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": 1}, "name: input should be a valid string, found 1"),
        ({"surprise": 1}, "surprise: unknown field"),
        ({"legs": [{"start": {"x": 1}}]}, "legs[0].seconds: missing field"),
        ({"legs": [{"start": {"x": "1"}, "seconds": 1}]}, "legs[0].start.x: input should be a val"),
        ({"legs": [{"start": {"x": 1}, "seconds": -1}]}, "legs[0].seconds: input should be great"),
        ({"legs": [{"start": {"x": 1}, "seconds": 101}]}, "legs[0]: too slow"),
        ({"legs": {}}, "legs: input should be a valid tuple"),
        ({"kind": "train"}, "kind: input should be 'car' or 'foot', found \"train\""),
        ({"sizes": {"a": True}}, "sizes.a: input should be a valid number, found true"),
        ({"colour": "red"}, "colour: complex() arg is a malformed string"),
        ({"total_s": 5.0}, "total_s: the file says 5.0, the rest gives 4.0; edit both or plan aga"),
        ({"name": 1, "legs": 1}, "name: input should be a valid string, found 1 (and 1 more)"),
    ],
)
def test_the_first_fault_is_named_with_its_path(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ROUTES.validator(Route).validate_python(DOCUMENT | change)
    assert first_fault(caught.value).startswith(fault)


def test_every_field_of_a_plan_is_in_its_file_and_in_the_schema() -> None:
    schema = plan_schema()
    for cls in RECORDS.classes(Plan):
        form = RECORDS.form(cls)
        properties = (schema if cls is Plan else schema["$defs"][cls.__name__])["properties"]
        names = [f.name for f in fields(cls)] if hasattr(cls, "__dataclass_fields__") else []
        shown = {name + form.suffix for name in names if name not in form.hidden}
        assert shown <= set(properties) == set(RECORDS.keys(cls))
