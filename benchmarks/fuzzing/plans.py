"""Right plan, cluster and configuration files, which cases change."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from support.programs.plans import simulated_plan

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.plan_file.documents import RECORDS
from meshfold.plan_file.io import plan_to_json

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "configs" / "llama-tiny.json"


@cache
def plan_text() -> str:
    """A plan file, with a simulated step."""
    return plan_to_json(simulated_plan())


def plan_document() -> Any:
    """A plan file, parsed."""
    return json.loads(plan_text())


def cluster_document() -> Any:
    """A cluster file, parsed."""
    return json.loads(json.dumps(RECORDS.write(resolve_cluster("dgx-h100x2"))))


def config_document() -> Any:
    """A configuration file, parsed."""
    return json.loads(LLAMA.read_text(encoding="utf-8"))


def with_plan(folder: Path) -> None:
    """plan.json in a folder."""
    (folder / "plan.json").write_text(plan_text(), encoding="utf-8")
