"""Weights that products read converted, or as views: what makes their gradients late, a W, comes
before the backward of the conversion."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.programs.local_programs import errors_of_a_step
from torch import Tensor, nn

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.check_program import check_program
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.program.region_schedule import ActionKind, RegionAction
from meshfold.codegen.schedule.split_backward import deferred_names
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import PassError
from meshfold.ir.options import CompileOptions
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("schedules")

WIDTH = 8


class Twice(nn.Module):
    """One weight in two products, sliced for the one and unsharded for the other under tp."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shared(torch.relu(self.between(self.shared(torch.tanh(x)))))
        return x + self.down(torch.tanh(self.up(x)))


class Views(nn.Module):
    """Weights that are stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(torch.tanh(x), self.up.t())
        return x + nn.functional.linear(torch.relu(hidden), self.down.t())


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - target) ** 2).mean()


PINS: dict[str, dict[str, int]] = {
    "tp": {"tp": 2, "sp": 0},
    "tp4": {"tp": 4, "sp": 0},
    "tp+sp": {"tp": 2, "sp": 1},
    "zero3 x tp": {"dp": 2, "tp": 2, "sp": 0, "zero": 3},
    "parts": {"tp": 2, "sp": 0, "micro_chunks": 2},
    "parts+sp": {"tp": 2, "sp": 1, "micro_chunks": 2},
}


def scheduled(layer: type[nn.Module], pins: dict[str, int]) -> tuple[Any, ...]:
    """(model, batch, what was captured, program)."""
    torch.manual_seed(0)
    model = Stack(layer)
    batch = {name: torch.randn(4, 8, WIDTH) for name in ("x", "target")}
    captured = capture(model, batch)
    cluster = resolve_cluster("local-cpu", pins.get("dp", 1) * pins["tp"])
    options = CompileOptions(pins={"microbatches": 1, **pins}, mode="scheduled")
    program = emit_plan(captured.graph, plan_captured(captured, "m", cluster, options))
    return model, batch, captured, program


@pytest.mark.parametrize("pins", PINS)
@pytest.mark.parametrize("layer", [Twice, Views])
def test_no_gradient_is_left_behind(layer: type[nn.Module], pins: str) -> None:
    with float64_everywhere():
        for errors in errors_of_a_step(*scheduled(layer, PINS[pins])):
            assert max(errors.values()) < 1e-12, errors


def moved_ahead(program: EmittedProgram) -> EmittedProgram:
    """With the backward of a conversion before the W that makes its gradient."""
    for k, region in enumerate(program.regions):
        schedule = region.schedule
        makers = schedule.graph.makers if schedule else {}
        for number in schedule.deferred_s if schedule else ():
            assert schedule is not None
            names = deferred_names(schedule.graph.segments[number]) & makers.keys()
            for name in sorted(names):
                late, early = (
                    RegionAction(ActionKind.WEIGHTS, number),
                    RegionAction(ActionKind.BACKWARD, makers[name]),
                )
                actions = [action for action in schedule.backward if action != late]
                actions.insert(actions.index(early) + 1, late)
                changed = replace(region, schedule=replace(schedule, backward=tuple(actions)))
                regions = (*program.regions[:k], changed, *program.regions[k + 1 :])
                return replace(program, regions=regions)
    raise AssertionError("no weight is converted")


def test_a_gradient_that_comes_too_late_is_found() -> None:
    with float64_everywhere():
        *given, program = scheduled(Twice, PINS["tp"])
        broken = moved_ahead(program)
        with pytest.raises(PassError, match="needs the weights of"):
            check_program(broken, "schedule")
        with pytest.raises(AssertionError, match="computed too late"):
            errors_of_a_step(*given, broken)


def test_a_bucket_that_is_reduced_before_its_weights_is_found() -> None:
    with float64_everywhere():
        *_, program = scheduled(Twice, PINS["zero3 x tp"])
    regions = list(program.regions)
    k = next(k for k, r in enumerate(regions) if r.schedule and r.schedule.deferred_s)
    schedule = regions[k].schedule
    last = [m for m in schedule.backward if m.kind == ActionKind.WEIGHTS]
    actions = tuple(m for m in schedule.backward if m.kind is not ActionKind.WEIGHTS) + tuple(last)
    regions[k] = replace(regions[k], schedule=replace(schedule, backward=actions))
    with pytest.raises(PassError, match="needs the weights of"):
        check_program(replace(program, regions=tuple(regions)), "schedule")
