"""Cluster files: a ClusterSpec as JSON. The file is for people: units are in the field names,
figures that are not given take the defaults of the dataclass, and anything unknown is refused.

    {"version": 1, "name": ..., "groups": [{"device": {...}, "num_nodes": ..., "devices_per_node":
    ..., "link": {...}}], "network": {...}}
"""

import json
from pathlib import Path
from typing import Any

from pydantic_core import ValidationError

from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import ClusterSpec
from meshfold.plan_file.documents import CLUSTER_VERSION, RECORDS
from meshfold.plan_file.records import first_fault

_CLUSTER = RECORDS.validator(ClusterSpec)


def cluster_from_json(text: str, *, path: str = "") -> ClusterSpec:
    """The spec in `text`. `path` is named in messages only. Raises ClusterSpecError with the field
    path of the first thing wrong: no JSON, an unknown or missing field, a wrong type or range,
    another version."""
    where = f"{path}: " if path else ""
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterSpecError(f"{where}no JSON: {error}") from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != CLUSTER_VERSION:
        raise ClusterSpecError(
            f"{where}version: this meshfold reads cluster files of version {CLUSTER_VERSION}, "
            f"found {version!r}"
        )
    try:
        spec: ClusterSpec = _CLUSTER.validate_python(data)
    except ValidationError as error:
        raise ClusterSpecError(f"{where}{first_fault(error)}") from error
    return spec


def load_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file. Raises ClusterSpecError, also when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ClusterSpecError(f"{path}: cannot be read: {reason}") from error
    return cluster_from_json(text, path=str(path))
