"""Devices and clusters by name. The facts and where each comes from are in presets.json.

resolve_cluster("dgx-h100x16")          16 nodes of 8 H100
resolve_cluster("dgx-h100x16@200g")     the same over a network of 200 Gb/s per device
resolve_cluster("local-cpux4")          4 processes on this machine
resolve_cluster("my_cluster.json", 16)  16 devices of a described cluster
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import (
    OVERLAP_SLOWDOWN,
    ClusterSpec,
    DeviceSpec,
    LinkSpec,
    NodeGroup,
    RankRate,
)
from meshfold.plan_file.cluster_file import load_cluster

_COUNTED = re.compile(r"^(?P<name>.+)x(?P<count>-?[0-9]{1,18})$")
_RATE = re.compile(r"^[0-9]{1,6}(\.[0-9]{1,3})?g$")


@dataclass(frozen=True)
class Preset:
    """A cluster by name. `one_node`: more devices mean more processes on one node, not nodes."""

    name: str
    group: NodeGroup
    network: LinkSpec
    line_gbit_per_s: float
    """Line rate of the network per device, one direction; 0 where there is none."""
    one_node: bool
    suffix: str = ""
    """Behind the name of a cluster: the rate that was asked for."""

    def cluster(self, count: int) -> ClusterSpec:
        """`count` nodes, or processes where the preset is one node."""
        if self.one_node:
            group = replace(self.group, devices_per_node=count)
        else:
            group = replace(self.group, num_nodes=count)
        name = self.name if count == 1 else f"{self.name}x{count}"
        return ClusterSpec(name + self.suffix, (group,), self.network)

    def at_rate(self, gbit_per_s: float) -> "Preset":
        """The same over a network of another line rate, of which as large a share is reached."""
        if gbit_per_s == self.line_gbit_per_s:
            return self
        network = _at_rate(self.network, self.line_gbit_per_s, gbit_per_s)
        return replace(self, network=network, line_gbit_per_s=gbit_per_s)


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by name."""
    text = (
        resources.files("meshfold.cost_models.hardware").joinpath("presets.json").read_text("utf-8")
    )
    data = json.loads(text)
    devices = {name: _device(name, facts) for name, facts in data["devices"].items()}
    links = {name: _link(name, facts) for name, facts in data["links"].items()}
    found = {}
    for name, row in data["presets"].items():
        network, _, rate = row["network"].partition("@")
        preset = Preset(
            name=name,
            group=NodeGroup(devices[row["device"]], 1, row["devices_per_node"], links[row["link"]]),
            network=links[network],
            line_gbit_per_s=data["links"][network].get("line_gbit_per_s", [0])[0],
            one_node=row.get("one_node", False),
        )
        found[name] = preset.at_rate(float(rate.rstrip("g"))) if rate else preset
    return MappingProxyType(found)


def cluster(text: str) -> ClusterSpec:
    """The preset `text`, with "xN" behind it for N nodes (local-cpu: N processes) and "@Rg" for a
    network of R Gb/s per device.

    Raises ClusterSpecError for an unknown name, naming the nearest, for N below 1, and for a rate
    that is none.
    """
    preset, count = _parse(text)
    return preset.cluster(1 if count is None else count)


