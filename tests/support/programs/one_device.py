"""Pipelines whose stages all run on the one device of this process, held against the model itself.

The stages hand each other values as they would across devices, so that what crosses, what is
computed again and what adds up is tested at the price of one process.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.api import batch_size_of, bind
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.assembly import model_info
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.split.pieces import in_pieces, sizes_of
from meshfold.plan_file.io import plan_from_json
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere
from support.models.unrepeated import MAKERS
from support.programs.emit import part_of
from support.programs.pipeline import recut

PROBER = OpProber()
NO_PINS: Mapping[str, Any] = MappingProxyType({})


def plan_on_one_device(
    captured: Captured, num_microbatches: int, num_stages: int, pins: Mapping[str, Any]
) -> Plan:
    """A plan whose stages begin at evenly many instances, all on one device; of regions in pieces
    where too few repeat."""
    given = {"microbatches": num_microbatches, "recompute": "none", **pins}
    folded = in_pieces(captured.graph, num_stages).folded
    plan = find_plan_for(
        folded,
        resolve_cluster("local-cpu", 1),
        CompileOptions(pins=given),
        model_name="model",
        batch_size=batch_size_of(captured),
        probe=PROBER,
    )
    info = model_info(captured.graph, "model", batch_size_of(captured))
    is_cut = folded is not captured.graph
    plan = replace(plan, model=info, pieces=sizes_of(folded) if is_cut else ())
    kind = ScheduleKind.INTERLEAVED if num_stages > 1 else ScheduleKind.ONE_F_ONE_B
    return recut(plan, Schedule(kind, 1, num_microbatches, num_virtual_stages=num_stages))


def difference(
    model: nn.Module,
    batch: Mapping[str, Any],
    num_microbatches: int,
    num_stages: int,
    pins: Mapping[str, Any] = NO_PINS,
    *,
    one_by_one: bool = False,
) -> float:
    """The largest difference of the loss, of every gradient and of every buffer after one step from
    the model's own: relative to the largest entry, or to a thousandth of the largest gradient.
    one_by_one: from a model that runs the microbatches one after the other, its losses averaged."""
    with float64_everywhere():
        captured = capture(model, batch)
        plan = plan_on_one_device(captured, num_microbatches, num_stages, pins)
    return step_difference(model, batch, captured, plan, num_microbatches if one_by_one else 1)


def difference_on_ranks(name: str, plan_text: str, num_parts: int) -> float:
    """The same for a model of support.models.unrepeated under a plan, on every rank of it."""
    model, batch = MAKERS[name]()
    with float64_everywhere():
        captured = capture(model, batch)
    return step_difference(model, batch, captured, plan_from_json(plan_text), num_parts)


def step_difference(
    model: nn.Module, batch: Mapping[str, Any], captured: Captured, plan: Plan, num_parts: int
) -> float:
    """See difference. num_parts: in which the model runs the batch, one after the other."""
    expected, own = copy.deepcopy(model), copy.deepcopy(model)
    with float64_everywhere():
        parts = [dict(batch)]
        if num_parts > 1:
            parts = [{n: x.chunk(num_parts)[j] for n, x in batch.items()} for j in range(num_parts)]
        losses = [loss_of(expected(**part)) / num_parts for part in parts]
        sum(losses).backward()
        compiled = bind(own, plan, captured, batch)
        found = compiled.train_step(dict(batch))
    gradients = []
    for name, parameter in compiled.named_parameters():
        whole = expected.get_parameter(name).grad
        whole = None if whole is None else part_of(compiled, name, whole)
        mine = None if parameter.grad is None else local_tensor(parameter.grad)
        if whole is not None or mine is not None:
            gradients.append((_or_zeros(mine, parameter), _or_zeros(whole, parameter)))
    state = compiled.full_state_dict()
    buffers = {n: x for n, x in expected.named_buffers() if n in state}
    exact = [(found, sum(losses).detach())]
    exact += [(state[n], x) for n, x in buffers.items() if x.is_floating_point()]
    assert all(torch.equal(state[n], x) for n, x in buffers.items() if not x.is_floating_point())
    compiled.close()
    return max(worst(gradients), *(worst([pair]) for pair in exact))


def one_step_loss(
    model: nn.Module, batch: Mapping[str, Any], num_microbatches: int, num_stages: int
) -> float:
    """The loss of the first step."""
    with float64_everywhere():
        captured = capture(model, batch)
        plan = plan_on_one_device(captured, num_microbatches, num_stages, NO_PINS)
        compiled = bind(copy.deepcopy(model), plan, captured, batch)
        loss = float(compiled.train_step(dict(batch)))
    compiled.close()
    return loss


def loss_of(returned: Any) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned.loss


def worst(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    floor = 1e-3 * max(float(wanted.abs().max()) for _, wanted in pairs)
    return max(
        float((found - wanted).abs().max()) / max(floor, float(wanted.abs().max()))
        for found, wanted in pairs
    )


def _or_zeros(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(local_tensor(parameter.detach())) if gradient is None else gradient
