"""Sums behind the price of a region (passes/price/region.py): seconds, bytes, records.

Ops and values are summed once each and put together for every choice of stored layouts. Most
parameters have collectives and copies of their group, and nothing else that takes seconds.
"""

from dataclasses import dataclass, field

from meshfold.ir.mesh import Mesh
from meshfold.ir.plan import ConversionRecord
from meshfold.passes.price.conversions import ConversionCost
from meshfold.passes.price.op_time import OpTime
from meshfold.passes.price.parameter_groups import Unbucketed
from meshfold.passes.price.parameters import GroupCopies


@dataclass
class PriceSums:
    """Running sums over one region or one value of it, by axis number."""

    mesh: Mesh
    forward_s: float = 0.0
    backward_s: float = 0.0
    recomputed_ops_s: float = 0.0
    recomputed_s: float = 0.0
    gathered_s: float = 0.0
    reduced_s: float = 0.0
    communication_s: list[float] = field(init=False)
    recomputed_by_axis_s: list[float] = field(init=False)
    group_bytes: dict[tuple[tuple[int, ...], str, Unbucketed | None, int], int] = field(
        default_factory=dict
    )
    """Bytes by the axes of a collective, which act as one group, its kind, who has its own
    (passes/price/parameter_groups.py), and the replicas on whose storage mesh these axes are."""
    records: list[tuple[int, ConversionRecord]] = field(default_factory=list)
    """(number of the value, record)."""
    has_seconds: bool = False
    """Whether there is more than group_bytes, copies and records: few parameters have more."""

    def __post_init__(self) -> None:
        self.communication_s = [0.0] * len(self.mesh.axes)
        self.recomputed_by_axis_s = [0.0] * len(self.mesh.axes)

    def merge(self, other: "PriceSums") -> None:
        """Add everything of `other`."""
        self.gathered_s += other.gathered_s
        self.reduced_s += other.reduced_s
        if other.has_seconds:
            self._merge_seconds(other)
        for key, num_bytes in other.group_bytes.items():
            self.add_bytes(*key, num_bytes)
        self.records += other.records

    def _merge_seconds(self, other: "PriceSums") -> None:
        self.has_seconds = True
        self.forward_s += other.forward_s
        self.backward_s += other.backward_s
        self.recomputed_ops_s += other.recomputed_ops_s
        self.recomputed_s += other.recomputed_s
        for axis in range(len(self.mesh.axes)):
            self.communication_s[axis] += other.communication_s[axis]
            self.recomputed_by_axis_s[axis] += other.recomputed_by_axis_s[axis]

    def add_bytes(
        self,
        axes: tuple[int, ...],
        kind: str,
        own: Unbucketed | None,
        replicas: int,
        num_bytes: int,
    ) -> None:
        """Parameters or gradients that go into a collective over these axes; own: of a
        ParameterGroupKey, `unbucketed`."""
        key = (axes, kind, own, replicas)
        self.group_bytes[key] = self.group_bytes.get(key, 0) + num_bytes

    def add(self, cost: ConversionCost) -> None:
        """An in-graph conversion."""
        self.has_seconds = True
        self.forward_s += cost.forward_s
        self.backward_s += cost.backward_s
        for axis, seconds in enumerate(cost.by_axis_s):
            self.communication_s[axis] += seconds

    def add_copies(self, copies: GroupCopies) -> None:
        """Copies of a parameter around a gather, or cast, and before a reduction."""
        self.gathered_s += copies.gathered_s
        self.reduced_s += copies.reduced_s

    def add_recomputed(self, cost: ConversionCost) -> None:
        """The forward of a conversion that is recomputed."""
        self.has_seconds = True
        self.recomputed_s += cost.forward_s
        for axis, seconds in enumerate(cost.forward_by_axis_s):
            self.recomputed_by_axis_s[axis] += seconds

    def add_op(self, time: OpTime, is_recomputed: bool) -> None:
        """The collectives inside an op's rule, and its forward if it is recomputed."""
        self.has_seconds = True
        for axis, seconds in enumerate(time.communication_s):
            self.communication_s[axis] += seconds
            self.forward_s += seconds
        for axis, seconds in enumerate(time.backward_communication_s):
            self.communication_s[axis] += seconds
            self.backward_s += seconds
        if is_recomputed:
            self.recomputed_ops_s += time.forward_s
            for axis, seconds in enumerate(time.recomputed_communication_s):
                self.recomputed_by_axis_s[axis] += seconds
                self.recomputed_s += seconds
