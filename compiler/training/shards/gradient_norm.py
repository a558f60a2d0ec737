"""The norm of all gradients of a model whose ranks hold shards.

    local sum of |g|^p per set of axes over which ranks hold different shards
        -> summed over these axes: every shard is counted once, what is unsharded on an axis once
        -> the root of the sum over all sets: the same on all ranks

One all-reduce per axis, of one number per set. In a pipeline a stage has its own parameters; one
that several stages have counts on the first.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import RankMesh, all_reduced
from meshfold.errors import OptionError
from meshfold.ir.mesh import PIPELINE_AXIS
from meshfold.training.shards.local_shard import local_tensor

ShardedAxes = Mapping[str, frozenset[str]]
"""By name of a parameter the axes of the storage mesh over which ranks hold different shards."""


def sharded_axes(program: EmittedProgram | EmittedPipeline) -> ShardedAxes:
    """Of every parameter of the model, those of other stages included."""
    mesh = program.mesh.storage
    named = list(zip(mesh.names, mesh.sizes, strict=True))
    stages = {PIPELINE_AXIS} if isinstance(program, EmittedPipeline) else set()
    return {
        p.name: frozenset(
            name
            for (name, size), kind in zip(
                named, program.mesh.on_storage(program.stored[p.name]), strict=True
            )
            if size > 1 and (kind.is_shard or name in stages)
        )
        for p in program.folded.parameters
    }


def cut_parameters(program: EmittedProgram | EmittedPipeline) -> frozenset[str]:
    """Those of which no rank has the whole."""
    axes = sharded_axes(program)
    return frozenset(name for name, of in axes.items() if of - {PIPELINE_AXIS})


def is_counted(
    program: EmittedProgram | EmittedPipeline, name: str, coords: tuple[int, ...]
) -> bool:
    """Whether a rank counts its shard of a parameter, or leaves it to an earlier stage."""
    if not isinstance(program, EmittedPipeline):
        return True
    return program.holders[name][0] == program.device_of(coords)


def clip_gradients(
    program: EmittedProgram | EmittedPipeline,
    mesh: RankMesh,
    local: Mapping[str, Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scales the gradients of `local`, this rank's parameters by name, so that the norm of those of
    the whole model is at most max_norm; the norm before. See CompiledModel.clip_grad_norm_."""
    if norm_type <= 0:
        raise OptionError(f"norm_type {norm_type}: a norm is of order above 0, inf included")
    gradients = {
        name: local_tensor(p.grad)
        for name, p in local.items()
        if p.grad is not None and is_counted(program, name, mesh.coords)
    }
    norm = total_norm(gradients, sharded_axes(program), mesh, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}; look for what diverges, or lower the "
            "loss scale"
        )
    clip_grads_with_norm_(local.values(), max_norm, norm)
    return norm


def total_norm(
    gradients: Mapping[str, Tensor], sharded: ShardedAxes, mesh: RankMesh, norm_type: float
) -> Tensor:
    """The norm of the gradients of the whole model, a 0-dim tensor in float32 or wider.

    gradients: the shards that this rank counts, by name. sharded: the same on all ranks.
    """
    is_max = math.isinf(norm_type)
    order = sorted(set(sharded.values()), key=sorted)
    values = torch.zeros(len(order), dtype=torch.float64, device=mesh.device)
    for name, gradient in gradients.items():
        k = order.index(sharded[name])
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient.detach(), norm_type, dtype=wide).to(values.device)
        values[k] = torch.maximum(values[k], norm) if is_max else values[k] + norm**norm_type
    for axis in mesh.mesh.storage.names:
        is_sharded = [axis in axes for axes in order]
        if any(is_sharded):
            reduced = all_reduced(mesh, values, (axis,), "max" if is_max else "sum")
            values = torch.where(torch.tensor(is_sharded, device=values.device), reduced, values)
    if not order:
        return torch.zeros((), device=mesh.device)
    return values.max() if is_max else values.sum() ** (1.0 / norm_type)
