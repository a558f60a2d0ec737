"""Programs of small models under pinned plans, in both modes, held against one process."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from meshfold.api import plan_captured
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions, Mode
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.validation.float64_mode import float64_everywhere
from support.models.hugging_face import tiny_model
from support.programs.local_programs import errors_of_a_step
from support.programs.schedules import captured_family

Pins = Mapping[str, Any]


def cases(quick: Iterable[tuple[str, str, Mode]], pins: Iterable[str]) -> list[Any]:
    """(family, pins, mode): `quick`, and slow, every one of `pins` for GPT-2 and Llama in both
    modes."""
    every = itertools.product(("gpt2", "llama"), pins, ("eager", "scheduled"))
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in every)]


def program_and_error(family: str, pins: Pins, mode: Mode) -> tuple[EmittedProgram, float]:
    """A plan in one pass goes through its file and is emitted; the largest difference of its loss
    and gradients from one process, in float64 on simulated ranks."""
    model, batch = tiny_model(family)
    captured = captured_family(family)
    devices = pins.get("dp", 1) * pins.get("tp", 1)
    options = CompileOptions(pins={**pins, "microbatches": 1}, mode=mode)
    found = plan_captured(captured, family, resolve_cluster("dgx-h100", devices), options)
    program = emit_plan(captured.graph, plan_from_json(plan_to_json(found)))
    assert isinstance(program, EmittedProgram)
    with float64_everywhere():
        errors = errors_of_a_step(model, batch, captured, program)
    return program, max(max(of.values()) for of in errors)
