"""Chunked vocabulary losses in plans: numbers of one process, memory as the allocator has it."""

from typing import Any

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.programs.memory import RealStep, allocator_peak_bytes, plain_typings
from support.programs.pinned import cases, program_and_error
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import Mesh
from meshfold.ir.options import Mode
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.split.chunked_losses import with_chunked_losses

PINS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp+sp": {"tp": 4, "sp": 1},
    "zero3": {"dp": 2, "zero": 3},
    "zero3 x tp, again": {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"},
}


QUICK: list[tuple[str, str, Mode]] = [
    ("gpt2", "tp", "eager"),
    ("llama", "zero3 x tp, again", "scheduled"),
]


@pytest.mark.parametrize(("family", "pins", "mode"), cases(QUICK, PINS))
def test_loss_and_every_gradient_equal_one_process(family: str, pins: str, mode: Mode) -> None:
    program, error = program_and_error(family, {**PINS[pins], "chunked_loss": 1}, mode)
    assert "linear_cross_entropy" in program.text()
    assert error < 1e-12


def wide_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """A tied table that is most of the model: the peak is when its gradients are added up."""
    sizes = {"vocab_size": 2048, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.arange(4).unsqueeze(0)
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "family", ["gpt2", "wide gpt2", pytest.param("llama", marks=pytest.mark.slow)]
)
def test_memory_is_that_of_the_allocator(family: str) -> None:
    of = wide_gpt2() if family == "wide gpt2" else tiny_model(family, dtype=torch.float32)
    model, batch = of
    step = RealStep(model, batch, with_chunked_losses)
    estimate, _ = MemoryModel(CostModel(cluster("local-cpu"), Mesh(())), OpProber()).step(
        step.folded,
        plain_typings(step.folded),
        optimizer="sgd",
        reserve_bytes=0,
        capacity_bytes=2**40,
    )
    peak = estimate.gradients + estimate.activations + estimate.transient + estimate.loss
    peak -= sum(t.nbytes for t in batch.values())
    assert peak == pytest.approx(allocator_peak_bytes(step.train), rel=0.03)