def resolve_cluster(text: str, num_devices: int | None = None) -> ClusterSpec:
    """The cluster that a person means by `text`: a preset, with or without "xN" and "@Rg" as for
    `cluster`, or the path of a JSON file. `num_devices` takes that many of its devices: part of one
    node, or whole nodes; a preset without "xN" grows to them.

    Raises ClusterSpecError for an unknown preset (naming the nearest), a bad file, zero or
    negative devices, more devices than there are, or a number that is not whole nodes.
    """
    if num_devices is not None and num_devices < 1:
        raise ClusterSpecError(f"devices: must be 1 or more, got {num_devices}")
    if text.endswith(".json") or "/" in text:
        described = load_cluster(Path(text))
        return described if num_devices is None else subset(described, num_devices)
    preset, count = _parse(text)
    if num_devices is None:
        return preset.cluster(1 if count is None else count)
    if count is None:
        per_node = preset.group.devices_per_node
        count = num_devices if preset.one_node else -(-num_devices // per_node)
    return subset(preset.cluster(count), num_devices)


def subset(spec: ClusterSpec, num_devices: int) -> ClusterSpec:
    """The first `num_devices` devices of `spec`: part of one node, or whole nodes.

    Raises ClusterSpecError otherwise.
    """
    if num_devices < 1:
        raise ClusterSpecError(f"devices: must be 1 or more, got {num_devices}")
    if num_devices > spec.num_devices:
        raise ClusterSpecError(
            f"devices: {num_devices} asked for, cluster {spec.name} has {spec.num_devices}"
        )
    if num_devices == spec.num_devices:
        return spec
    groups: list[NodeGroup] = []
    left = num_devices
    for group in spec.groups:
        nodes, part = divmod(min(left, group.num_devices), group.devices_per_node)
        if nodes == 0 and not groups:
            return replace(spec, groups=(replace(group, num_nodes=1, devices_per_node=part),))
        if part:
            below, above = num_devices - part, num_devices - part + group.devices_per_node
            raise ClusterSpecError(
                f"devices: {num_devices} are no whole nodes of {group.devices_per_node} devices "
                f"({spec.name}); take {below} or {above}"
            )
        groups.append(replace(group, num_nodes=nodes))
        left -= nodes * group.devices_per_node
        if not left:
            break
    return replace(spec, groups=tuple(groups))


def _parse(text: str) -> tuple[Preset, int | None]:
    text, at, rate = text.partition("@")
    preset, count = _named(text)
    return (_over_network(preset, f"{text}@{rate}", rate) if at else preset), count


def _over_network(preset: Preset, text: str, rate: str) -> Preset:
    if _RATE.fullmatch(rate) is None or not float(rate[:-1]):
        raise ClusterSpecError(
            f"cluster: {text!r}: {rate!r} is no rate of a network; "
            "write Gb/s per device behind the number of nodes, such as @400g"
        )
    if not preset.line_gbit_per_s:
        raise ClusterSpecError(
            f"cluster: {text!r}: {preset.name} has no network; leave @{rate} out"
        )
    return replace(preset.at_rate(float(rate[:-1])), suffix=f"@{rate}")


def _named(text: str) -> tuple[Preset, int | None]:
    known = presets()
    if text in known:
        return known[text], None
    match = _COUNTED.fullmatch(text)
    name = match["name"] if match else text
    if name not in known or match is None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"presets are {', '.join(known)}"
        raise ClusterSpecError(f"cluster: unknown preset {text!r}; {hint}")
    count = int(match["count"])
    if count < 1:
        raise ClusterSpecError(f"cluster: {text!r} asks for {count} nodes; write x1 or more")
    return known[name], count


def _device(name: str, facts: Mapping[str, Any]) -> DeviceSpec:
    value = {key: fact[0] for key, fact in facts.items()}
    return DeviceSpec(
        name=name,
        memory_bytes=round(value["memory_gib"] * 2**30),
        memory_bytes_per_s=value["memory_gb_per_s"] * 1e9,
        peak_flops_per_s={d: tflops * 1e12 for d, tflops in value["peak_tflops"].items()},
        matmul_efficiency=value["matmul_efficiency"],
        memory_efficiency=value["memory_efficiency"],
        launch_s=_seconds(value["launch_us"]),
        reserve_bytes=round(value["reserve_gib"] * 2**30),
        source=_sources(facts),
        host_bytes_per_s=value.get("host_gb_per_s", 0) * 1e9,
        host_memory_bytes_per_s=value.get("host_memory_gb_per_s", 0) * 1e9,
        overlap_slowdown=value.get("overlap_slowdown", OVERLAP_SLOWDOWN),
        host_op_s=_seconds(value.get("host_op_us", 0)),
        attention_efficiency=value.get("attention_efficiency", 0.0),
        attention_backward_efficiency=value.get("attention_backward_efficiency", 0.0),
        speed_spread=value.get("speed_spread", 0.0),
    )


def _link(name: str, facts: Mapping[str, Any]) -> LinkSpec:
    value = {key: fact[0] for key, fact in facts.items()}
    by_ranks = value.get("gb_per_s_by_ranks", ())
    return LinkSpec(
        name=name,
        bytes_per_s=value["gb_per_s"] * 1e9,
        latency_s=_seconds(value["latency_us"]),
        source=_sources(facts),
        start_s=_seconds(value.get("start_us", 0)),
        ramp_bytes=float(value.get("ramp_kib", 0) * 2**10),
        reduce_bytes_per_s=value.get("reduce_gb_per_s", 0) * 1e9,
        bytes_per_s_by_ranks=tuple(RankRate(ranks, gb_per_s * 1e9) for ranks, gb_per_s in by_ranks),
        congestion=value.get("congestion", 0.0),
    )


def _at_rate(network: LinkSpec, line_gbit_per_s: float, gbit_per_s: float) -> LinkSpec:
    return replace(
        network,
        name=f"{network.name.partition('@')[0]}@{gbit_per_s:g}g",
        bytes_per_s=network.bytes_per_s * gbit_per_s / line_gbit_per_s,
        source=f"{network.source}; gb_per_s in proportion to {gbit_per_s:g} Gb/s per device",
    )


def _seconds(microseconds: float) -> float:
    # Rounded to picoseconds, so that 1.9 us is written as 1.9e-06 in a plan.
    return round(microseconds * 1e-6, 12)


def _sources(facts: Mapping[str, Any]) -> str:
    """ "memory_gb_per_s, peak_tflops: X; launch_us: Y": one line, facts of one source together."""
    keys_by_source: dict[str, list[str]] = {}
    for key, (_, source) in facts.items():
        keys_by_source.setdefault(source, []).append(key)
    return "; ".join(f"{', '.join(keys)}: {source}" for source, keys in keys_by_source.items())
