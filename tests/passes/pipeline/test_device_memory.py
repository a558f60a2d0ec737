"""Peaks of devices with microbatches and stages, against what their steps take."""

from typing import Any

import pytest
import torch
from measuring.budgets import Models, TrainingRank
from support.processes.offload import cluster_with_hosts
from torch import nn

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.ir.options import CompileOptions, Mode

MODELS = Models()

PINS: dict[str, tuple[int, dict[str, Any]]] = {
    "microbatches": (1, {"dp": 1, "microbatches": 4}),
    "dp": (2, {"dp": 2, "microbatches": 2, "zero": 0}),
    "zero1": (2, {"dp": 2, "microbatches": 2, "zero": 1}),
    "zero3": (2, {"dp": 2, "microbatches": 2, "zero": 3}),
    "gpipe": (2, {"pp": 2, "dp": 1, "microbatches": 4, "schedule": "gpipe"}),
    "1f1b": (2, {"pp": 2, "dp": 1, "microbatches": 4, "schedule": "1f1b"}),
    "zero bubble": (2, {"pp": 2, "dp": 1, "microbatches": 4, "schedule": "zero_bubble"}),
    "recomputed": (2, {"pp": 2, "dp": 1, "microbatches": 2, "recompute": "full"}),
    "stages x dp": (4, {"pp": 2, "dp": 2, "microbatches": 2, "zero": 0}),
    "stages x zero3": (4, {"pp": 2, "dp": 2, "microbatches": 2, "zero": 3}),
    "tp": (2, {"tp": 2, "dp": 1, "microbatches": 2}),
    "stages x zero1": (4, {"pp": 2, "dp": 2, "microbatches": 4, "zero": 1}),
    "zero bubble x zero1": (
        4,
        {"pp": 2, "dp": 2, "microbatches": 4, "zero": 1, "schedule": "zero_bubble"},
    ),
}

QUICK = [
    ("gpt2", "microbatches", "eager"),
    ("llama", "gpipe", "eager"),
    ("gpt2", "zero bubble", "eager"),
    ("llama", "stages x zero3", "eager"),
    ("gpt2", "1f1b", "scheduled"),
    ("llama", "zero bubble x zero1", "eager"),
]
EVERY = [(f, name, "eager") for f in ("gpt2", "llama", "bert", "mixtral") for name in PINS]


@pytest.mark.parametrize(
    ("family", "pins", "mode"),
    [
        *QUICK,
        *(pytest.param(*c, marks=pytest.mark.slow) for c in EVERY if c not in QUICK),
    ],
)
def test_a_device_takes_what_its_plan_says(family: str, pins: str, mode: Mode) -> None:
    """The device that comes nearest to its prediction: within 4 %, and no device is more than a
    percent above it, where kernels have scratch memory that no dispatcher sees."""
    torch.set_num_threads(1)
    num_ranks, pinned = PINS[pins]
    model, batch, captured = MODELS.of(family)
    options = CompileOptions(pins={"offload": "none", **pinned}, mode=mode)
    spec = cluster_with_hosts(num_ranks)
    plan = plan_captured(captured, family, spec, options, probe=MODELS.probe)
    program = emit_plan(captured.graph, plan)
    errors = []
    for device, stage in enumerate(plan.stages):
        assert stage.costs is not None and stage.costs.memory is not None
        rank = device * plan.mesh.num_ranks // len(plan.stages)
        counted = TrainingRank(program, rank, model, batch, captured).counted_bytes()
        errors.append((stage.costs.peak_bytes - stage.costs.memory.reserve) / counted - 1)
    assert min(errors) > -0.015
    assert min(errors, key=abs) < 0.04


class Deep(nn.Module):
    """Parameters take most of it, and there are many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(64, 256) for _ in range(8))
        self.downs = nn.ModuleList(nn.Linear(256, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


DEEP = {
    "zero2": (2, {"dp": 2, "zero": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "stages x zero2": (4, {"pp": 2, "dp": 2, "zero": 2, "schedule": "1f1b"}),
    "stages x zero3": (4, {"pp": 2, "dp": 2, "zero": 3, "schedule": "1f1b"}),
    "zero bubble x zero2": (4, {"pp": 2, "dp": 2, "zero": 2, "schedule": "zero_bubble"}),
    "zbv x zero3": (4, {"pp": 2, "dp": 2, "zero": 3, "schedule": "zbv"}),
    "interleaved x zero2": (4, {"pp": 2, "dp": 2, "zero": 2, "schedule": "interleaved"}),
    "hsdp": (4, {"dp": 4, "dp_shard": 2, "zero": 3}),
}


@pytest.mark.parametrize("pins", DEEP)
def test_shards_of_gradients_are_there_once(pins: str) -> None:
    """Gradients that are reduced with every microbatch: within a percent on every device."""
    torch.manual_seed(0)
    model, batch = Deep(), {"x": torch.randn(16, 64)}
    captured = capture(model, batch)
    num_ranks, pinned = DEEP[pins]
    fixed = {"offload": "none", "recompute": "none", "microbatches": 4}
    options = CompileOptions(pins={**fixed, **pinned}, mode="eager")
    spec = cluster_with_hosts(num_ranks)
    plan = plan_captured(captured, "deep", spec, options, probe=MODELS.probe)
    program = emit_plan(captured.graph, plan)
    num_devices = plan.strategy.pp
    for device, stage in enumerate(plan.stages[:num_devices]):
        assert stage.costs is not None and stage.costs.memory is not None
        rank = device * plan.mesh.num_ranks // num_devices
        counted = TrainingRank(program, rank, model, batch, captured).counted_bytes()
        predicted = stage.costs.peak_bytes - stage.costs.memory.reserve
        assert predicted == pytest.approx(counted, rel=0.01)
