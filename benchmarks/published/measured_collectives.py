"""Measured collectives, read from a JSON file, and what the cost model says of each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import click
from pydantic import TypeAdapter, ValidationError

from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.cost_models.op_costs.collective_time import collective_s
from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import LinkSpec

DEFAULT = Path(__file__).parent / "collectives.json"
"""The measurements that come with the project."""


@dataclass(frozen=True)
class Curve:
    """Measured seconds of one collective on one machine, by size."""

    label: str
    kind: str
    """As in meshfold.cost_models.op_costs.collective_time.KINDS."""
    cluster: str
    """A preset."""
    nodes: int
    per_node: int
    """Ranks of the group on each node."""
    points: tuple[tuple[float, float], ...]
    """(bytes, seconds). Bytes: all_gather the output, reduce_scatter the input, else the tensor."""
    source: str
    node_gbit_per_s: float | None = None
    """Line rate of a node's network, where it is not that of the preset."""
    algorithm: str | None = None
    """ring, of an all-reduce: neither a tree nor a switch that reduces."""
    unsure: str | None = None
    """What the source does not say."""
    left_out: str | None = None
    """Why the curve does not count in a summary."""


@dataclass(frozen=True)
class CurveErrors:
    """Predicted / measured - 1 at every point; none for a preset that is not there."""

    curve: Curve
    errors: tuple[float, ...]

    @property
    def mean_absolute(self) -> float:
        return mean(map(abs, self.errors))

    @property
    def worst(self) -> float:
        """Signed."""
        return max(self.errors, key=abs)


def read_curves(path: Path) -> tuple[Curve, ...]:
    """The curves of a file. Raises click.ClickException, one line, for a file that is none."""
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        return TypeAdapter(tuple[Curve, ...]).validate_python(rows)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise click.ClickException(
            f'{path}: no curves ({first}); write {{"rows": [...]}}'
        ) from None


def errors_of(curve: Curve) -> CurveErrors:
    """What the cost model says, against what was measured."""
    try:
        link, network = _links(curve)
    except ClusterSpecError:
        return CurveErrors(curve, ())
    group = GroupShape(curve.nodes * curve.per_node, curve.nodes, curve.per_node, curve.per_node)

    def predicted_s(num_bytes: float) -> float:
        if curve.algorithm != "ring":
            return collective_s(curve.kind, num_bytes, group, link, network)
        halves = ("reduce_scatter", "all_gather")
        start_s = max(link.start_s, network.start_s) if curve.nodes > 1 else link.start_s
        return sum(collective_s(h, num_bytes, group, link, network) for h in halves) - start_s

    return CurveErrors(curve, tuple(predicted_s(size) / s - 1 for size, s in curve.points))


def summary_of(found: Sequence[CurveErrors]) -> tuple[int, float, float]:
    """(curves that count, mean over them of the mean absolute error, worst)."""
    counted = [e for e in found if e.errors and e.curve.left_out is None]
    return (
        len(counted),
        mean(e.mean_absolute for e in counted),
        max((e.worst for e in counted), key=abs),
    )


def _links(curve: Curve) -> tuple[LinkSpec, LinkSpec]:
    """In a node, and between nodes. Raises ClusterSpecError for an unknown preset."""
    text = curve.cluster
    if curve.node_gbit_per_s is not None:
        per_node = cluster(text).groups[0].devices_per_node
        text += f"@{curve.node_gbit_per_s / per_node:g}g"
    spec = cluster(text)
    return spec.groups[0].link, spec.network
