"""Sums behind the price of a region (passes/region_price.py): seconds, buckets, records.

Ops and values are summed once each and put together for every choice of stored layouts. Most
parameters have buckets and their copies, and nothing else that takes seconds.
"""

from dataclasses import dataclass, field

from meshfold.ir.mesh import Mesh
from meshfold.ir.plan import ConversionRecord
from meshfold.passes.price.conversions import ConversionCost
from meshfold.passes.price.op_time import OpTime
from meshfold.passes.price.parameter_groups import Alone
from meshfold.passes.region.parameter_tables import BucketCopies


@dataclass
class PriceSums:
    """Running sums over one region or one value of it, by axis number."""

    mesh: Mesh
    forward_s: float = 0.0
    backward_s: float = 0.0
    again_compute_s: float = 0.0
    again_s: float = 0.0
    gathered_s: float = 0.0
    reduced_s: float = 0.0
    communication_s: list[float] = field(init=False)
    again_by_axis_s: list[float] = field(init=False)
    bucket_bytes: dict[tuple[tuple[int, ...], str, Alone | None], int] = field(default_factory=dict)
    """By the axes of a collective, which act as one group, its kind, and who is alone in a bucket
    (passes/parameter_buckets.py)."""
    records: list[tuple[int, ConversionRecord]] = field(default_factory=list)
    """(number of the value, record)."""
    has_seconds: bool = False
    """Whether there is more than buckets, their copies and records: few parameters have more."""

    def __post_init__(self) -> None:
        self.communication_s = [0.0] * len(self.mesh.axes)
        self.again_by_axis_s = [0.0] * len(self.mesh.axes)

    def merge(self, other: "PriceSums") -> None:
        """Add everything of `other`."""
        self.gathered_s += other.gathered_s
        self.reduced_s += other.reduced_s
        if other.has_seconds:
            self._merge_seconds(other)
        for key, num_bytes in other.bucket_bytes.items():
            self.bucket(*key, num_bytes)
        self.records += other.records

    def _merge_seconds(self, other: "PriceSums") -> None:
        self.has_seconds = True
        self.forward_s += other.forward_s
        self.backward_s += other.backward_s
        self.again_compute_s += other.again_compute_s
        self.again_s += other.again_s
        for axis in range(len(self.mesh.axes)):
            self.communication_s[axis] += other.communication_s[axis]
            self.again_by_axis_s[axis] += other.again_by_axis_s[axis]

    def bucket(self, axes: tuple[int, ...], kind: str, alone: Alone | None, num_bytes: int) -> None:
        """Parameters or gradients that go into a bucket of these axes; alone: see bucket_key."""
        key = (axes, kind, alone)
        self.bucket_bytes[key] = self.bucket_bytes.get(key, 0) + num_bytes

    def add(self, cost: ConversionCost) -> None:
        """An in-graph conversion."""
        self.has_seconds = True
        self.forward_s += cost.forward_s
        self.backward_s += cost.backward_s
        for axis, seconds in enumerate(cost.by_axis_s):
            self.communication_s[axis] += seconds

    def add_copies(self, copies: BucketCopies) -> None:
        """Of a parameter around a gather, or cast, and before a reduction."""
        self.gathered_s += copies.gathered_s
        self.reduced_s += copies.reduced_s

    def add_again(self, cost: ConversionCost) -> None:
        """The forward of a conversion that runs again."""
        self.has_seconds = True
        self.again_s += cost.forward_s
        for axis, seconds in enumerate(cost.forward_by_axis_s):
            self.again_by_axis_s[axis] += seconds

    def add_op(self, time: OpTime, is_again: bool) -> None:
        """The collectives inside an op's rule, and its forward if it runs again."""
        self.has_seconds = True
        for axis, seconds in enumerate(time.communication_s):
            self.communication_s[axis] += seconds
            self.forward_s += seconds
        for axis, seconds in enumerate(time.backward_communication_s):
            self.communication_s[axis] += seconds
            self.backward_s += seconds
        if is_again:
            self.again_compute_s += time.forward_s
            for axis, seconds in enumerate(time.again_communication_s):
                self.again_by_axis_s[axis] += seconds
                self.again_s += seconds
