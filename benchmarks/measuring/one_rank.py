"""One rank of a program for many, without the others: real compute and memory, no collectives."""

import gc
from collections.abc import Callable, Mapping

import torch
from support.programs.local_programs import local_part
from support.programs.memory import EchoMesh, allocator_peak_bytes
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.runtime.batches import BatchReader
from meshfold.runtime.runner import ProgramRunner


class OneRank:
    """Rank 0 of a program on a device. Collectives give tensors of the right shape at once, with
    its own data in place of everybody's, for the price of a copy."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        program: EmittedProgram,
        batch: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        mesh = EchoMesh(program.mesh, 0, device, program.levels)
        self.parameters = {
            p.name: nn.Parameter(
                local_part(program, p.name, model.get_parameter(p.name), mesh).to(device)
            )
            for p in captured.graph.parameters
        }
        self.buffers = {
            b.name: model.get_buffer(b.name).to(device, copy=True) for b in captured.graph.buffers
        }
        self.runner = ProgramRunner(program, mesh, captured.constants)
        self.inputs = BatchReader([program], mesh, {}).read(batch)

    def train(self) -> Tensor:
        """Forward and backward, with fresh gradients, which stay."""
        for p in self.parameters.values():
            p.grad = None
        loss = self.runner.run(self.parameters, self.buffers, self.inputs)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """The same, and gradients go."""
        self.train()
        for p in self.parameters.values():
            p.grad = None


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that `run` takes beside what is there before, from the allocator of the device."""
    if device.type == "cpu":
        return allocator_peak_bytes(lambda: None if run() is None else None)
    run()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
