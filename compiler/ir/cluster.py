"""ClusterSpec: node groups and links. Data and checks only; presets and JSON are in
meshfold.cost_models.hardware.devices and meshfold.plan_file.cluster_file.

All figures are in bytes, seconds, bytes per second and flops per second. A ClusterSpec checks
everything below it on construction, so that each message can give the whole field path.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshfold.errors import ClusterSpecError
from meshfold.ir.limits import MOST_DEVICES, MOST_NUMBER

OVERLAP_SLOWDOWN = 1.1256
"""Where nothing better is known, see DeviceSpec. Ported: PKU-DAIR/Hetu-Galvatron
overlap_coefficient.json, measured on A100-class devices; about 1.3 is told of TITAN RTX."""

MOST_SPREAD = 0.25
"""Of DeviceSpec.speed_spread: beyond it devices are not equal."""

LEAST_PER_S, MOST_PER_S = 1, 1e20
LEAST_FRACTION = 1e-6
MOST_SECONDS = 3600
"""Of rates, efficiencies, and latencies: what is beyond is no machine, and steps on it would take
longer than a plan file may say."""


MEMORY_MARGIN = 0.05
"""Of a device's memory that a plan leaves free where nobody states a budget, for what the model of
memory does not know: fragmentation beyond the reserve, libraries that allocate on their own. A
round figure; how far predicted peaks were from published ones is in
cost_models/hardware/error_bands.json, and every plan says it."""


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    """Dense peak by dtype name ("bfloat16", "float16", "float32", "float64"); "float32" must be
    there and stands in for a dtype that is not."""
    matmul_efficiency: float
    """Fraction of the peak that a large GEMM reaches."""
    memory_efficiency: float
    """Fraction of the memory bandwidth that a large copy reaches."""
    launch_s: float
    """Time to start one kernel."""
    reserve_bytes: int
    """Framework, context, communicators, fragmentation."""
    source: str
    """Where the figures come from."""
    host_bytes_per_s: float = 0.0
    """What the link to the host's memory carries in each direction; 0 if unknown."""
    host_memory_bytes_per_s: float = 0.0
    """What one device's share of the host reads and writes in its own memory while it runs an
    optimizer's step; 0 if unknown."""
    host_memory_bytes: int = 0
    """One device's share of the host's memory, for what plans store there; 0 if unknown."""
    disk_bytes_per_s: float = 0.0
    """What one device's share of the host's disk reads or writes; 0 if unknown."""
    overlap_slowdown: float = OVERLAP_SLOWDOWN
    """By which compute and a collective are slower while they overlap, from 1 (neither takes
    anything from the other) to 2 (nothing is gained)."""
    speed_spread: float = 0.0
    """Standard deviation of the speed of equal devices, as a fraction of it: the slowest decides,
    see cost_models/op_costs/stragglers.py."""
    attention_efficiency: float = 0.0
    """Fraction of the peak that a fused attention kernel reaches forward, of the flops that it has
    to do (the causal half), with heads of 128; 0: a share of matmul_efficiency, see
    cost_models/op_costs/attention.py."""
    attention_backward_efficiency: float = 0.0
    """The same, backward."""
    host_op_s: float = 0.0
    """Seconds in which the host issues one op of an eager program while the device works; 0 where
    the host is the device."""
    fused_attention: bool = True
    """Whether attention runs as one kernel. Without it, scores go through memory."""

    def peak(self, dtype: str) -> float:
        """Dense flops per second in a dtype; the float32 figure for one that has none."""
        return self.peak_flops_per_s.get(dtype, self.peak_flops_per_s["float32"])


class RankRate(NamedTuple):
    """The measured rate of a small group."""

    ranks: int
    bytes_per_s: float


