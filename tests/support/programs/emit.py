"""What tests run on gloo processes (see pool): programs held against one process."""

import copy
import gc
import math
import os
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import meshfold
from meshfold.api import bind
from meshfold.capture.pipeline import Captured
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import MeshfoldError
from meshfold.plan_file.io import plan_from_json
from meshfold.sharding.layout import shard_of
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere
from support.models.draws import drawing_model
from support.models.functions import function_model
from support.models.hugging_face import tiny_model
from support.programs.local_programs import stack_model


@lru_cache(maxsize=1)
def eager_step(family: str) -> tuple[nn.Module, dict[str, Any], Tensor]:
    """(model with gradients, batch, loss) of the unmodified model in one process."""
    model, batch = tiny_model(family)
    with float64_everywhere():
        loss = model(**batch).loss
        loss.backward()
    return model, batch, loss.detach()


def compare_step(
    family: str, captured: Captured, plan_text: str
) -> tuple[float, float, str, list[str]]:
    """(error of the loss, largest error of a gradient, its parameter, parameters without gradient
    that have one in one process or the other way round)."""
    model, batch, expected = eager_step(family)
    compiled = bind(model, plan_from_json(plan_text), captured, batch)
    loss = compiled(**batch)
    loss.backward()
    worst, name_of_worst, uneven = 0.0, "", []
    for name, parameter in compiled.named_parameters():
        gradient = model.get_parameter(name).grad
        if (gradient is None) != (parameter.grad is None):
            uneven.append(name)
        elif gradient is not None and parameter.grad is not None:
            error = float(
                (local_tensor(parameter.grad) - part_of(compiled, name, gradient)).abs().max()
            )
            if not error <= worst:
                worst, name_of_worst = error, name
    return float((loss.detach() - expected).abs()), worst, name_of_worst, uneven


def inference_error(family: str, captured: Captured, plan_text: str) -> float:
    """Of the logits of a call without labels, on a plan's parameters."""
    model, batch = tiny_model(family)
    compiled = bind(model, plan_from_json(plan_text), captured, batch)
    model.eval()
    compiled.eval()
    batch = {name: x for name, x in batch.items() if name != "labels"}
    with float64_everywhere(), torch.no_grad():
        found, expected = compiled(**batch), model(**batch).logits
    logits = found if isinstance(found, Tensor) else found.logits
    return float((logits - expected).abs().max())


