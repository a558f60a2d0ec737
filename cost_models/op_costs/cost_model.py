"""CostModel: what one mesh on one cluster charges for compute and collectives, in seconds.

The search, the conversions and the report all ask this one object. It holds the slowest device and
the links; on unequal hardware a plan gives every device the same work, so the slowest one decides.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from meshfold.cost_models.hardware.topology import GroupShape, group_shape, slowest_link
from meshfold.cost_models.op_costs import collective_time as collectives
from meshfold.cost_models.op_costs.attention import BACKWARD_SHARE, FORWARD_SHARE, Scores
from meshfold.cost_models.op_costs.compute import Work
from meshfold.cost_models.op_costs.stragglers import slowest_factor
from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import ITEM_BYTES


@dataclass(frozen=True)
class CostModel:
    """Prices for `mesh`, whose ranks are the first `mesh.num_ranks` devices of `cluster`.

    Raises ClusterSpecError when the mesh has more ranks than the cluster has devices.
    """

    cluster: ClusterSpec
    mesh: Mesh
    within: Mesh | None = None
    """The mesh whose outermost axes `mesh` has, if there are more: it decides who is in a group."""

    def __post_init__(self) -> None:
        if self.mesh.num_ranks > self.cluster.num_devices:
            raise ClusterSpecError(
                f"groups: cluster {self.cluster.name} has {self.cluster.num_devices} devices, "
                f"the mesh {self.mesh} needs {self.mesh.num_ranks}"
            )

    @cached_property
    def storage(self) -> "CostModel":
        """Prices for the storage mesh (meshfold.ir.mesh): these but under HSDP."""
        if self.mesh.replicas == 1:
            return self
        return CostModel(self.cluster, self.mesh.storage)

    @cached_property
    def _with_replicas(self) -> "dict[int, CostModel]":
        return {self.mesh.replicas: self}

    def with_replicas(self, replicas: int) -> "CostModel":
        """Prices for the same mesh with so many replicas on dp."""
        found = self._with_replicas.get(replicas)
        if found is None:
            mesh = self.mesh.with_replicas(replicas)
            found = self._with_replicas[replicas] = CostModel(self.cluster, mesh)
        return found

    @cached_property
    def device(self) -> DeviceSpec:
        """The slowest device: least float32 peak, then least memory bandwidth; of all that are
        equal on paper, the one that is slower than the others (stragglers.py)."""
        device = min(
            (g.device for g in self.cluster.groups),
            key=lambda d: (d.peak_flops_per_s["float32"], d.memory_bytes_per_s),
        )
        slower = slowest_factor(self.cluster.num_devices, device.speed_spread)
        if slower == 1:
            return device
        peaks = {dtype: peak / slower for dtype, peak in device.peak_flops_per_s.items()}
        return replace(
            device,
            peak_flops_per_s=peaks,
            memory_bytes_per_s=device.memory_bytes_per_s / slower,
            launch_s=device.launch_s * slower,
        )

    @cached_property
    def node_link(self) -> LinkSpec:
        """The slowest link inside a node."""
        return min((g.link for g in self.cluster.groups), key=lambda link: link.bytes_per_s)

    @cached_property
    def group_shapes(self) -> dict[tuple[int, ...], GroupShape]:
        """Shape of the worst group of every set of axes."""
        indices = range(len(self.mesh.axes))
        subsets = (s for count in range(1, len(indices) + 1) for s in combinations(indices, count))
        mesh = self.within or self.mesh
        return {axes: group_shape(self.cluster, mesh, axes) for axes in subsets}

    @cached_property
    def _collectives(self) -> dict[tuple[str, float, tuple[int, ...]], float]:
        """Prices already asked for: the search asks for few different ones, very often."""
        return {}

    @property
    def launch_s(self) -> float:
        """Seconds to start one kernel."""
        return self.device.launch_s

    def group_link(self, axes: Iterable[int]) -> LinkSpec:
        """The slowest link that a group of these axes together crosses."""
        return slowest_link(self.cluster, self.group_shapes[tuple(sorted(axes))])

    def collective_s(self, kind: str, num_bytes: float, axes: Iterable[int]) -> float:
        """Seconds of one collective over the mesh axes `axes` together, before overlap.

        num_bytes: all_gather the gathered output, reduce_scatter the input, all_reduce the tensor,
        all_to_all and shift the local tensor. Raises ValueError for an unknown kind. Formulas and
        sources are in meshfold.cost_models.op_costs.collective_time.
        """
        key = tuple(sorted(axes))
        if not key:
            return 0.0
        found = self._collectives.get((kind, num_bytes, key))
        if found is None:
            found = self._collectives[kind, num_bytes, key] = collectives.collective_s(
                kind, num_bytes, self.group_shapes[key], self.node_link, self.cluster.network
            )
        return found

    def host_s(self, num_bytes: float) -> float:
        """Seconds to move bytes between a device and its host, one way. The rate must be known."""
        return num_bytes / self.cluster.host_bytes_per_s if num_bytes else 0.0

    def host_update_s(self, num_bytes: float) -> float:
        """Seconds in which the host reads and writes bytes of its memory in an optimizer's step.
        The rate must be known."""
        return num_bytes / self.cluster.host_memory_bytes_per_s if num_bytes else 0.0

    def disk_s(self, num_bytes: float) -> float:
        """Seconds to read or write bytes of the host's disk. The rate must be known."""
        return num_bytes / self.cluster.disk_bytes_per_s if num_bytes else 0.0

    def compute_s(self, flops: float, num_bytes: float, dtype: str) -> float:
        """Seconds of one kernel: launch + flops at the GEMM rate of `dtype` + bytes at the copy
        rate. No work, no kernel.

        The sum, not the larger one as in the roofline of Williams, Waterman, Patterson (CACM 52(4),
        2009): a tile waits for its first bytes and writes its last ones while its matrix unit has
        nothing to do. With the best rate of a shape scan for every shape it meets 183 matrix
        products of an A100-PCIe within 4.5 % in the mean, bias -0.9 %
        (MooreThreads/SimuMax@4dcaae5, configs/system/a100_pcie.json).
        A dtype without a peak runs at the float32 figure.
        """
        if flops <= 0 and num_bytes <= 0:
            return 0.0
        device = self.device
        flops_s = flops / (device.peak(dtype) * device.matmul_efficiency)
        return device.launch_s + flops_s + self._memory_s(num_bytes)

    def op_s(
        self, work: Work, dtype: str, work_shards: float = 1.0, share: float = 1.0
    ) -> tuple[float, float]:
        """Seconds of an op's kernels, forward and backward: its flops and what it makes inside
        split in `work_shards`, of its other bytes a share."""
        if work.scores is not None:
            return self._attention_s(work, work.scores, dtype, work_shards, share)
        forward, backward = (
            (num_bytes - inner) * share + inner / work_shards
            for num_bytes, inner in zip(
                (work.num_bytes, work.backward_bytes), work.inner_bytes, strict=True
            )
        )
        return (
            self.compute_s(work.flops / work_shards, forward, dtype),
            self.compute_s(work.backward_flops / work_shards, backward, dtype),
        )

    def _attention_s(
        self, work: Work, scores: Scores, dtype: str, work_shards: float, share: float
    ) -> tuple[float, float]:
        """op_s of attention, see meshfold.cost_models.op_costs.attention."""
        device = self.device
        peak = device.peak(dtype)
        if not device.fused_attention:
            flops, extra = scores.unfused_flops(), scores.unfused_bytes(ITEM_BYTES[dtype])
            forward_s, backward_s = (
                self.compute_s(f / work_shards, moved * share + more / work_shards, dtype)
                for f, moved, more in zip(
                    flops, (work.num_bytes, work.backward_bytes), extra, strict=True
                )
            )
            return forward_s, backward_s if work.backward_bytes else 0.0
        efficiencies = (
            device.attention_efficiency or FORWARD_SHARE * device.matmul_efficiency,
            device.attention_backward_efficiency or BACKWARD_SHARE * device.matmul_efficiency,
        )
        rates = [peak * e * scores.of_rate for e in efficiencies]
        forward_s = work.flops / work_shards / rates[0] + self._memory_s(work.num_bytes * share)
        if not work.backward_flops:
            return device.launch_s + forward_s, 0.0
        backward_s = work.backward_flops / work_shards / rates[1]
        backward_s += self._memory_s(work.backward_bytes * share)
        return device.launch_s + forward_s, device.launch_s + backward_s

    def _memory_s(self, num_bytes: float) -> float:
        return num_bytes / (self.device.memory_bytes_per_s * self.device.memory_efficiency)
