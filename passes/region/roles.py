"""What an axis is for in a search, and what conversions on it cost under that role.

A role narrows what the exact search may do on an axis, so that a strategy named "dp4" or "tp8" is
data or tensor parallelism at every size of model, and the dimensions of a strategy can be compared.
"""

import math
from dataclasses import dataclass
from enum import Enum

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import SpmdType

UNDONE_SHARD_S = 1.0
"""Added to a conversion that undoes a shard on a DATA axis: more than any collective takes, less
than forbidding it, since an op without a rule must run on unsharded values."""


class AxisRole(Enum):
    """The role of one axis."""

    ANY = "any"
    """Everything at its own price. Parameters are stored as they are used, or sliced from unsharded
    ones; their gradient reductions are charged by their bytes."""

    DATA = "data"
    """Data parallelism: parameters are used unsharded, gathered first where they are stored as
    shards. Their gathers and reductions follow from the degree and overlap compute: not charged.
    Values stay sharded along the batch."""

    CONTEXT = "context"
    """Context parallelism: activations are shards of their sequence, parameters are used unsharded
    and stored as on a DATA axis. Attention needs more than a shard: heads for rows by all-to-all,
    or keys and values gathered, whichever the prices say."""

    EXPERT = "expert"
    """Expert parallelism: the batch is sharded as on a DATA axis, expert weights are shards of
    their experts, to which tokens are dispatched, and the other parameters are used unsharded. What
    ops do follows from the degree, so reductions are not charged."""

    TENSOR = "tensor"
    """Tensor parallelism without sequence parallelism: pending sums are all-reduced, and no other
    conversion shards or gathers a value with a gradient, but that a rank picks its shard of keys
    and values whose heads do not divide. Ops with sharded parameters alone make shards and contract
    them."""

    SEQUENCE = "sequence"
    """Tensor parallelism with sequence parallelism: an all-reduce is charged as the reduce-scatter
    and the all-gather it consists of, so that the ops in between are done on shards wherever that
    is no slower."""

    @property
    def uses_unsharded_parameters(self) -> bool:
        """Whether no op reads a shard of a parameter on such an axis."""
        return self in (AxisRole.DATA, AxisRole.CONTEXT)

    @property
    def charges_reductions(self) -> bool:
        """Whether gathers and reductions of parameters count: not where the degree decides them."""
        return not (self.uses_unsharded_parameters or self is AxisRole.EXPERT)


@dataclass(frozen=True, slots=True)
class SearchCosts:
    """Costs of conversions as the search sees them, with one role per axis. What happens inside a
    rank costs no launch: most slices are views, masks and pads are tiny next to the ops around."""

    costs: CostModel
    roles: tuple[AxisRole, ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh of `costs`."""
        return self.costs.mesh

    def collective_s(self, kind: str, num_bytes: int, axes: tuple[int, ...]) -> float:
        """Seconds of one collective on one axis."""
        (axis,) = axes
        if kind == "all_reduce" and self.roles[axis] is AxisRole.SEQUENCE:
            halves = ("reduce_scatter", "all_gather")
            return sum(self.costs.collective_s(half, num_bytes, axes) for half in halves)
        return self.costs.collective_s(kind, num_bytes, axes)

    @property
    def launch_s(self) -> float:
        """Launch seconds in compute_s: none."""
        return 0.0

    def compute_s(self, flops: float, num_bytes: float, dtype: str) -> float:
        """Seconds of work inside a rank."""
        return max(0.0, self.costs.compute_s(flops, num_bytes, dtype) - self.costs.launch_s)

    def extra_s(self, value: Value, axis: int, source: SpmdType, target: SpmdType) -> float:
        """What the role adds to a change of type on one axis; +inf forbids it."""
        role = self.roles[axis]
        if role is AxisRole.TENSOR and value.requires_grad:
            return math.inf if source.is_shard or (target.is_shard and not target.padded) else 0.0
        if role is AxisRole.DATA and source.is_shard and not target.is_shard:
            return UNDONE_SHARD_S
        return 0.0
