"""The parameters of a CompiledModel that its plan stores in the host's memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.offload.copies import device_copies
from meshfold.offload.host_parameters import HostParameters
from meshfold.runtime.pipeline_runner import PipelineRunner
from meshfold.runtime.runner import ProgramRunner


def host_parameters(
    program: EmittedProgram | EmittedPipeline,
    mesh: RankMesh,
    parameters: Mapping[str, Tensor],
    on_gradient: Callable[[str, Tensor], None],
) -> HostParameters | None:
    """Those of this rank; None where nothing is stored on the host. parameters: what this rank
    stores, by canonical name. on_gradient: see HostParameters."""
    names = [name for name in parameters if name in program.offloaded]
    if not names:
        return None
    holders = program.holders if isinstance(program, EmittedPipeline) else {}
    shared = [name for name, devices in holders.items() if len(devices) > 1]
    copies = device_copies(program.stage_programs(mesh.coords), names, shared, program.by_layer)
    return HostParameters(copies, parameters, mesh.device, on_gradient)


def stored_on_host(part: Tensor) -> Tensor:
    """A copy in the host's memory; pinned where the device works by itself."""
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    return host.copy_(part)


def run_step(
    runner: ProgramRunner | PipelineRunner,
    host: HostParameters | None,
    parameters: Mapping[str, Tensor],
    *arguments: Any,
    rng: tuple[int, int],
) -> list[Tensor]:
    """runner.run_all with what is stored on the host. A pipeline runs its backwards, too."""
    if host is None:
        return runner.run_all(parameters, *arguments, rng=rng)
    on_device = host.on_device(parameters)
    if not isinstance(runner, PipelineRunner):
        return runner.run_all(on_device, *arguments, rng=rng)
    with host.whole_step():
        return runner.run_all(on_device, *arguments, rng=rng)
