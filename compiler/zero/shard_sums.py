"""Gradients of shards that leave the backward before its end, behind their reduction.

With every microbatch ZeRO 2 and 3 reduce-scatter gradients. Until the end of the backward the
results would be there beside the sums of earlier microbatches, and the buffers of all that links
are behind with: those of a region are waited for and added (meshfold.zero.microbatch_state) when
the backward of the region before is over, as FSDP2 adds them to .grad, and those of parameters on
the host leave for it. What several uses of a parameter make is added up at the end.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

from torch import Tensor

from meshfold.zero.host_side import HostSide
from meshfold.zero.last_reductions import Gradients
from meshfold.zero.microbatch_state import Key, SharedStep
from meshfold.zero.parameter_group import ParameterGroup


class ScatteredUse(Protocol):
    """What is asked of a GroupUse."""

    key: Key
    group: ParameterGroup
    shards: tuple[Tensor, ...]

    @property
    def sums_replicas(self) -> bool: ...
    def adds_up(self, member: int) -> bool: ...


def lone_shards(uses: Iterable[ScatteredUse]) -> frozenset[int]:
    """Ids of the shards that one use alone reads."""
    counts = Counter(map(id, chain.from_iterable(use.shards for use in uses)))
    return frozenset(shard for shard, count in counts.items() if count == 1)


def leave(use: ScatteredUse, gradients: Gradients, host: HostSide, shared: SharedStep) -> Gradients:
    """What is left of the gradients of a use for the end of the backward."""
    return gradients and [
        gradient if gradient is None else _left(use, m, gradient, host, shared)
        for m, gradient in enumerate(gradients)
    ]


def _left(
    use: ScatteredUse, m: int, gradient: Tensor, host: HostSide, shared: SharedStep
) -> Tensor | None:
    is_final = not (use.group.gather and use.group.left_axes(m, use.sums_replicas))
    if is_final and host.takes(use.shards[m]):
        host.take(use.shards[m], gradient)
        return None
    return shared.add((*use.key, m), gradient) if use.adds_up(m) else gradient


def on_device(use: ScatteredUse, gradients: Gradients, host: HostSide) -> Gradients:
    """What stays here at the end of the backward of what has no more axes to be summed over."""
    found: list[Tensor | None] = []
    for shard, gradient in zip(use.shards, gradients or (), strict=gradients is not None):
        is_taken = gradient is not None and host.takes(shard)
        if gradient is not None and is_taken:
            host.take(shard, gradient)
        found.append(None if is_taken else gradient)
    return gradients and found


def are_early(shared: SharedStep, host: HostSide, shards: Sequence[Tensor], *, adds: bool) -> bool:
    """Whether gradients of a use leave early. adds: whether it is reduced with every microbatch.
    Those of the first of several become the sums: so no more buffers than two regions fill wait for
    a link."""
    is_only = shared.is_last and shared.is_empty
    return adds and not is_only or any(map(host.takes, shards))
