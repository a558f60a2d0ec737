"""Time of one collective, from the shape of its group and the links it crosses.

Alpha-beta models (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations
in MPICH, IJHPCA 19(1), 2005), with the two algorithms and the latency counts that NCCL's own tuner
uses (NVIDIA/nccl, src/graph/tuning.cc). Symbols: a group of n ranks on m nodes, k ranks per node;
s = bytes as each function says; a = latency_s, b = bytes_per_s, of the link in a node (1) and of
the network (2).

    ring      T = start + hops(n) * latency + volume / rate * ramp
              hops:   all-gather, reduce-scatter n - 1, all-reduce 2 (n - 1), each round trip of the
                      ring crossing the network m - 1 times and staying in a node n - m times
              volume: all-gather, reduce-scatter s (n - 1) / n, all-reduce twice that
              rate:   min(b1, k * b2): the ring enters and leaves every node over the k ports of its
                      ranks there, and both levels work at the same time (measured: 86 GB/s bus
                      bandwidth of 100 GB/s of network on 2 x 8 A100, NVIDIA/nccl-tests#175)
    tree      all-reduce: latency 2 ((k - 1) a1 + ceil(log2 m) a2): a chain in each node and two
              complementary binary trees over the nodes (Sanders, Speck, Traeff 2009); every link
              carries 2 s at 0.92 of its rate, but between 2 nodes s: each is the root of one tree
              and a leaf of the other (NVIDIA/nccl#946: "2x less traffic on the network")
    switch    all-reduce inside a node of a switch that reduces (NVLS): start + s / reduce_rate *
              ramp; independent of n, which the published H200 and B200 rates confirm
    pairwise  all-to-all: s (k - 1) / n at b1 and s (n - k) / n at b2, both at once; every rank
              sends n - 1 messages

An all-reduce takes the fastest. Size-dependent efficiency: ramp = 1 + sqrt(ramp_bytes / s), fitted
to the size curves in the presets, so that T rises with s everywhere and tends to the full rate.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.ir.cluster import LinkSpec

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")

TREE_EFFICIENCY = 0.92
"""Fraction of a link's rate under the tree algorithm: busBw of NCCL_ALGO_TREE,
src/graph/tuning.cc."""

_RING_PASSES: Mapping[str, int] = MappingProxyType(
    {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
)


def collective_s(
    kind: str, num_bytes: float, group: GroupShape, link: LinkSpec, network: LinkSpec
) -> float:
    """Seconds of one collective over `group`; 0 for a group of one rank or for no bytes.

    num_bytes: all_gather the gathered output, reduce_scatter the input, all_reduce the tensor,
    all_to_all and shift the local tensor. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}; known are {', '.join(KINDS)}")
    if group.num_ranks == 1 or num_bytes <= 0:
        return 0.0
    if kind == "all_to_all":
        return _pairwise_s(num_bytes, group, link, network)
    if kind == "shift":
        pairs = [link] * (group.max_per_node > 1) + [network] * group.crosses_nodes
        return max(transfer_s(num_bytes, pair) for pair in pairs)
    times = [_ring_s(_RING_PASSES[kind], num_bytes, group, link, network)]
    if kind == "all_reduce":
        times.append(_tree_s(num_bytes, group, link, network))
        if link.reduce_bytes_per_s and not group.crosses_nodes:
            times.append(_switch_s(num_bytes, link))
    return min(times)


def transfer_s(num_bytes: float, link: LinkSpec) -> float:
    """Seconds of one message of `num_bytes` from one rank to another over `link`; 0 for none."""
    if num_bytes <= 0:
        return 0.0
    return link.start_s + link.latency_s + num_bytes / link.bytes_per_s * _ramp(link, num_bytes)


def link_rate_bytes_per_s(link: LinkSpec, num_ranks: int) -> float:
    """Rate of a group of `num_ranks` in a node: the measured points, linear between them."""
    points = link.bytes_per_s_by_ranks
    if not points:
        return link.bytes_per_s
    before = points[0]
    for point in points:
        if num_ranks <= point[0]:
            if point == before:
                return point[1]
            share = (num_ranks - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


def _ring_s(
    passes: int, num_bytes: float, group: GroupShape, link: LinkSpec, network: LinkSpec
) -> float:
    in_node = group.num_ranks - group.num_nodes
    latency_s = passes * (in_node * link.latency_s + (group.num_nodes - 1) * network.latency_s)
    volume = passes * num_bytes * (group.num_ranks - 1) / group.num_ranks
    return latency_s + _volume_s(num_bytes, (volume, volume), group, link, network)


def _tree_s(num_bytes: float, group: GroupShape, link: LinkSpec, network: LinkSpec) -> float:
    depth = math.ceil(math.log2(group.num_nodes))
    latency_s = 2 * ((group.max_per_node - 1) * link.latency_s + depth * network.latency_s)
    both_ways = 2 * num_bytes / TREE_EFFICIENCY
    between = both_ways / 2 if group.num_nodes == 2 else both_ways
    return latency_s + _volume_s(num_bytes, (both_ways, between), group, link, network)


def _volume_s(
    num_bytes: float,
    volumes: tuple[float, float],
    group: GroupShape,
    link: LinkSpec,
    network: LinkSpec,
) -> float:
    """Start and transfer, both levels at the same time. volumes: bytes through the port of a rank
    in its node, and through the ports of a node together; num_bytes: for the ramp."""
    levels: list[tuple[LinkSpec, float]] = []
    if group.max_per_node > 1:
        levels.append((link, volumes[0] / link_rate_bytes_per_s(link, group.max_per_node)))
    if group.crosses_nodes:
        levels.append((network, volumes[1] / (group.min_per_node * network.bytes_per_s)))
    start_s = max(level.start_s for level, _ in levels)
    return start_s + max(seconds * _ramp(level, num_bytes) for level, seconds in levels)


def _switch_s(num_bytes: float, link: LinkSpec) -> float:
    return link.start_s + num_bytes / link.reduce_bytes_per_s * _ramp(link, num_bytes)


def _pairwise_s(num_bytes: float, group: GroupShape, link: LinkSpec, network: LinkSpec) -> float:
    peers = group.max_per_node - 1
    away = group.num_ranks - group.min_per_node
    latency_s = peers * link.latency_s
    times = []
    if peers:
        rate = link_rate_bytes_per_s(link, group.max_per_node)
        times.append(num_bytes * peers / group.num_ranks / rate * _ramp(link, num_bytes))
    start_s = link.start_s if peers else network.start_s
    if group.crosses_nodes:
        latency_s += away * network.latency_s
        start_s = max(start_s, network.start_s)
        rate = network.bytes_per_s
        times.append(num_bytes * away / group.num_ranks / rate * _ramp(network, num_bytes))
    return start_s + latency_s + max(times)


def _ramp(link: LinkSpec, num_bytes: float) -> float:
    return 1 + math.sqrt(link.ramp_bytes / num_bytes)
