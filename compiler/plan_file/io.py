"""The plan file: load_plan, save_plan, plan_from_json, plan_to_json. No torch.

Reading checks in this order: readable, JSON, version, the records (meshfold.plan_file.documents);
the first fault is told in one line with its JSON path.
Writing gives equal bytes for equal plans and replaces the file in one step.
"""

import os
from pathlib import Path

from pydantic_core import ValidationError

from meshfold.errors import PlanFormatError
from meshfold.ir.plan import PLAN_VERSION, Plan
from meshfold.plan_file.documents import plan_document, plan_from_document
from meshfold.plan_file.json_input import JsonFault, parse_json, read_json
from meshfold.plan_file.output_file import write_whole
from meshfold.plan_file.records import first_fault
from meshfold.plan_file.text import json_text

REMEDY = "plan it again with 'meshfold plan'"


def plan_to_json(plan: Plan) -> str:
    """The text of plan.json, ending in a newline."""
    return json_text(plan_document(plan))


def plan_from_json(text: str) -> Plan:
    """The plan in `text`. Raises PlanFormatError: JSON path, found and expected."""
    try:
        return _plan(parse_json(text))
    except JsonFault as error:
        raise PlanFormatError(f"{error}; {REMEDY}") from error


def _plan(data: object) -> Plan:
    _check_version(data)
    try:
        return plan_from_document(data)
    except ValidationError as error:
        raise PlanFormatError(f"{first_fault(error)}; {REMEDY}") from error


def _check_version(data: object) -> None:
    if not isinstance(data, dict) or "version" not in data:
        raise PlanFormatError(f"version: missing, so this is no plan file; {REMEDY}")
    found = data["version"]
    if type(found) is not int or found != PLAN_VERSION:
        raise PlanFormatError(
            f"version: found {found!r}, this meshfold reads {PLAN_VERSION}; {REMEDY}"
        )


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan file. Raises PlanFormatError, which names the file."""
    try:
        return _plan(read_json(Path(path)))
    except JsonFault as error:
        raise PlanFormatError(f"{os.fspath(path)}: {error}; {REMEDY}") from error
    except PlanFormatError as error:
        raise PlanFormatError(f"{os.fspath(path)}: {error}") from error


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan file: whole or not at all. Raises OSError."""
    write_whole(Path(path), plan_to_json(plan))
