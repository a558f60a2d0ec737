"""Parameters that several ranks hold alike, compared: each updates its own copy, so that noise of
another seed, another learning rate or a step that one rank leaves out drives them apart.

Copies are not the same bit by bit wherever kernels add up in no order. So a few numbers of each are
compared, within a part of their size that rounding does not reach.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh, all_reduced
from meshfold.ir.mesh import PIPELINE_AXIS
from meshfold.training.shards.gradient_norm import ShardedAxes

NUM_SAMPLES = 8
"""Numbers of a parameter that are compared."""
TOLERANCE = 1e-2
"""Of the largest of them."""


def names_alike(mesh: RankMesh, sharded: ShardedAxes) -> dict[str, tuple[str, ...]]:
    """By axis of the storage mesh the parameters of which its ranks hold the same."""
    storage = mesh.mesh.storage
    axes = [n for n, size in zip(storage.names, storage.sizes, strict=True) if size > 1]
    return {
        axis: tuple(sorted(name for name, of in sharded.items() if axis not in of))
        for axis in axes
        if axis != PIPELINE_AXIS
    }


def first_different(
    mesh: RankMesh, alike: Mapping[str, Sequence[str]], parameters: Mapping[str, Tensor]
) -> str:
    """The name of one that other ranks hold otherwise, the same on all ranks that hold it; "" if
    there is none. parameters: this rank's, by name. A collective call: groups of an axis that agree
    go on to the next one, so those that do not go with them."""
    found = ""
    for axis, names in alike.items():
        here = [name for name in names if name in parameters]
        if not here:
            continue
        own = torch.stack([_samples(parameters[name]).to(mesh.device) for name in here])
        most, negated = all_reduced(mesh, torch.stack([own, -own]), (axis,), "max")
        size = torch.maximum(most.abs(), negated.abs()).amax(1, keepdim=True)
        different = (most + negated > TOLERANCE * size).any(1).nonzero().flatten().tolist()
        if different and not found:
            found = here[different[0]]
    return found


def _samples(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    some = flat[:: max(1, flat.numel() // NUM_SAMPLES)][:NUM_SAMPLES].to(torch.float64)
    return torch.nn.functional.pad(some, (0, NUM_SAMPLES - some.numel()))
