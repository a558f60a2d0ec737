"""Training with and without something in the host's memory, which must agree bit by bit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import meshfold
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.runtime.runner import ProgramRunner
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.shards.local_shard import local_tensor
from support.models.hugging_face import tiny_model
from support.programs.local_programs import stack_model


def cluster_with_hosts(num_devices: int) -> ClusterSpec:
    """Processes of this machine, as if they had hosts."""
    cluster = resolve_cluster("local-cpu", num_devices)
    (group,) = cluster.groups
    rates = {"host_bytes_per_s": 1e10, "host_memory_bytes_per_s": 1e10, "disk_bytes_per_s": 1e9}
    device = replace(group.device, **rates)
    return replace(cluster, groups=(replace(group, device=device),))


class Trained(NamedTuple):
    model: CompiledModel
    optimizer: torch.optim.Optimizer
    batch: Mapping[str, Any]

    def steps(self, count: int) -> "Trained":
        """Steps of two batches each, whose gradients add up and are clipped."""
        for _ in range(count):
            for _ in range(2):
                self.model.train_step(self.batch)
            self.model.clip_grad_norm_(0.05)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def started(pins: Mapping[str, PinValue], family: str = "stack", **options: Any) -> Trained:
    """A model with its optimizer."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if family in ("stack", "dropout"):
        model, batch = stack_model(4, batch=8, dropout=0.3 * (family == "dropout"))
    else:
        model, batch = tiny_model(family)
    if "precision" in options:
        model = model.float()
        batch = {k: x.float() if x.is_floating_point() else x for k, x in batch.items()}
    compiled = meshfold.compile(
        model, cluster_with_hosts(ranks), batch, options=CompileOptions(pins=pins, **options)
    )
    return Trained(compiled, torch.optim.AdamW(compiled.parameters(), lr=0.05), batch)


class Compared(NamedTuple):
    """differ: names of parameters that are not bitwise equal; early: gradients that left before
    the backward was over."""

    differ: list[str]
    num_offloaded: int
    device_bytes: int
    stored_bytes: int


def compared(
    pins: Mapping[str, PinValue],
    family: str = "stack",
    offload: str = "optimizer",
    **options: Any,
) -> Compared:
    """After three steps with all optimizer states on the host, and without. offload: of the pin."""
    right = started(pins, family, **options).steps(3)
    found = started({**pins, "offload": offload}, family, **options).steps(3)
    own = dict(right.model.named_parameters())
    differ = differing(found.model, own)
    host = found.model.host_side
    assert host is not None
    assert host.link.num_bytes_to_host > 0 and not any(
        c.grad is not None for c in host._copies.values()
    )
    assert host.by_layer.num_bytes == 0, "what comes layer by layer has gone"
    names = found.model.program.offloaded & {found.model._canonical[n] for n in own}
    stored = sum(p.nbytes for n, p in own.items() if found.model._canonical[n] in names)
    return Compared(differ, len(names), host.num_device_bytes, stored)


def differing(model: CompiledModel, own: Mapping[str, Tensor]) -> list[str]:
    """Names of its parameters that are not bitwise those of `own`."""
    pairs = {n: (local_tensor(p), local_tensor(own[n])) for n, p in model.named_parameters()}
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]


class Saved(NamedTuple):
    """differ: names of parameters that are not bitwise equal. Bytes that went over the link."""

    differ: list[str]
    num_bytes_to_host: int
    num_bytes_to_device: int


def activations_compared(
    pins: Mapping[str, PinValue], family: str = "stack", **options: Any
) -> Saved:
    """After three steps with all saved activations on the host, and without."""
    right = started(pins, family, **options).steps(3)
    found = started({**pins, "offload": "activations"}, family, **options).steps(3)
    own = dict(right.model.named_parameters())
    differ = differing(found.model, own)
    (runner,) = found.model._runners.values()
    assert isinstance(runner, ProgramRunner)
    link = runner.host_link
    return Saved(differ, link.num_bytes_to_host, link.num_bytes_to_device)


def checkpointed(
    folder: str, first: Mapping[str, PinValue], second: Mapping[str, PinValue]
) -> bool:
    """Whether a run that goes on under `second` is bitwise the run under `first` that never
    stopped."""
    run = started(first).steps(1)
    meshfold.save_checkpoint(folder, run.model, run.optimizer)
    other = started(second)
    meshfold.load_checkpoint(folder, other.model, other.optimizer)
    run.steps(1), other.steps(1)
    right, found = run.model.full_state_dict(), other.model.full_state_dict()
    return all(torch.equal(right[name], found[name]) for name in right)
