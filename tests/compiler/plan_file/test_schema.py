"""The published JSON Schema is the one that the code checks with."""

import json
from importlib.resources import files

import jsonschema
import pytest
from support.programs.plans import example_plan

from meshfold.plan_file.io import plan_to_json
from meshfold.plan_file.schema import plan_schema, schema_text


def test_the_published_schema_is_current() -> None:
    published = files("meshfold.plan_file").joinpath("plan.schema.json").read_text(encoding="utf-8")
    assert published == schema_text(), "run 'make schema'"


def test_the_schema_takes_a_plan_and_nothing_more() -> None:
    validator = jsonschema.Draft202012Validator(plan_schema())
    validator.check_schema(plan_schema())
    document = json.loads(plan_to_json(example_plan()))
    validator.validate(document)
    for change in ({"version": 3}, {"surprise": 1}, {"mesh": "dp2"}):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(document | change)
