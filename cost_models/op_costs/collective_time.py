"""Time of one collective, from the shape of its group and the links it crosses.

Alpha-beta models (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations
in MPICH, IJHPCA 19(1), 2005), with the algorithms and the latency counts that NCCL's own tuner uses
(NVIDIA/nccl, src/graph/tuning.cc). Symbols: a group of n ranks on m nodes, k ranks per node;
s = bytes as each function says; a = latency_s, b = bytes_per_s, of the link in a node (1) and of
the network (2). T = start + latency + the slower level's volume / rate * ramp:

              latency                                   volume / rate        message of the ramp
    ring      passes ((n - m) a1 + (m - 1) a2 + (n - 1) w)
                                                        passes s (n - 1) / n
                                                            in a node b1         s / k
                                                            network k b2         s
    tree      2 ((k - 1) a1 + ceil(log2 m) a2)          2 s, between 2 nodes s
                                                            in a node 0.92 b1    s / k
                                                            network 0.92 k b2    s
    switch    0                                         s (1 + 1/n) / r          s / n
    pairwise  (k - 1) a1 + ceil((n - k) / 8) a2         s (k - 1) / n at 0.89 b1     s
                                                        s (n - k) / n at b2          s

ring      all-gather and reduce-scatter take one pass, all-reduce two. It enters and leaves every
          node over the k ports of its ranks there, and both levels work at the same time (measured:
          86 GB/s bus bandwidth of 100 GB/s of network on 2 x 8 A100, NVIDIA/nccl-tests#175).
          All ranks send in every step, so each of the n - 1 steps waits for the slowest of m hops
          over the network: w = 0.25 a2 (H_m - 1), H_m = 1 + 1/2 + ... + 1/m, the expected largest
          of m exponentially distributed delays less their mean. Thus a gather over many ranks loses
          its rate: 32 nodes of 8 H100 were measured at 200 of 376 GB/s for 2 GiB
          (NVIDIA/nccl#1218), and are given 275.
tree      all-reduce over nodes: a chain in each and two complementary binary trees over them
          (Sanders, Speck, Traeff 2009); between 2 nodes half the bytes, as each is the root of one
          tree and a leaf of the other (NVIDIA/nccl#946: "2x less traffic on the network"). In nodes
          whose switch reduces, that takes the place of the chain's volume.
switch    all-reduce in a node whose switch reduces (NVLS): a rank sends all of s to the switch,
          which reduces, and 1/n of the result, which the switch multicasts: s (1 + 1/n) through its
          port. Derived; r is then the same within 2 % for 5 to 8 H200 and for 6 to 8 B200.
pairwise  all-to-all: every rank sends n - 1 messages, both levels at once.

An all-reduce takes the fastest. Over the network there are two protocols, and the faster one counts
(tuning.cc): a low-latency one, which reaches 1/8 of the rate, and the bulk one, whose hop between
nodes takes 3.5 latencies.

ramp = 1 + sqrt(ramp_bytes / message): a message of ramp_bytes moves at half the rate. T rises with
s everywhere. Between more nodes than one leaf switch serves, every further level of switches
lengthens what the network carries by link.congestion.

Where a library hands a gather or reduce-scatter a list of n tensors instead of one, it slices and
copies each alone, from the host: n link.rank_s more, of the outer level. Emitted programs do not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.ir.cluster import LinkSpec

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")

TREE_EFFICIENCY = 0.92
"""Fraction of a link's rate under the tree algorithm. Published: busBw of NCCL_ALGO_TREE,
src/graph/tuning.cc."""

PAIRWISE_EFFICIENCY = 0.89
"""Fraction of the ring's rate in a node that an all-to-all reaches. Published: 537 and 606 GB/s on
8 B200, MooreThreads/SimuMax@4dcaae5, configs/system/b200_bf16_ceperm.json."""

PEERS_AT_ONCE = 8
"""Messages to other nodes that a rank has under way together. Published: the point-to-point
operations that NCCL puts into one batch of work (from memory, not looked up)."""

LOW_LATENCY_RATE = 1 / 8
"""Fraction of the network's rate under the low-latency protocol. Published: llMaxBws of tuning.cc,
22.5 of the 172 GB/s of 8 HDR ports and 45 of the 376 GB/s of 8 NDR ports, 2 nodes."""

BULK_LATENCIES = 3.5
"""Latencies that a hop between nodes takes under the bulk protocol. Published: 14 us for Simple
over 4 us for LL128, tuning.cc."""

HOP_JITTER = 0.25
"""Mean of the random delay of a hop between nodes, in latencies. Fitted between what disagrees: an
all-gather of 2 GiB on 32 nodes of 8 H100 asks for 1.2 (NVIDIA/nccl#1218; its price is 27 % too low
now), all-reduces of 24 A100 for none (NVIDIA/nccl-tests#119; 9 % too high), and the step of 2048
H100, 0.12 s longer than that of 16 (NVIDIA/dgxc-benchmarking@741c886), for 0.25 at most."""

NODES_PER_SWITCH = 32
"""Nodes that one level of switches joins. Published: the scalable unit of a DGX H100 SuperPOD has
32 nodes; a level above it joins as many units (estimate)."""

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
    levels = _Levels(float(num_bytes), group, link, network)
    if kind == "all_to_all":
        return levels.pairwise_s()
    if kind == "shift":
        pairs = [link] * (group.max_per_node > 1) + [network] * group.crosses_nodes
        return max(transfer_s(num_bytes, pair) for pair in pairs)
    times = [levels.ring_s(_RING_PASSES[kind])]
    if kind == "all_reduce" and group.crosses_nodes:
        times.append(levels.tree_s())
    elif kind == "all_reduce" and link.reduce_bytes_per_s:
        times.append(levels.switch_s())
    by_rank_s = 0.0
    if kind in ("all_gather", "reduce_scatter"):
        by_rank_s = group.num_ranks * (network if group.crosses_nodes else link).rank_s
    return min(times) + by_rank_s


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


def congestion_factor(network: LinkSpec, num_nodes: int) -> float:
    """By what the network takes longer between `num_nodes` nodes than under one leaf switch."""
    if num_nodes <= NODES_PER_SWITCH:
        return 1.0
    return 1 + network.congestion * (math.log(num_nodes, NODES_PER_SWITCH) - 1)


@dataclass(frozen=True)
class _Levels:
    """One collective of num_bytes on the levels of links that its group crosses."""

    num_bytes: float
    group: GroupShape
    link: LinkSpec
    network: LinkSpec

    def ring_s(self, passes: int) -> float:
        n, m = self.group.num_ranks, self.group.num_nodes
        volume = passes * self.num_bytes * (n - 1) / n
        in_node_s = self._in_node_s(volume)
        latency_s = passes * (n - m) * self.link.latency_s
        jitter_s = HOP_JITTER * (_harmonic(m) - 1) * self.network.latency_s
        latency_s += passes * (n - 1) * jitter_s
        return self._fastest_s(latency_s, in_node_s, passes * (m - 1), self._between_s(volume))

    def tree_s(self) -> float:
        """Of a group on several nodes."""
        m, per_node = self.group.num_nodes, self.group.max_per_node
        both_ways = 2 * self.num_bytes / TREE_EFFICIENCY
        if self.link.reduce_bytes_per_s and per_node > 1:
            in_node_s = self._reduced_s(per_node)
        else:
            in_node_s = self._in_node_s(both_ways)
        between = both_ways / 2 if m == 2 else both_ways
        latency_s = 2 * (per_node - 1) * self.link.latency_s
        hops = 2 * math.ceil(math.log2(m))
        return self._fastest_s(latency_s, in_node_s, hops, self._between_s(between))

    def switch_s(self) -> float:
        """Of a group in one node whose switch reduces."""
        return self.link.start_s + self._reduced_s(self.group.num_ranks)

    def pairwise_s(self) -> float:
        group, link, network = self.group, self.link, self.network
        peers, away = group.max_per_node - 1, group.num_ranks - group.min_per_node
        latency_s, start_s, times = peers * link.latency_s, 0.0, [0.0]
        if peers:
            rate = link_rate_bytes_per_s(link, group.max_per_node) * PAIRWISE_EFFICIENCY
            start_s = link.start_s
            times.append(
                self.num_bytes * peers / group.num_ranks / rate * _ramp(link, self.num_bytes)
            )
        if group.crosses_nodes:
            latency_s += math.ceil(away / PEERS_AT_ONCE) * network.latency_s
            start_s = network.start_s
            seconds = self.num_bytes * away / group.num_ranks / network.bytes_per_s
            seconds *= congestion_factor(network, group.num_nodes)
            times.append(seconds * _ramp(network, self.num_bytes))
        return start_s + latency_s + max(times)

    def _fastest_s(self, latency_s: float, in_node_s: float, hops: int, between_s: float) -> float:
        """Under the better protocol. latency_s: inside the nodes; hops: over the network, one after
        the other; between_s: what the network carries, under the bulk protocol."""
        if not self.group.crosses_nodes:
            return self.link.start_s + latency_s + in_node_s
        start_s, hop_s = self.network.start_s, self.network.latency_s
        low_latency_s = hops * hop_s + max(in_node_s, between_s / LOW_LATENCY_RATE)
        bulk_s = hops * hop_s * BULK_LATENCIES + max(in_node_s, between_s)
        return start_s + latency_s + min(low_latency_s, bulk_s)

    def _in_node_s(self, volume: float) -> float:
        """volume: bytes through the port of a rank."""
        per_node = self.group.max_per_node
        if per_node == 1:
            return 0.0
        seconds = volume / link_rate_bytes_per_s(self.link, per_node)
        return seconds * _ramp(self.link, self.num_bytes / per_node)

    def _between_s(self, volume: float) -> float:
        """volume: bytes through the ports of a node together."""
        if not self.group.crosses_nodes:
            return 0.0
        seconds = volume / (self.group.min_per_node * self.network.bytes_per_s)
        congested_s = seconds * congestion_factor(self.network, self.group.num_nodes)
        return congested_s * _ramp(self.network, self.num_bytes)

    def _reduced_s(self, num_ranks: int) -> float:
        """What a switch that reduces takes for the ranks of a node."""
        volume = self.num_bytes * (1 + 1 / num_ranks)
        message = self.num_bytes / num_ranks
        return volume / self.link.reduce_bytes_per_s * _ramp(self.link, message)


@cache
def _harmonic(count: int) -> float:
    return math.fsum(1 / k for k in range(1, count + 1))


def _ramp(link: LinkSpec, message_bytes: float) -> float:
    return 1 + math.sqrt(link.ramp_bytes / message_bytes)
