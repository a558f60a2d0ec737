"""Which parameters are in one group: those gathered over the same axes, or only reduced over the
same, of one dtype. The emitter makes groups so, and the simulator counts their collectives so.

Groups communicate over axes of the storage mesh (meshfold.ir.mesh), which is the mesh but under
HSDP: layouts and costs here are on that mesh, `stored_use` takes them there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import REPLICATE_AXIS, Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import REPLICATE, Layout
from meshfold.passes.price.conversions import ConversionCosts
from meshfold.passes.price.parameters import GroupCopies, cast_s, is_grouped, member_copies

Unbucketed = tuple[int, Layout]
"""Slot and used layout of a parameter that has its own collective: read in two, it has two."""


@dataclass(frozen=True, order=True, slots=True)
class ParameterGroupKey:
    """What the members of one parameter group have in common."""

    gather: tuple[int, ...]
    """Axes that they are gathered over."""
    reduce: tuple[int, ...]
    """Axes of the first reduction, where nothing is gathered."""
    replicas: tuple[int, ...]
    """Axes over which gradients are all-reduced as soon as they are scattered: those of replicas
    under HSDP."""
    dtype: str
    requires_grad: bool
    master: str
    """Dtype of the master copy."""
    unbucketed: Unbucketed | None
    """Who it is that has its own collective."""


def stored_use(stored: Layout, used: Layout, costs: CostModel) -> tuple[Layout, Layout, CostModel]:
    """The same on the storage mesh. The mesh of costs may not know its replicas yet: candidates
    that store states in different numbers of copies are priced on one mesh."""
    copies = max([t.copies for t in stored], default=1)
    if copies > 1:
        costs = costs.with_replicas(copies)
    mesh = costs.mesh
    return mesh.on_storage(stored), mesh.on_storage(used), costs.storage


def is_unbucketed(
    value: Value, stored: Layout, gather: Sequence[int], costs: ConversionCosts
) -> bool:
    """Whether a parameter has its own collectives: the shards of all ranks are then the parameter
    as ops read it, and the gradient is what is reduced. That saves copies into and out of a buffer
    that it would share, and costs the start and the latencies of these collectives."""
    if not (gather and _is_contiguous(stored, gather, costs.mesh.sizes)):
        return False
    shared = member_copies(value, stored, gather, costs)
    own = _unbucketed_copies(value, stored, gather, costs)
    kinds = ("all_gather", "all_gather", "reduce_scatter")[: 3 if value.requires_grad else 2]
    added_s = sum(costs.collective_s(kind, 1, tuple(gather)) for kind in kinds)
    return 2 * (shared - own).gathered_s + (shared - own).reduced_s > added_s


def parameter_copies(
    value: Value, stored: Layout, gather: Sequence[int], costs: ConversionCosts
) -> GroupCopies:
    """Copies of one parameter, with its own collective or in a group."""
    if is_unbucketed(value, stored, gather, costs):
        return _unbucketed_copies(value, stored, gather, costs)
    return member_copies(value, stored, gather, costs)


def group_copies(
    members: Sequence[tuple[Value, Layout]],
    gather: Sequence[int],
    costs: ConversionCosts,
) -> GroupCopies:
    """Copies of a whole group. members: parameters, and how they are stored."""
    if len(members) == 1:
        ((value, stored),) = members
        return _unbucketed_copies(value, stored, gather, costs)
    found = GroupCopies()
    for value, stored in members:
        found += member_copies(value, stored, gather, costs)
    return found


def _unbucketed_copies(
    value: Value, stored: Layout, gather: Sequence[int], costs: ConversionCosts
) -> GroupCopies:
    """Copies of the only member of a group: nothing to pack, and what is contiguous is copied only
    where its gradient is cast. What is all-reduced is copied, since that writes into it."""
    found = member_copies(value, stored, gather, costs)
    cast = cast_s(value, stored, costs) if value.master else 0.0
    if not (gather and _is_contiguous(stored, gather, costs.mesh.sizes)):
        return GroupCopies(cast, found.unpacked_s, found.reduced_s)
    return GroupCopies(cast, 0.0, found.reduced_s if value.master else 0.0)


def _is_contiguous(stored: Layout, gather: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the shards of all ranks, one after the other, are the parameter as it is read: it is
    sharded along its first dim by the axes that it is gathered over, the first one outermost."""
    blocks = 1
    for k in gather:
        if stored[k].dim != 0 or stored[k].padded or stored[k].blocks != blocks:
            return False
        blocks *= sizes[k]
    return all(t.dim != 0 for k, t in enumerate(stored) if k not in gather)


def changed_axes(stored: Layout, used: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(axes gathered, axes only reduced) between the two layouts of a member."""
    pairs = list(enumerate(zip(stored, used, strict=True)))
    gather = tuple(k for k, (s, u) in pairs if s != u and s.is_shard)
    reduce = tuple(k for k, (s, u) in pairs if s != u and not s.is_shard)
    return gather, reduce


def used_layout(stored: Layout, demand: Layout, mesh: Mesh) -> Layout:
    """The layout that the runtime gives a parameter stored as `stored` for an op that reads
    `demand`: axes that go to Replicate from Invariant or Shard are done. The rest is converted in
    the graph."""
    return tuple(
        REPLICATE if is_grouped(s, d) and n > 1 else s
        for s, d, n in zip(stored, demand, mesh.sizes, strict=True)
    )


def parameter_group_key(
    v: int, value: Value, stored: Layout, used: Layout, costs: ConversionCosts
) -> ParameterGroupKey | None:
    """The group that a parameter is in; None: it needs no collective and no copy. v: its slot."""
    gather, reduce = changed_axes(stored, used)
    if not (gather or (reduce and value.requires_grad) or value.master):
        return None
    own = (v, used) if is_unbucketed(value, stored, gather, costs) else None
    replicas = tuple(k for k in reduce if costs.mesh.names[k] == REPLICATE_AXIS)
    return ParameterGroupKey(
        gather,
        () if gather else reduce,
        replicas if gather else (),
        value.dtype,
        value.requires_grad,
        value.master,
        own,
    )