@dataclass(frozen=True)
class LinkSpec:
    """A level of the network."""

    name: str
    bytes_per_s: float
    """Per device and direction: what one device can send while all its peers do the same."""
    latency_s: float
    """Per message step."""
    source: str
    start_s: float = 0.0
    """Per collective."""
    ramp_bytes: float = 0.0
    """Size of a message, one of many that a collective sends, at which half of bytes_per_s is
    reached; the formula is in cost_models/op_costs/collective_time.py."""
    reduce_bytes_per_s: float = 0.0
    """What the port of a device carries while the switch reduces (NVLS); 0 for a link without."""
    bytes_per_s_by_ranks: tuple[RankRate, ...] = ()
    """Where a small group gets another rate than the whole node, as on point-to-point links."""
    congestion: float = 0.0
    """Of a network: by which fraction each level of switches above the first lengthens what it
    carries."""
    rank_s: float = 0.0
    """Per all-gather or reduce-scatter and rank of its group: of libraries that hand a collective a
    list with a tensor for every rank, each sliced and copied alone. 0 for one flat tensor."""


@dataclass(frozen=True)
class NodeGroup:
    """`num_nodes` equal nodes of `devices_per_node` devices; `link` joins devices in a node."""

    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    link: LinkSpec

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class ClusterSpec:
    """Node groups joined by `network`. Ranks fill nodes in order: group by group, node by node.

    Raises ClusterSpecError, the message starting with the path of the wrong field.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    network: LinkSpec

    @property
    def num_nodes(self) -> int:
        return sum(g.num_nodes for g in self.groups)

    @property
    def num_devices(self) -> int:
        return sum(g.num_devices for g in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device: a plan gives every device the same work."""
        return min(g.device.memory_bytes for g in self.groups)

    @property
    def budget_bytes(self) -> int:
        """What a plan may use of the smallest device, reserve included, where nobody says."""
        return int(self.memory_bytes * (1 - MEMORY_MARGIN))

    @property
    def reserve_bytes(self) -> int:
        """Reserve of the device that needs most."""
        return max(g.device.reserve_bytes for g in self.groups)

    @property
    def host_bytes_per_s(self) -> float:
        """The slowest link between a device and its host; 0 if one of them is unknown."""
        return min(g.device.host_bytes_per_s for g in self.groups)

    @property
    def host_memory_bytes_per_s(self) -> float:
        """The slowest host, per device; 0 if one of them is unknown."""
        return min(g.device.host_memory_bytes_per_s for g in self.groups)

    @property
    def host_memory_bytes(self) -> int:
        """The smallest share of a host's memory; 0 if one of them is unknown."""
        return min(g.device.host_memory_bytes for g in self.groups)

    @property
    def disk_bytes_per_s(self) -> float:
        """The slowest disk, per device; 0 if one of them is unknown."""
        return min(g.device.disk_bytes_per_s for g in self.groups)

    @property
    def overlap_slowdown(self) -> float:
        """Of the device that loses most."""
        return max(g.device.overlap_slowdown for g in self.groups)

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        if not self.groups:
            raise ClusterSpecError("groups: a cluster needs at least one node group")
        for k, group in enumerate(self.groups):
            path = f"groups[{k}]"
            _check_count(f"{path}.num_nodes", group.num_nodes)
            _check_count(f"{path}.devices_per_node", group.devices_per_node)
            _check_device(f"{path}.device", group.device)
            _check_link(f"{path}.link", group.link)
            if group.link.name == self.network.name:
                raise ClusterSpecError(
                    f"{path}.link.name: {group.link.name!r} is also the network's name; "
                    "give the links inside a node a name of their own"
                )
        if self.num_devices > MOST_DEVICES:
            raise ClusterSpecError(
                f"groups: {self.num_devices} devices are more than {MOST_DEVICES}; take fewer nodes"
            )
        _check_link("network", self.network)


