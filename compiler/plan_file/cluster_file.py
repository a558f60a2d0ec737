"""ClusterSpec to JSON and back. The file is for people: units are in the field names, figures that
are not given take the defaults of the dataclass, and anything unknown is refused.

    {"version": 1, "name": ..., "groups": [{"device": {...}, "num_nodes": ..., "devices_per_node":
    ..., "link": {...}}], "network": {...}}
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import OVERLAP_SLOWDOWN, ClusterSpec, DeviceSpec, LinkSpec, NodeGroup

CLUSTER_VERSION = 1


class _Strict(BaseModel):
    # Strict: "8" is not 8 and true is not 1, also in a file written by hand.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DeviceModel(_Strict):
    """DeviceSpec in a file."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    matmul_efficiency: float
    memory_efficiency: float
    launch_s: float
    reserve_bytes: int
    source: str
    host_bytes_per_s: float = 0.0
    overlap_slowdown: float = OVERLAP_SLOWDOWN

    def spec(self) -> DeviceSpec:
        return DeviceSpec(**self.model_dump())


class RateModel(_Strict):
    """One point of LinkSpec.bytes_per_s_by_ranks."""

    ranks: int
    bytes_per_s: float


class LinkModel(_Strict):
    """LinkSpec in a file."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str
    start_s: float = 0.0
    ramp_bytes: float = 0.0
    reduce_bytes_per_s: float = 0.0
    bytes_per_s_by_ranks: list[RateModel] = []

    def spec(self) -> LinkSpec:
        points = tuple((p.ranks, p.bytes_per_s) for p in self.bytes_per_s_by_ranks)
        return LinkSpec(**{**self.model_dump(), "bytes_per_s_by_ranks": points})


class GroupModel(_Strict):
    """NodeGroup in a file."""

    device: DeviceModel
    num_nodes: int
    devices_per_node: int
    link: LinkModel

    def spec(self) -> NodeGroup:
        return NodeGroup(
            self.device.spec(), self.num_nodes, self.devices_per_node, self.link.spec()
        )


class ClusterModel(_Strict):
    """ClusterSpec in a file, and inside a plan file."""

    version: Literal[1] = 1
    name: str
    groups: list[GroupModel]
    network: LinkModel

    def spec(self) -> ClusterSpec:
        """Raises ClusterSpecError for a figure out of range."""
        return ClusterSpec(self.name, tuple(g.spec() for g in self.groups), self.network.spec())


def cluster_model(spec: ClusterSpec) -> ClusterModel:
    """The file form of `spec`; every field is written, whatever its default."""
    return ClusterModel(
        name=spec.name,
        groups=[
            GroupModel(
                device=DeviceModel(**{**vars(g.device), "peak_flops_per_s": _sorted(g.device)}),
                num_nodes=g.num_nodes,
                devices_per_node=g.devices_per_node,
                link=_link_model(g.link),
            )
            for g in spec.groups
        ],
        network=_link_model(spec.network),
    )


def cluster_to_json(spec: ClusterSpec) -> str:
    """The file text of `spec`, ending with a newline. Same spec, same bytes."""
    return json.dumps(cluster_model(spec).model_dump(), indent=2) + "\n"


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
        return ClusterModel.model_validate(data).spec()
    except ValidationError as error:
        first = error.errors()[0]
        field = _field_path(first["loc"])
        raise ClusterSpecError(f"{where}{field}: {first['msg'].lower()}") from error
    except ClusterSpecError as error:
        raise ClusterSpecError(f"{where}{error}") from error


def load_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file. Raises ClusterSpecError, also when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ClusterSpecError(f"{path}: cannot be read: {reason}") from error
    return cluster_from_json(text, path=str(path))


def _sorted(device: DeviceSpec) -> dict[str, float]:
    return dict(sorted(device.peak_flops_per_s.items()))


def _link_model(link: LinkSpec) -> LinkModel:
    points = [RateModel(ranks=n, bytes_per_s=rate) for n, rate in link.bytes_per_s_by_ranks]
    return LinkModel(**{**vars(link), "bytes_per_s_by_ranks": points})


def _field_path(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "top level"
