"""The published JSON Schema of a plan file, made of the records that a plan is."""

import ast
import inspect
import json
import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from meshfold.ir.plan import PLAN_VERSION, Plan
from meshfold.plan_file.documents import RECORDS


def plan_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a plan file. Descriptions are the docstrings of classes
    and fields."""
    schema = GenerateJsonSchema().generate(RECORDS.core_schema(Plan))
    for cls in RECORDS.classes(Plan):
        record = schema if cls is Plan else schema["$defs"][cls.__name__]
        record["description"] = _line(cls.__doc__ or "")
        record.pop("title", None)
        for name, text in _descriptions(cls).items():
            record["properties"][name]["description"] = text
        for of in record["properties"].values():
            of.pop("title", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"meshfold plan, version {PLAN_VERSION}",
        **schema,
    }


def _descriptions(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a class, and of its derived properties, by key."""
    form = RECORDS.form(cls)
    found = {name: getattr(cls, name).__doc__ or "" for name in form.derived}
    found |= _field_docs(cls)
    keys = {name + form.suffix: text for name, text in found.items() if name not in form.hidden}
    if form.shown is not None:
        keys |= _field_docs(form.shown)
    return {key: _line(text) for key, text in keys.items() if text}


def _field_docs(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, doc in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(doc.value, ast.Constant)
            found[field.target.id] = str(doc.value.value)
    return found


def _line(text: str) -> str:
    """The first paragraph, on one line, without the stop of a single sentence."""
    line = " ".join(text.split("\n\n")[0].split())
    return line.removesuffix(".") if line.count(". ") == 0 else line


def schema_text() -> str:
    """The published file compiler/plan_file/plan.schema.json, byte for byte."""
    return json.dumps(plan_schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