def _check_device(path: str, device: DeviceSpec) -> None:
    _check_text(f"{path}.name", device.name)
    _check_text(f"{path}.source", device.source)
    _check_count(f"{path}.memory_bytes", device.memory_bytes)
    _check_rate(f"{path}.memory_bytes_per_s", device.memory_bytes_per_s)
    _check_fraction(f"{path}.matmul_efficiency", device.matmul_efficiency)
    _check_fraction(f"{path}.memory_efficiency", device.memory_efficiency)
    for name in ("attention_efficiency", "attention_backward_efficiency"):
        if getattr(device, name):
            _check_fraction(f"{path}.{name}", getattr(device, name))
    _check_seconds(f"{path}.launch_s", device.launch_s)
    _check_seconds(f"{path}.host_op_s", device.host_op_s)
    _check_not_negative(f"{path}.reserve_bytes", device.reserve_bytes)
    _check_rate_if_known(f"{path}.host_bytes_per_s", device.host_bytes_per_s)
    _check_rate_if_known(f"{path}.host_memory_bytes_per_s", device.host_memory_bytes_per_s)
    _check_not_negative(f"{path}.host_memory_bytes", device.host_memory_bytes)
    _check_rate_if_known(f"{path}.disk_bytes_per_s", device.disk_bytes_per_s)
    if not 1 <= device.overlap_slowdown <= 2:
        raise ClusterSpecError(
            f"{path}.overlap_slowdown: must be from 1 (compute and collectives do not disturb each "
            f"other) to 2 (nothing is gained by overlap), got {device.overlap_slowdown}"
        )
    if not 0 <= device.speed_spread <= MOST_SPREAD:
        raise ClusterSpecError(
            f"{path}.speed_spread: must be from 0 (all devices are equally fast) to {MOST_SPREAD}, "
            f"got {device.speed_spread}"
        )
    if device.reserve_bytes >= device.memory_bytes:
        raise ClusterSpecError(
            f"{path}.reserve_bytes: {device.reserve_bytes} leaves nothing of "
            f"{device.memory_bytes} bytes of memory"
        )
    if "float32" not in device.peak_flops_per_s:
        raise ClusterSpecError(f"{path}.peak_flops_per_s: the float32 figure is missing")
    for dtype, flops_per_s in device.peak_flops_per_s.items():
        _check_rate(f"{path}.peak_flops_per_s.{dtype}", flops_per_s)


def _check_link(path: str, link: LinkSpec) -> None:
    _check_text(f"{path}.name", link.name)
    _check_text(f"{path}.source", link.source)
    _check_rate(f"{path}.bytes_per_s", link.bytes_per_s)
    for field in ("latency_s", "start_s", "rank_s"):
        _check_seconds(f"{path}.{field}", getattr(link, field))
    _check_rate_if_known(f"{path}.reduce_bytes_per_s", link.reduce_bytes_per_s)
    for field in ("ramp_bytes", "congestion"):
        _check_not_negative(f"{path}.{field}", getattr(link, field))
    before = 1
    for k, (ranks, bytes_per_s) in enumerate(link.bytes_per_s_by_ranks):
        where = f"{path}.bytes_per_s_by_ranks[{k}]"
        if ranks <= before:
            raise ClusterSpecError(f"{where}: ranks must rise and start at 2, got {ranks}")
        _check_rate(where, bytes_per_s)
        before = ranks


def _check_text(path: str, text: str) -> None:
    if not text.strip():
        raise ClusterSpecError(f"{path}: must not be empty")


def _check_count(path: str, number: int) -> None:
    if not 1 <= number <= MOST_NUMBER:
        most = "1 or more" if number < 1 else f"at most {MOST_NUMBER}"
        raise ClusterSpecError(f"{path}: must be {most}, got {number}")


def _check_rate(path: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0):
        raise ClusterSpecError(f"{path}: must be positive, got {number}")
    if not LEAST_PER_S <= number <= MOST_PER_S:
        allowed = f"from {LEAST_PER_S} to {MOST_PER_S:g} per second"
        raise ClusterSpecError(f"{path}: must be {allowed}, got {number}")


def _check_rate_if_known(path: str, number: float) -> None:
    _check_not_negative(path, number)
    if number:
        _check_rate(path, number)


def _check_seconds(path: str, number: float) -> None:
    _check_not_negative(path, number)
    if number > MOST_SECONDS:
        raise ClusterSpecError(f"{path}: must be at most {MOST_SECONDS} seconds, got {number}")


def _check_not_negative(path: str, number: float) -> None:
    if not (math.isfinite(number) and number >= 0):
        raise ClusterSpecError(f"{path}: must be 0 or more, got {number}")


def _check_fraction(path: str, number: float) -> None:
    if not 0 < number <= 1:
        raise ClusterSpecError(f"{path}: must be above 0 and at most 1, got {number}")
    if number < LEAST_FRACTION:
        raise ClusterSpecError(f"{path}: must be at least {LEAST_FRACTION:g}, got {number}")
