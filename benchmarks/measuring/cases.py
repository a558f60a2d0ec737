"""What benchmarks/gpu.py measures on one device: a model and its plans, a function per item."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from measuring.one_rank import OneRank, peak_bytes
from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec, DeviceSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.profiling.timing import Timer
from meshfold.torch_compat.dtypes import torch_dtype

Item = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Of a Llama. samples: of a data-parallel rank."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    samples: int


SIZES = {
    "cpu": Size(layers=2, width=64, heads=8, vocabulary=256, sequence=32, samples=1),
    "cuda": Size(layers=8, width=2048, heads=16, vocabulary=32000, sequence=1024, samples=2),
}
PLANS: tuple[tuple[int, Mapping[str, int | str]], ...] = (
    (1, {}),
    (2, {"dp": 2, "zero": 0}),
    (8, {"dp": 8, "zero": 3}),
    (4, {"tp": 4, "sp": 0}),
    (8, {"tp": 8, "sp": 1}),
    (64, {"dp": 8, "tp": 8, "sp": 1, "zero": 3}),
    (1, {"recompute": "full"}),
    (16, {"dp": 4, "tp": 4, "zero": 3}),
    (64, {"dp": 64, "zero": 3}),
    (16, {"dp": 2, "tp": 8, "sp": 1, "recompute": "full"}),
)
"""(ranks, pins), the most telling first."""
OPEN = CompileOptions(pins={}, memory_bytes=2**50, optimizer="sgd")
"""Of plans without a budget, and without an optimizer that keeps states: it is not run here."""
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}
FAMILIES = {"H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "V100": "dgx-v100"}
FAMILIES |= {"A100": "dgx-a100-80", "A10": "a10g", "L4": "l4", "TITAN RTX": "titan-rtx"}
"""Presets by what the names of their devices hold."""


def build_model(size: Size, dtype: str, device: torch.device | str = "cpu") -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.sequence,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device=device, dtype=torch_dtype(dtype))


def build_batch(size: Size, data_ranks: int) -> dict[str, Tensor]:
    shape = (size.samples * data_ranks, size.sequence)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, size.vocabulary, shape, generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def preset_of(device: torch.device) -> str:
    """The preset whose device this is; else one whose links may stand for any."""
    if device.type == "cpu":
        return "local-cpu"
    name = torch.cuda.get_device_name(device)
    return next((preset for part, preset in FAMILIES.items() if part in name), "dgx-h100")


def with_device(preset: str, num_ranks: int, measured: DeviceSpec | None) -> ClusterSpec:
    """So many devices of a preset, with the figures that were measured. Memory is no matter here:
    what runs is one rank."""
    spec = resolve_cluster(preset, num_ranks)
    groups = tuple(replace(g, device=measured or g.device) for g in spec.groups)
    return replace(spec, groups=groups)


def rank_item(
    size: Size,
    dtype: str,
    num_ranks: int,
    pins: Mapping[str, int | str],
    timer: Timer,
    measured: DeviceSpec | None,
) -> Item:
    """Peak memory and seconds of rank 0 of a plan, forward and backward, beside the prediction."""
    model = build_model(size, dtype)
    batch = build_batch(size, int(pins.get("dp", 1)))
    captured = capture(model, dict(batch))
    options = replace(OPEN, pins={"microbatches": 1, **pins})
    preset = preset_of(timer.device)
    plan = plan_captured(captured, "Llama", with_device(preset, num_ranks, None), options)
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram) and plan.simulated is not None
    rank = OneRank(model, captured, program, batch, timer.device)
    seconds = timer.seconds(rank.step)
    peak = peak_bytes(rank.step, timer.device)
    states = [*rank.parameters.values(), *rank.buffers.values()]
    resident = sum(t.nbytes for t in (*states, *batch.values()))
    found: Item = {
        "plan": plan.strategy.label,
        "measured_compute_s": seconds,
        "predicted_compute_s": compute_s(plan),
        "measured_peak_bytes": peak + resident,
        "predicted_peak_bytes": plan.simulated.peak_bytes - plan.memory.reserve,
    }
    if measured is not None:
        cluster = with_device(preset, num_ranks, measured)
        again = plan_captured(captured, "Llama", cluster, options)
        found["predicted_with_profile_s"] = compute_s(again)
    return found


def compute_s(plan: Plan) -> float:
    """What a plan says of compute, without the optimizer."""
    assert plan.simulated is not None
    return plan.simulated.compute_s - plan.time.optimizer_s


def alone_item(size: Size, dtype: str, timer: Timer) -> Item:
    """The model itself against the program of one rank: loss, gradients, seconds, peak memory."""
    device = timer.device
    model = build_model(size, dtype)
    batch = build_batch(size, 1)
    captured = capture(model, dict(batch))
    plan = plan_captured(captured, "Llama", with_device(preset_of(device), 1, None), OPEN)
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram)
    rank = OneRank(model, captured, program, batch, device)
    loss = rank.train()
    errors = _errors(model, batch, rank, loss, device)
    found: Item = {f"program_{key}": value for key, value in _costs(rank.step, timer).items()}
    del rank
    alone = model.to(device)
    placed = {name: x.to(device) for name, x in batch.items()}

    def train() -> None:
        alone.zero_grad()
        alone(**placed).loss.backward()
        alone.zero_grad()

    found |= {f"model_{key}": value for key, value in _costs(train, timer).items()}
    return {**errors, **found}


def _costs(train: Any, timer: Timer) -> Item:
    seconds = timer.seconds(train)
    return {"step_s": seconds, "peak_bytes": peak_bytes(train, timer.device)}


def _errors(
    model: nn.Module, batch: Mapping[str, Tensor], rank: OneRank, loss: Tensor, device: torch.device
) -> Item:
    """Relative differences from the model alone in the same dtype: of the loss, and of the gradient
    that differs most, in norms."""
    alone = model.to(device)
    alone.zero_grad()
    expected = alone(**{name: x.to(device) for name, x in batch.items()}).loss
    expected.backward()
    worst = 0.0
    for name, parameter in rank.parameters.items():
        right = alone.get_parameter(name).grad
        if right is not None and parameter.grad is not None:
            norm = right.float().norm().item()
            apart = (parameter.grad.float() - right.float()).norm().item()
            worst = max(worst, apart / norm if norm else apart)
    alone.zero_grad()
    off = abs(loss.item() - expected.item()) / abs(expected.item())
    return {"loss_error": off, "worst_gradient_error": worst}
