"""The end of a backward: what is still in flight is waited for, and what is still owed to other
axes is reduced."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.zero.hierarchical_all_reduce import AllReduces
from meshfold.zero.microbatch_state import Key, SharedStep
from meshfold.zero.parameter_group import ParameterGroup

Gradients = list[Tensor | None] | None
"""Of the members of a group, as shards; None for a group without any."""


class ReducedUse(Protocol):
    """What is asked of a GroupUse."""

    group: ParameterGroup

    @property
    def key(self) -> Key: ...
    @property
    def sums_replicas(self) -> bool: ...
    def start_unfinished_reduction(self) -> None: ...
    def finish_reduction(self) -> Gradients: ...
    def adds_up(self, member: int) -> bool: ...


def finish_reductions(
    uses: Sequence[ReducedUse], mesh: RankMesh, shared: SharedStep, all_reduces: AllReduces
) -> list[Gradients]:
    """Wait for the reductions of all uses, in the order in which they were started. Members that
    are also Invariant -> Replicate on other axes than the gathered ones are all-reduced as shards,
    together per set of axes, with the last microbatch; before it they have no gradient, as others
    that are added up have none (adds_up)."""
    for use in reversed(uses):
        use.start_unfinished_reduction()
    gradients = [u.finish_reduction() for u in reversed(uses)][::-1]
    second: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[list[Tensor | None], int]]] = {}
    for use, of_use in zip(uses, gradients, strict=True):
        if of_use is None or not use.group.gather:
            continue
        for m in range(len(use.group.members)):
            gradient, axes = of_use[m], use.group.left_axes(m, use.sums_replicas)
            if gradient is not None and (axes or use.adds_up(m)):
                of_use[m] = total = shared.add((*use.key, m), gradient)
                if axes and total is not None:
                    second.setdefault((axes, total.dtype), []).append((of_use, m))
    started = []
    for (axes, _), owed in second.items():
        shards = [shard for of_use, m in owed if (shard := of_use[m]) is not None]
        flat = torch.cat([shard.reshape(-1) for shard in shards])
        names = tuple(mesh.mesh.storage.names[k] for k in axes)
        started.append((owed, [shard.shape for shard in shards], all_reduces.start(flat, names)))
    for owed, shapes, sums in started:
        summed = torch.split(all_reduces.finish(sums), [s.numel() for s in shapes])
        for (of_use, m), shape, total in zip(owed, shapes, summed, strict=True):
            of_use[m] = total.view(shape)
    return gradients
