"""Memory of programs whose operators run in slices, under ZeRO 3: predicted, and of rank 0 without
its peers, counted and as the allocator has it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from support.programs.memory import EmittedStep, allocator_peak_bytes
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.region import emit_typed
from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.split.operator_slices import with_slices

NUM_RANKS = 8


@dataclass(frozen=True)
class SlicedPeaks:
    """Bytes at the worst moment of a step, beside parameters, gradients that stay, and the batch:
    by the memory model, by counting storages, and by the allocator's events."""

    predicted: int
    counted: int
    allocated: int


def sliced_peaks(
    model: nn.Module, batch: dict[str, torch.Tensor], count: int, num_ranks: int = NUM_RANKS
) -> SlicedPeaks:
    """Of a model that `num_ranks` train under ZeRO 3, its largest operator in `count` slices.
    batch: the global one."""
    captured = capture(model, dict(batch))
    if count > 1:
        captured = replace(captured, graph=with_slices(captured.graph, count))
    spec = cluster(f"local-cpux{num_ranks}")
    mesh = build_mesh(spec, num_ranks, 1)
    search = MeshSearch(captured.graph, spec, mesh, batch["labels"].shape[0])
    typings = search.solve(zero=3, mode="tensor").typings
    found, _ = MemoryModel(search.costs, OpProber()).step(
        captured.graph, typings, optimizer="sgd", reserve_bytes=0, capacity_bytes=2**40
    )
    program = emit_typed(captured.graph, typings, search.costs)
    own: dict[str, Any] = dict(batch)
    step = EmittedStep(model, captured, program, own)
    predicted = found.peak - found.parameters
    predicted -= sum(t.nbytes for t in batch.values()) // num_ranks
    return SlicedPeaks(predicted, step.counted_peak_bytes(), allocator_peak_bytes(step.train))
