"""ClusterSpec: node groups and links. Data and checks only; presets and JSON are in
meshfold.cost_models.devices and meshfold.cluster_io."""

from dataclasses import dataclass
from collections.abc import Mapping

from meshfold.errors import ClusterSpecError


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator. peak_flops_per_s: dense peak by dtype name ("bfloat16", "float16",
    "float32", "tf32"...); a missing dtype runs at the float32 figure. launch_s: time to start one
    kernel. efficiency: fraction of peak a large GEMM reaches (`matmul`) and fraction of memory
    bandwidth a large copy reaches (`memory`). reserve_bytes: framework, context, communicators."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    matmul_efficiency: float
    memory_efficiency: float
    launch_s: float
    reserve_bytes: int
    source: str


@dataclass(frozen=True)
class LinkSpec:
    """A level of the network. bytes_per_s is per device and direction, what one device can send
    while all its peers do the same; latency_s per message step."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True)
class NodeGroup:
    """`num_nodes` equal nodes of `devices_per_node` devices; `link` joins devices in a node."""

    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    link: LinkSpec


@dataclass(frozen=True)
class ClusterSpec:
    """Node groups joined by `network`. Validated: raises ClusterSpecError with the field path."""

    name: str
    groups: tuple[NodeGroup, ...]
    network: LinkSpec

    @property
    def num_devices(self) -> int:
        return sum(g.num_nodes * g.devices_per_node for g in self.groups)

    def __post_init__(self) -> None:
        if not self.groups:
            raise ClusterSpecError("groups: a cluster needs at least one node group")
