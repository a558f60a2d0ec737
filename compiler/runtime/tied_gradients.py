"""Gradients of parameters that several devices of a pipeline hold (tied embeddings), added up once
per step."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.distributed.rank_mesh import ProcessMesh
from meshfold.distributed.waiting import Place
from meshfold.ir.mesh import PIPELINE_AXIS
from meshfold.runtime.runner import Tensors
from meshfold.runtime.stage_p2p import wait_for


@dataclass(frozen=True)
class TiedGradients:
    """Parameters that the same devices store, and this rank's group of them."""

    names: tuple[str, ...]
    group: dist.ProcessGroup

    def add_up(self, parameters: Tensors, place: Place) -> None:
        """Make every holder's gradient the sum of all. What was frozen since takes part with zeros
        and gets none, so that ranks exchange what they always do."""
        who = f"the gradient of {self.names[0]} waited for the other stages that hold it"
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in self.names:
            parameter = parameters[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if parameter.requires_grad:
                parameter.grad = gradient
            by_dtype.setdefault(parameter.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            flat = torch.cat([g.reshape(-1) for g in gradients])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            wait_for(work, who, place)
            sums = torch.split(flat, [g.numel() for g in gradients])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total.view_as(gradient))


def tied_groups(pipeline: EmittedPipeline, mesh: ProcessMesh) -> tuple[TiedGradients, ...]:
    """Groups of this rank for trained parameters that several devices store. Every rank creates
    every group, in one order."""
    trained = {p.name for p in pipeline.folded.parameters if p.requires_grad and p.used}
    by_devices: dict[tuple[int, ...], list[str]] = {}
    for name, devices in pipeline.holders.items():
        if len(devices) > 1 and name in trained:
            by_devices.setdefault(devices, []).append(name)
    found = []
    for devices, names in sorted(by_devices.items()):
        for column in mesh.mesh.groups((PIPELINE_AXIS,)):
            ranks = [column[device] for device in devices]
            if (group := mesh.new_group(ranks)) is not None:
                found.append(TiedGradients(tuple(sorted(names)), group))
    return tuple(found)
