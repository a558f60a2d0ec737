"""CostModel: what one mesh on one cluster charges for compute and collectives, in seconds.

The search, the conversions and the report all ask this one object. It holds the slowest device and
the links; on unequal hardware a plan gives every device the same work, so the slowest one decides.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from meshfold.cost_models.hardware.topology import GroupShape, group_shape, slowest_link
from meshfold.cost_models.op_costs import collective_time as collectives
from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshfold.ir.mesh import Mesh


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
        """The slowest device: least float32 peak, then least memory bandwidth."""
        return min(
            (g.device for g in self.cluster.groups),
            key=lambda d: (d.peak_flops_per_s["float32"], d.memory_bytes_per_s),
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

    def compute_s(self, flops: float, num_bytes: float, dtype: str) -> float:
        """Seconds of one kernel: launch + max(flops at the GEMM rate of `dtype`, bytes at the copy
        rate), the roofline of Williams, Waterman, Patterson (CACM 52(4), 2009). No work, no kernel.

        A dtype without a peak runs at the float32 figure.
        """
        if flops <= 0 and num_bytes <= 0:
            return 0.0
        device = self.device
        peak = device.peak_flops_per_s.get(dtype, device.peak_flops_per_s["float32"])
        flops_s = flops / (peak * device.matmul_efficiency)
        memory_s = num_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
        return device.launch_s + max(flops_s, memory_s)
