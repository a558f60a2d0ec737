"""Single changes of the types of a plan, and what the program of a changed plan computes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import meshfold
from meshfold.api import bind
from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import Layout, SpmdType
from meshfold.plan_file.io import plan_from_json
from meshfold.sharding.layout import shard_of
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere
from support.models.hugging_face import tiny_model

TYPES = tuple(map(SpmdType.parse, ("I", "R", "P", "S0", "S1", "S2", "S0/2", "S0+", "E0")))
"""What a type is changed to."""


class Mlp(nn.Module):
    """Two linears and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), target)


@lru_cache(maxsize=1)
def model_of(family: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in float64 and its batch."""
    if family != "mlp":
        return tiny_model(family)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential()
        model = Mlp().double()
    x, target = torch.randn((2, 8, 8), generator=generator, dtype=torch.float64)
    return model, {"x": x, "target": target}


@lru_cache(maxsize=1)
def captured_of(family: str) -> Captured:
    """In float64."""
    model, batch = model_of(family)
    with float64_everywhere():
        return capture(model, batch)


def changed_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Every change of one type on one axis to another of TYPES: where it is, and the plan."""
    for r, region in enumerate(plan.regions):
        for where, typing in _changed_typings(region.typing):
            regions = (*plan.regions[:r], replace(region, typing=typing), *plan.regions[r + 1 :])
            yield f"region {region.name}, {where}", replace(plan, regions=regions)


def _changed_typings(typing: meshfold.ir.strategy.RegionTyping) -> Iterator[tuple[str, Any]]:
    for where, slots in _changed(typing.slots):
        yield f"slot {where}", replace(typing, slots=slots)
    for where, outputs in _changed(typing.outputs):
        yield f"output {where}", replace(typing, outputs=outputs)
    for k, op in enumerate(typing.ops):
        for part in ("inputs", "outputs"):
            for where, layouts in _changed(getattr(op, part)):
                ops = (*typing.ops[:k], replace(op, **{part: layouts}), *typing.ops[k + 1 :])
                yield f"op {k}, {part} {where}", replace(typing, ops=ops)


def _changed(layouts: tuple[Layout, ...]) -> Iterator[tuple[str, tuple[Layout, ...]]]:
    for k, layout in enumerate(layouts):
        for axis, old in enumerate(layout):
            for new in TYPES:
                if new != old:
                    changed = (*layout[:axis], new, *layout[axis + 1 :])
                    where = f"{k}: {old} on axis {axis} becomes {new}"
                    yield where, (*layouts[:k], changed, *layouts[k + 1 :])


@lru_cache(maxsize=1)
def _eager(family: str) -> tuple[nn.Module, Tensor]:
    """The model with gradients, and its loss."""
    model, batch = model_of(family)
    with float64_everywhere():
        returned = model(**batch)
        loss: Tensor = returned if isinstance(returned, Tensor) else returned.loss
        torch.autograd.backward(loss)
    return model, loss.detach()


def worst_error(family: str, plan_text: str) -> float:
    """The largest difference of loss and gradients of a step from those of one process. Runs on
    every rank."""
    model, expected = _eager(family)
    _, batch = model_of(family)
    compiled = bind(model, plan_from_json(plan_text), captured_of(family), batch)
    with float64_everywhere():
        loss = compiled.train_step(batch)
    worst = float((loss - expected).abs())
    sizes = compiled.program.mesh.sizes
    for name, parameter in compiled.named_parameters():
        gradient = model.get_parameter(name).grad
        gradient = torch.zeros_like(model.get_parameter(name)) if gradient is None else gradient
        local = torch.zeros_like(parameter)
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
        layout = compiled.program.stored[name]
        right = shard_of(gradient, layout, sizes, compiled.rank_mesh.coords)
        error = float((local - right).abs().max()) if right.numel() else 0.0
        worst = error if not error <= worst else worst
    compiled.close()
    return worst


def worst_errors(family: str, plan_texts: list[str]) -> list[float]:
    """`worst_error` of each plan."""
    return [worst_error(family, text) for text in plan_texts]