def part_of(compiled: CompiledModel, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient of one process."""
    assert compiled.rank_mesh is not None
    layout = compiled.program.stored[name]
    return shard_of(whole, layout, compiled.program.mesh.sizes, compiled.rank_mesh.coords)


def train_steps(
    family: str, pins: Mapping[str, int], num_steps: int, *, is_local: bool
) -> list[float]:
    """Losses of AdamW steps through the public call. is_local: pass this rank's part of the batch
    instead of all of it."""
    model, batch = tiny_model(family)
    options = meshfold.CompileOptions(pins={"microbatches": 1, **pins}, mode="eager")
    with float64_everywhere():
        compiled = meshfold.compile(model, _cluster(), batch, options=options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    if is_local:
        batch = {name: data_part(compiled, value) for name, value in batch.items()}
    losses = []
    for _ in range(num_steps):
        loss = compiled(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def clipped_steps(
    family: str, pins: Mapping[str, int], max_norm: float
) -> list[tuple[float, float]]:
    """(loss, norm of the gradients before clipping) of three steps of SGD with clipping; without
    pins, of the unmodified model in one process."""
    model, batch = tiny_model(family)
    with float64_everywhere():
        if pins:
            options = meshfold.CompileOptions(pins={"microbatches": 1, **pins}, mode="eager")
            compiled = meshfold.compile(model, _cluster(), batch, options=options)
            step, trained, clip = compiled, compiled, compiled.clip_grad_norm_
        else:
            step, trained = (lambda **b: model(**b).loss), model
            clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        found = []
        for _ in range(3):
            loss = step(**batch)
            loss.backward()
            found.append((float(loss.detach()), float(clip(max_norm))))
            optimizer.step()
            optimizer.zero_grad()
    return found


def scaled_steps(pins: Mapping[str, int]) -> list[tuple[float, bool]]:
    """(scale, whether a parameter of this rank changed) after each of three steps in fp16, the
    second of which overflows on rank 1 alone."""
    model, batch = tiny_model("llama")
    options = meshfold.CompileOptions(
        pins={"microbatches": 1, **pins}, mode="eager", precision="fp16"
    )
    compiled = meshfold.compile(model.float(), _cluster(), batch, options=options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0)
    found = []
    for step in range(3):
        before = [p.detach().clone() for p in compiled.parameters()]
        scaler.scale(compiled(**batch)).backward()
        if step == 1 and dist.get_rank() == 1:
            next(compiled.parameters()).grad.fill_(math.inf)
        scaler.unscale_(optimizer)
        compiled.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(
            not torch.equal(local_tensor(a), local_tensor(b))
            for a, b in zip(before, compiled.parameters(), strict=True)
        )
        found.append((scaler.get_scale(), changed))
    return found


def _cluster() -> meshfold.ClusterSpec:
    return resolve_cluster("local-cpu", dist.get_world_size())


def data_part(compiled: CompiledModel, value: Tensor) -> Tensor:
    """This rank's part of a batch along dp."""
    assert compiled.rank_mesh is not None
    return value.chunk(compiled.rank_mesh.size(("dp",)))[compiled.rank_mesh.coord("dp")]


def dropout_losses(pins: Mapping[str, int], num_steps: int) -> list[float]:
    """Losses of a model that drops half of everything, one per step, without training."""
    model, batch = stack_model(2, dropout=0.5)
    options = meshfold.CompileOptions(pins={"microbatches": 1, **pins}, mode="eager", seed=3)
    compiled = meshfold.compile(model.train(), _cluster(), batch, options=options)
    return [float(compiled(**batch).detach()) for _ in range(num_steps)]


def drawing_losses(pins: Mapping[str, int]) -> list[float]:
    """Losses of three steps of training a model that draws random numbers."""
    return _losses(*drawing_model(4), pins)


def function_losses(pins: Mapping[str, int]) -> list[float]:
    """The same of a model that calls custom autograd.Functions."""
    return _losses(*function_model(4, "none"), pins)


def _losses(model: nn.Module, batch: Mapping[str, Any], pins: Mapping[str, int]) -> list[float]:
    with float64_everywhere():
        compiled = meshfold.compile(
            model,
            _cluster(),
            batch,
            options=meshfold.CompileOptions(pins={"microbatches": 1, **pins}, mode="eager", seed=3),
        )
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.5)
        losses = []
        for _ in range(3):
            losses.append(float(compiled.train_step(batch)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def save_and_load(
    family: str, captured: Captured, saved_under: str, loaded_under: str, folder: str
) -> list[str]:
    """Save a model under one plan, load it under another. Returns what is wrong."""
    model, batch = tiny_model(family)
    first = bind(model, plan_from_json(saved_under), captured, batch)
    state = first.state_dict()
    wrong = [f"{n} is no DTensor" for n, x in state.items() if not isinstance(x, DTensor)]
    expected = model.state_dict()
    if list(state) != list(expected):
        wrong.append("names or their order differ")
    for name, value in state.items():
        if not torch.equal(value.full_tensor(), expected[name]):
            wrong.append(f"full_tensor of {name}")
    checkpoint.save(state, checkpoint_id=folder)
    second = bind(zeroed(model), plan_from_json(loaded_under), captured, batch)
    other = second.state_dict()
    checkpoint.load(other, checkpoint_id=folder)
    second.load_state_dict(other)
    for name, value in second.full_state_dict().items():
        if not torch.equal(value, expected[name]):
            wrong.append(f"{name} after loading a checkpoint")
    third = bind(zeroed(model), plan_from_json(loaded_under), captured, batch)
    third.load_state_dict(expected)
    fourth = bind(zeroed(model), plan_from_json(loaded_under), captured, batch)
    fourth.load_state_dict(first.state_dict())
    for name in expected:
        for kind, loaded in (("full tensors", third), ("DTensors of another mesh", fourth)):
            shards = [local_tensor(x.get_parameter(name)) for x in (loaded, second)]
            if not torch.equal(*shards):
                wrong.append(f"{name} after loading {kind}")
    return wrong


def zeroed(model: nn.Module) -> nn.Module:
    """The same architecture with all weights 0."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other


def who_am_i() -> tuple[int, int]:
    """(rank, process id)."""
    return dist.get_rank(), os.getpid()


def fail_on(rank: int) -> None:
    """Fails on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        1 / 0  # noqa: B018
    dist.barrier()


def abort_unless(mark: Path) -> int:
    """Aborts on one rank the first time, and always where no mark can be left."""
    if dist.get_rank() == 1 and not mark.exists():
        if mark.parent.exists():
            mark.touch()
        os.abort()
    dist.barrier()
    return 1


def initial_sums(family: str, pins: Mapping[str, int]) -> dict[str, float]:
    """Sum of every initial tensor of a model on the meta device."""
    model, batch = tiny_model(family)
    model = copy.deepcopy(model).to("meta")
    options = meshfold.CompileOptions(pins={"microbatches": 1, **pins}, mode="eager")
    compiled = meshfold.compile(model, _cluster(), batch, options=options)
    return {name: float(x.sum()) for name, x in compiled.full_state_dict().items()}


def mismatch_of(plan_texts: list[str]) -> str:
    """What compile says to the plan of this rank."""
    model, batch = stack_model(2)
    plan = plan_from_json(plan_texts[dist.get_rank()])
    try:
        meshfold.compile(model, plan.cluster, batch, plan=plan)
    except MeshfoldError as error:
        return str(error)
    return ""


def world_size_of(preset: str) -> int:
    """Processes that a plan for a preset without a count is made for."""
    model, batch = stack_model(2)
    return meshfold.compile(model, preset, batch).plan.world_size


def threads_beside_models(count: int) -> list[int]:
    """Threads of this process while each of `count` models is there, and at last without any; and
    nothing runs once it is closed."""
    model, batch = tiny_model("gpt2")
    found = []
    for _ in range(count):
        with float64_everywhere():
            options = meshfold.CompileOptions(pins={"microbatches": 1}, mode="eager")
            compiled = meshfold.compile(model, _cluster(), batch, options=options)
            compiled(**batch).backward()
        found.append(len(os.listdir("/proc/self/task")))
        compiled.close()
    with pytest.raises(MeshfoldError, match="was closed; compile it again"):
        compiled(**batch)
    return [*found, len(os.listdir("/proc/self/task"))]


def steps_left_behind(pins: Mapping[str, int]) -> int:
    """Steps of training that something still holds when all of their tensors are gone."""
    model, batch = tiny_model("llama")
    with float64_everywhere():
        compiled = meshfold.compile(
            model,
            _cluster(),
            batch,
            options=meshfold.CompileOptions(pins={"microbatches": 1, **pins}, mode="eager"),
        )
        for _ in range(3):
            compiled(**batch).backward()
        compiled(**batch)
    for _ in range(3):
        # Tensors that C++ holds as well hide a cycle until what holds them is collected.
        gc.collect()
    return sum(type(x).__name__ == "TrainingStep" for x in gc.get_objects())
