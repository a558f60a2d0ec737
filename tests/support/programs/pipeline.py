"""Pipelines of small models: plans cut anew by hand, and what ranks run to hold them against one
process."""

import copy
import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn

import meshfold
from meshfold.api import bind
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import RankLostError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan, RegionRun, StagePlan
from meshfold.memory_probe.prober import OpProber, StorageCounter
from meshfold.passes.planner.find import find_plan_for
from meshfold.plan_file.io import plan_from_json
from meshfold.runtime.pipeline_runner import PipelineRunner
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.collective_order import collectives_of
from meshfold.validation.float64_mode import float64_everywhere
from support.models.hugging_face import BATCH, tiny_model
from support.programs.emit import data_part, part_of, zeroed
from support.programs.local_programs import stack_model

ROWS = 2 * BATCH


def model_and_batch(family: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model, and a batch of ROWS with unevenly many targets that count."""
    model, batch = tiny_model(family, layers=layers)
    batch = {name: torch.cat([x, x.flip(0)]) for name, x in batch.items()}
    if family not in ("vit",):
        batch["labels"][1, 2:] = -100
    return model, batch


@cache
def captured_model(family: str, layers: int) -> Captured:
    with float64_everywhere():
        return capture(*model_and_batch(family, layers))


@cache
def planned(
    family: str,
    layers: int,
    num_devices: int,
    pins: tuple[tuple[str, Any], ...],
    optimizer: Any = "adamw",
    *,
    start_up: bool = True,
) -> Plan:
    """The plan of a search with pins. start_up: whether kernels and messages cost something even
    where they are empty, which decides all of a tiny model."""
    cluster = resolve_cluster("local-cpu", num_devices)
    return find_plan_for(
        captured_model(family, layers).graph,
        cluster if start_up else without_start_up(cluster),
        CompileOptions(pins=dict(pins), optimizer=optimizer),
        model_name=family,
        batch_size=ROWS,
        probe=OpProber(),
    )


def without_start_up(cluster: ClusterSpec) -> ClusterSpec:
    """The same group of devices, where bytes and work alone take time."""
    (group,) = cluster.groups
    link = replace(group.link, latency_s=0.0, start_s=0.0, ramp_bytes=0.0)
    device = replace(group.device, launch_s=0.0)
    return replace(cluster, groups=(replace(group, link=link, device=device),))


def recut(plan: Plan, schedule: Schedule, first: Sequence[int] | None = None) -> Plan:
    """`plan` under another schedule, its stages beginning at other layers (default: evenly)."""
    names = [run.region for s in plan.stages for run in s.runs for _ in range(run.count)]
    count = schedule.num_stages
    begins = first or [round(s * len(names) / count) for s in range(count)]
    stages = tuple(
        StagePlan(tuple(RegionRun(names[k], k, 1) for k in range(begin, end)))
        for begin, end in pairwise([*begins, len(names)])
    )
    return replace(plan, stages=stages, schedule=str(schedule))


@dataclass(frozen=True)
class Outcome:
    """What one plan does on one rank: differences from one process (loss absolute, others relative
    to the largest entry), and digests of the parameters after three steps."""

    loss: float
    loss_error: float
    gradient_error: float
    parameter_error: float
    in_flight: int
    digests: Mapping[str, str]


def run_pipelines(
    family: str, layers: int, captured: Captured, plans: Sequence[str], local: Sequence[str] = ()
) -> list[Outcome]:
    """Three steps of AdamW under each plan and in one process. local: inputs of which a rank gives
    its own part."""
    model, batch = model_and_batch(family, layers)
    return [_outcome(copy.deepcopy(model), batch, captured, text, local) for text in plans]


def _outcome(
    model: nn.Module, batch: dict[str, Any], captured: Captured, text: str, local: Sequence[str]
) -> Outcome:
    compiled = bind(model, plan_from_json(text), captured, batch)
    given = {n: data_part(compiled, x) if n in local else x for n, x in batch.items()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (model, compiled)]
    errors: list[tuple[float, float]] = []
    with float64_everywhere():
        for _ in range(3):
            expected = model(**batch).loss
            expected.backward()
            loss = compiled.train_step(given)
            gradients = _worst(compiled, model, _gradient)
            errors.append((abs(float(loss - expected.detach())), gradients))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    runner = compiled.runner()
    in_flight = runner.peak_in_flight if isinstance(runner, PipelineRunner) else 1
    found = Outcome(
        float(loss),
        *errors[0],
        _worst(compiled, model, lambda p: local_tensor(p.detach())),
        in_flight,
        {n: _digest(p) for n, p in compiled.named_parameters()},
    )
    del runner
    compiled.close()
    return found


def count_collectives(
    family: str, layers: int, captured: Captured, plans: Sequence[str]
) -> list[Counter[str]]:
    """Collectives of the second step under each plan, by kind; over the data axis alone."""
    model, batch = model_and_batch(family, layers)
    found = []
    for text in plans:
        compiled = bind(model, plan_from_json(text), captured, batch)
        assert compiled.rank_mesh is not None
        with float64_everywhere():
            compiled.train_step(batch)
            with collectives_of(compiled.rank_mesh) as calls:
                compiled.train_step(batch)
        found.append(Counter(call.kind for call in calls if call.axes == ("dp",)))
    return found


def peak_bytes(family: str, layers: int, captured: Captured, text: str) -> int:
    """Most bytes that a step holds beside parameters, buffers and the batch."""
    model, batch = model_and_batch(family, layers)
    compiled = bind(model, plan_from_json(text), captured, batch)
    known = [*compiled.parameters(), *compiled.buffers(), *batch.values()]
    with float64_everywhere(), StorageCounter([*known, *captured.constants.values()]) as counter:
        compiled.train_step(batch)
    return counter.peak_bytes


def _worst(compiled: CompiledModel, model: nn.Module, part: Any) -> float:
    """Differences like those of verify: relative to a tensor's largest entry, or to a thousandth of
    the largest of any, since what is zero but for rounding is not compared with itself."""
    floor = 1e-3 * max(float(part(p).abs().max()) for p in model.parameters())
    worst = 0.0
    for name, parameter in compiled.named_parameters():
        whole = part(model.get_parameter(name))
        difference = part(parameter) - part_of(compiled, compiled._canonical[name], whole)
        worst = max(worst, float(difference.abs().max()) / max(floor, float(whole.abs().max())))
    return worst


def _gradient(parameter: Tensor) -> Tensor:
    return local_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _digest(x: Tensor) -> str:
    return hashlib.sha256(local_tensor(x.detach()).numpy().tobytes()).hexdigest()


def save_and_load(
    family: str, layers: int, captured: Captured, plans: Sequence[str], folder: str
) -> list[str]:
    """Save under the first plan, load under all. Returns what is wrong."""
    model, batch = model_and_batch(family, layers)
    expected = model.state_dict()
    first = bind(model, plan_from_json(plans[0]), captured, batch)
    checkpoint.save(first.state_dict(), checkpoint_id=folder)
    wrong = [n for n, x in first.full_state_dict().items() if not torch.equal(x, expected[n])]
    for text in plans:
        other = bind(zeroed(model), plan_from_json(text), captured, batch)
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        full = other.full_state_dict()
        wrong += [f"{n} under {text[:40]}" for n, x in expected.items() if n not in full]
        wrong += [f"{n} loaded" for n, x in full.items() if not torch.equal(x, expected[n])]
        third = bind(zeroed(model), plan_from_json(text), captured, batch)
        third.load_state_dict(expected)
        for name, value in third.named_parameters():
            if not torch.equal(local_tensor(value), local_tensor(other.get_parameter(name))):
                wrong.append(f"{name} from full tensors")
    plain = zeroed(model).state_dict()
    checkpoint.load(plain, checkpoint_id=folder)
    differing = [n for n, x in plain.items() if not torch.equal(x, expected[n])]
    return wrong + [f"{n} in the model" for n in differing]


def dropout_losses(pins: Mapping[str, Any], own_part: bool = False) -> list[float]:
    """Losses of a model that drops half of everything, one per step, without training. own_part:
    every rank brings its part of the batch."""
    model, batch = stack_model(4, dropout=0.5)
    compiled = meshfold.compile(
        model.train(),
        resolve_cluster("local-cpu", dist.get_world_size()),
        batch,
        options=meshfold.CompileOptions(pins=pins, seed=3),
    )
    if own_part:
        dp, own = compiled.rank_mesh.size(("dp",)), compiled.rank_mesh.coord("dp")
        batch = {name: x.chunk(dp)[own] for name, x in batch.items()}
    with float64_everywhere():
        return [float(compiled.train_step(batch)) for _ in range(3)]


def lose_a_stage(
    report: Any, family: str, layers: int, captured: Captured, text: str, how: str, when: str
) -> str:
    """The last rank dies or hangs before its second step, or within it, once the ranks agreed to
    make it; what the others say, and after how long."""
    model, batch = model_and_batch(family, layers)
    compiled = bind(model, plan_from_json(text), captured, batch)
    with float64_everywhere():
        compiled.train_step(batch)
    if dist.get_rank() == dist.get_world_size() - 1:
        agreement = compiled._agreement
        assert agreement is not None
        if when == "within":
            agreement.check_call("train_step", batch, compiled.num_forwards, compiled.training)
            agreement.check_contents(batch, ())
            parameters = compiled._bound.by_name(compiled.named_parameters())
            agreement.check_parameters(parameters, compiled.num_forwards)
            # The others receive what this rank sent last.
            time.sleep(0.3)
        if how == "dies":
            os._exit(3)
        time.sleep(4.0)
        return "slept"
    before = [
        None if p.grad is None else local_tensor(p.grad).clone() for p in compiled.parameters()
    ]
    start = time.monotonic()
    try:
        with float64_everywhere():
            compiled.train_step(batch, timeout_s=1.5)
    except RankLostError as error:
        now = [None if p.grad is None else local_tensor(p.grad) for p in compiled.parameters()]
        is_kept = all(
            y is None if x is None else y is not None and torch.equal(x, y)
            for x, y in zip(before, now, strict=True)
        )
        report(f"{time.monotonic() - start < 60} {is_kept} {type(error).__name__}: {error}")
        time.sleep(3.0)
        return str(error)
    return "nothing was lost"
