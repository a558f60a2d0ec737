"""Which parameters and buffers are local to a rank: of a pipeline those of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import ProcessMesh, RankMesh
from meshfold.ir.mesh import PIPELINE_AXIS
from meshfold.ir.op_graph import BufferInfo, ParameterInfo, SourceKind
from meshfold.sharding.layout import shard_of
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.training.shards.host_storage import stored_on_host
from meshfold.training.shards.initialization import initial_values
from meshfold.training.shards.state_dict import StateExchange, StoredTensor


@dataclass(frozen=True)
class LocalTensors:
    """By canonical name. read: the buffers that some op, or the count of targets, reads."""

    parameters: Mapping[str, ParameterInfo]
    buffers: Mapping[str, BufferInfo]
    read: frozenset[str]


def local_tensors(
    program: EmittedProgram | EmittedPipeline, coords: tuple[int, ...]
) -> LocalTensors:
    """What the programs of a rank need."""
    graphs = [stage.folded for stage in program.stage_programs(coords)]
    counted = program.counted_buffers if isinstance(program, EmittedPipeline) else frozenset()
    sources = (s for graph in graphs for i in graph.instances for s in i.sources)
    return LocalTensors(
        {p.name: p for graph in graphs for p in graph.parameters},
        {b.name: b for graph in graphs for b in graph.buffers},
        counted.union(s.name for s in sources if s.kind is SourceKind.BUFFER),
    )


def stored_tensors(program: EmittedProgram | EmittedPipeline) -> dict[str, StoredTensor]:
    """Shape and layout, on the storage mesh, of every parameter and buffer of the model, by
    canonical name."""
    folded, mesh = program.folded, program.mesh
    layouts = {p.name: (p.shape, program.stored[p.name]) for p in folded.parameters}
    layouts.update({b.name: (b.shape, program.unsharded) for b in folded.buffers})
    return {name: StoredTensor(shape, mesh.on_storage(x)) for name, (shape, x) in layouts.items()}


def full_tensors(
    pipeline: EmittedPipeline, mesh: RankMesh, states: StateExchange, local: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Every parameter and persistent buffer of the model unsharded, on every rank.

    local: what this rank holds, by canonical name. Called on all ranks together.
    """
    tensors = [*pipeline.folded.parameters]
    saved = [(t.name, t.shape, t.dtype) for t in tensors]
    saved += [(b.name, b.shape, b.dtype) for b in pipeline.folded.buffers if b.persistent]
    found = {}
    for name, shape, dtype in saved:
        if name in local:
            value = states.full(name, local[name]).detach().contiguous()
        else:
            value = torch.empty(shape, dtype=torch_dtype(dtype), device=mesh.device)
        if isinstance(mesh, ProcessMesh) and pipeline.schedule.num_devices > 1:
            group = mesh.group((PIPELINE_AXIS,))
            ranks = dist.get_process_group_ranks(group)
            dist.broadcast(value, ranks[pipeline.holders[name][0]], group=group)
        found[name] = value
    return found


def initial_shards(
    model: nn.Module,
    program: EmittedProgram | EmittedPipeline,
    states: StateExchange,
    mesh: RankMesh,
    seed: int,
) -> dict[str, Tensor]:
    """Local parts of parameters and of the buffers that somebody needs, by canonical name."""
    needs = local_tensors(program, mesh.coords)
    local: dict[str, Tensor] = {}
    dtypes = {name: torch_dtype(p.dtype) for name, p in needs.parameters.items()}
    needed = list(dtypes)
    needed += [b.name for b in needs.buffers.values() if b.persistent or b.name in needs.read]
    for name, value in initial_values(model, needed, seed=seed, device=mesh.device):
        part = shard_of(value, states.tensors[name].layout, states.storage.sizes, states.coords)
        dtype = dtypes.get(name, part.dtype)
        local[name] = part.to(mesh.device, dtype, copy=True).contiguous()
        if name in program.offloaded:
            local[name] = stored_on_host(local[name])
    return local
