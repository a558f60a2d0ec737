"""Programs in both modes, of uniform pins on tiny models."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, Mode
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere
from support.models.hugging_face import FAMILIES, slow, tiny_model

PINS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "dp": (2, {"dp": 2, "zero": 0}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp": (2, {"tp": 2, "sp": 0}),
    "tp+sp": (2, {"tp": 2, "sp": 1}),
    "zero2 x tp": (4, {"dp": 2, "tp": 2, "zero": 2, "sp": 0}),
    "zero3 x tp+sp": (4, {"dp": 2, "tp": 2, "zero": 3, "sp": 1}),
    "zero3 x tp+sp, again": (4, {"dp": 2, "tp": 2, "zero": 3, "sp": 1, "recompute": "full"}),
    "zero3 x tp+sp, selective": (
        4,
        {"dp": 2, "tp": 2, "zero": 3, "sp": 1, "recompute": "selective"},
    ),
    "zero3 x cp": (4, {"dp": 2, "cp": 2, "zero": 3}),
    "ep": (2, {"ep": 2, "zero": 0}),
    "ep4": (4, {"ep": 4, "zero": 0}),
    "ep x tp": (4, {"ep": 2, "tp": 2, "sp": 0, "zero": 0}),
    "zero3 x ep": (4, {"dp": 2, "ep": 2, "zero": 3}),
    "zero3 x ep, selective": (2, {"dp": 1, "ep": 2, "zero": 3, "recompute": "selective"}),
    "zero3 x ep, again": (4, {"dp": 2, "ep": 2, "zero": 3, "recompute": "full"}),
}
"""(processes, pins) by name."""


def matrix(*quick: str) -> list[Any]:
    """(family, pins) of all six families, of a test; families not named are marked slow."""
    found = []
    for pins in PINS:
        for family in FAMILIES:
            if ("cp" in pins and family == "t5") or ("ep" in pins and family != "mixtral"):
                continue
            marks = () if family in quick else slow(family)
            found.append(pytest.param(family, pins, marks=marks))
    return found


@cache
def captured_family(family: str) -> Captured:
    model, batch = tiny_model(family)
    with float64_everywhere():
        return capture(model, batch)


def nodes_of_two(num_ranks: int) -> ClusterSpec:
    """This machine, as nodes of two devices each."""
    spec = resolve_cluster("local-cpu", num_ranks)
    (group,) = spec.groups
    group = replace(group, num_nodes=num_ranks // 2, devices_per_node=2)
    return replace(spec, groups=(group,))


@cache
def planned(family: str, pins: str, mode: Mode = "scheduled", parts: int = 1) -> Plan:
    num_processes, fixed = PINS[pins]
    cluster = resolve_cluster("local-cpu", num_processes)
    options = CompileOptions(pins={**fixed, "micro_chunks": parts}, mode=mode)
    return plan_captured(captured_family(family), family, cluster, options)


@cache
def emitted(
    family: str, pins: str, *, capacity_bytes: int | None = None, parts: int = 1
) -> EmittedProgram:
    """The scheduled program, made once: leave it as it is. capacity_bytes: what a device is said to
    have beyond the plan's peak. parts: of its samples, in which every region runs that can."""
    plan = planned(family, pins, parts=parts)
    if capacity_bytes is not None:
        memory = replace(plan.memory, capacity=plan.memory.peak + capacity_bytes)
        plan = replace(plan, memory=memory)
    program = emit_plan(captured_family(family).graph, plan)
    assert isinstance(program, EmittedProgram)
    return program


def plan_text(family: str, pins: str, parts: int = 1) -> str:
    return plan_to_json(planned(family, pins, parts=parts))
