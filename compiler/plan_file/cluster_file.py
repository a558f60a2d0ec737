"""Cluster files: a ClusterSpec as JSON. The file is for people: units are in the field names,
figures that are not given take the defaults of the dataclass, and anything unknown is refused.

    {"version": 1, "name": ..., "groups": [{"device": {...}, "num_nodes": ..., "devices_per_node":
    ..., "link": {...}}], "network": {...}}
"""

from pathlib import Path
from typing import Any

from pydantic_core import ValidationError

from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import ClusterSpec
from meshfold.plan_file.documents import CLUSTER_VERSION, RECORDS
from meshfold.plan_file.json_input import JsonFault, parse_json, read_json
from meshfold.plan_file.output_file import write_whole
from meshfold.plan_file.records import first_fault
from meshfold.plan_file.text import json_text

_CLUSTER = RECORDS.validator(ClusterSpec)


def cluster_from_json(text: str) -> ClusterSpec:
    """The spec in `text`. Raises ClusterSpecError with the field path of the first thing wrong: no
    JSON, an unknown or missing field, a wrong type or range, another version."""
    try:
        return _cluster(parse_json(text))
    except JsonFault as error:
        raise ClusterSpecError(str(error)) from error


def load_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file. Raises ClusterSpecError, also when it cannot be read."""
    try:
        return _cluster(read_json(path))
    except (JsonFault, ClusterSpecError) as error:
        raise ClusterSpecError(f"{path}: {error}; correct the file") from error


def cluster_to_json(spec: ClusterSpec) -> str:
    """The text of a cluster file, ending in a newline."""
    written = RECORDS.write(spec)
    return json_text({"version": written.pop("version"), **written})


def save_cluster(spec: ClusterSpec, path: Path) -> None:
    """Write a cluster file, whole or not at all. Raises OptionError or OSError."""
    write_whole(path, cluster_to_json(spec))


def _cluster(data: Any) -> ClusterSpec:
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int or version != CLUSTER_VERSION:
        raise ClusterSpecError(
            f"version: this meshfold reads cluster files of version {CLUSTER_VERSION}, "
            f"found {version!r}"
        )
    try:
        spec: ClusterSpec = _CLUSTER.validate_python(data)
    except ValidationError as error:
        raise ClusterSpecError(first_fault(error)) from error
    return spec
