"""How far predictions were from published runs, by kind: what a plan prints beside its step time.

The figures are in error_bands.json, which `benchmarks/accuracy.py --bands` writes; an error is
predicted / published - 1. Kinds are told apart by

    family of devices   the first word of their name: A100, H100
    kind of plan        one pass, microbatches on one stage, stages
    spread              one device, one node, several nodes
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from meshfold.ir.cluster import ClusterSpec

PlanKind = Literal["one pass", "microbatches", "stages"]
Spread = Literal["one device", "one node", "several nodes"]
Kind = tuple[str, PlanKind, Spread]
"""Family, kind of plan, spread."""

FILE = "error_bands.json"


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """Errors of predictions, as fractions: 0.1 where the prediction is a tenth too long."""

    rows: int
    """Runs that were compared."""
    bias: float
    """The mean."""
    low: float
    """The 10th percentile."""
    high: float
    """The 90th percentile."""


@dataclass(frozen=True)
class ErrorBands:
    """The table."""

    bands: Mapping[Kind, ErrorBand]
    """Of step times."""
    memory: ErrorBand | None = None
    """Of peaks, over all kinds; None where no run says its own."""

    def of(self, cluster: ClusterSpec, kind: PlanKind) -> ErrorBand | None:
        """The band of plans of that kind on such a cluster; None where no run was compared."""
        return self.bands.get((family_of(cluster), kind, spread_of(cluster)))


@cache
def error_bands() -> ErrorBands:
    """The table that comes with the project."""
    text = resources.files("meshfold.cost_models.hardware").joinpath(FILE).read_text("utf-8")
    return read_bands(text)


def read_bands(text: str) -> ErrorBands:
    """The table in a text of JSON."""
    data = json.loads(text)
    found: dict[Kind, ErrorBand] = {
        (row["family"], row["kind"], row["spread"]): _band(row) for row in data["bands"]
    }
    memory = data.get("memory")
    return ErrorBands(MappingProxyType(found), _band(memory) if memory else None)


def _band(row: Mapping[str, Any]) -> ErrorBand:
    return ErrorBand(row["rows"], row["bias"], row["low"], row["high"])


def family_of(cluster: ClusterSpec) -> str:
    """Of the devices; those of a mixed cluster are joined by +, which no table holds."""
    return "+".join(dict.fromkeys(family_of_device(g.device.name) for g in cluster.groups))


def family_of_device(name: str) -> str:
    """ "H100" of "H100-SXM5-80GB"."""
    return name.split("-")[0]


def spread_of(cluster: ClusterSpec) -> Spread:
    """Whether devices talk, and beyond their node."""
    return spread(cluster.num_devices, cluster.num_nodes)


def spread(num_devices: int, num_nodes: int) -> Spread:
    """The same, of numbers."""
    if num_devices == 1:
        return "one device"
    return "one node" if num_nodes == 1 else "several nodes"
