"""The norm of all gradients of a model whose ranks hold shards, and clipping by it.

    local sum of |g|^p per set of axes that shard a parameter
        -> summed over these axes: every shard is counted once, what is whole on an axis once
        -> the root of the sum over all sets: the same on all ranks

One all-reduce per axis, of one number per set.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshfold.collectives import RankMesh, all_reduced
from meshfold.spmd import Layout


def total_norm(
    parameters: Sequence[tuple[nn.Parameter, Layout]], mesh: RankMesh, norm_type: float
) -> Tensor:
    """The norm of the gradients of the whole model, a 0-dim tensor in float32 or wider.

    parameters: local shards with their layouts, in the same order on all ranks.
    """
    is_max = math.isinf(norm_type)
    sums: dict[frozenset[int], Tensor] = {frozenset(): torch.zeros((), device=mesh.device)}
    for parameter, layout in parameters:
        cut = frozenset(k for k, t in enumerate(layout) if t.is_shard and mesh.mesh.sizes[k] > 1)
        # Also where this rank has no gradient: all ranks reduce the same sets.
        before = sums.setdefault(cut, torch.zeros((), device=mesh.device))
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach()
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=wide)
        sums[cut] = torch.maximum(before, norm) if is_max else before + norm**norm_type
    cuts = sorted(sums, key=sorted)
    values = torch.stack([sums[cut] for cut in cuts])
    for axis, name in enumerate(mesh.mesh.names):
        is_cut = [axis in cut for cut in cuts]
        if any(is_cut):
            reduced = all_reduced(mesh, values, (name,), "max" if is_max else "sum")
            values = torch.where(torch.tensor(is_cut, device=values.device), reduced, values)
    return values.max() if is_max else values.sum() ** (1.0 / norm_type)
