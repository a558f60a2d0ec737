"""Machinery that a pin takes out: no code of it runs then, and numbers are those of one process."""

from collections.abc import Mapping
from typing import Any

import pytest
from support.models.hugging_face import tiny_model
from support.programs.local_programs import errors_of_a_step
from support.programs.schedules import PINS, nodes_of_two

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit import pass_pipeline
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_from_json, plan_to_json

pytestmark = pytest.mark.xdist_group("schedules")

CHAINED_CHUNKS = (
    "meshfold.codegen.emit.pass_pipeline.chunked_regions",
    "meshfold.codegen.emit.pass_pipeline.with_chained_chunks",
    "meshfold.runtime.runner.ChainedRegion",
)
COLLECTIVE_MATMUL = (
    "meshfold.codegen.emit.pass_pipeline.with_planned_matmuls",
    "meshfold.codegen.emit.op.all_gather_matmul",
    "meshfold.codegen.emit.op.matmul_reduce_scatter",
    "meshfold.refine.collective_matmul.matmul_groups",
    "meshfold.refine.collective_matmul.with_collective_matmuls",
)

HIERARCHICAL_ALL_REDUCE = (
    "meshfold.passes.events.bucketing.piece_sizes",
    "meshfold.passes.events.hierarchical.in_steps",
    "meshfold.cost_models.simulation.hierarchical_all_reduce.HierarchicalReduction",
    "meshfold.zero.hierarchical_all_reduce.Interleaver.begin",
)


def run_without(
    entries: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    cluster: ClusterSpec,
    pins: Mapping[str, Any],
) -> tuple[Plan, EmittedProgram]:
    """A plan and its program, which runs a step while nothing may call these entries."""

    def never(*_: Any) -> Any:
        raise AssertionError("this is switched off")

    for entry in entries:
        monkeypatch.setattr(entry, never)
    model, batch = tiny_model("llama", layers=3)
    captured = capture(model, batch)
    options = CompileOptions(pins=pins, mode="scheduled")
    plan = plan_from_json(plan_to_json(plan_captured(captured, "llama", cluster, options)))
    program = pass_pipeline.emit(captured.graph, plan)
    found = errors_of_a_step(model, batch, captured, program)
    assert max(max(of_rank.values()) for of_rank in found) < 1e-4
    return plan, program


def test_without_chained_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {**PINS["tp+sp"][1], "micro_chunks": 2, "chained_chunks": 0}
    cluster = resolve_cluster("dgx-h100", 2)
    plan, program = run_without(CHAINED_CHUNKS, monkeypatch, cluster, pins)
    assert program.boundaries == () and plan.regions[1].chunking.count == 2
    assert not any(region.schedule.chained for region in program.regions if region.schedule)


def test_without_collective_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {**PINS["tp+sp"][1], "collective_matmul": 0}
    cluster = resolve_cluster("dgx-h100", 2)
    plan, _ = run_without(COLLECTIVE_MATMUL, monkeypatch, cluster, pins)
    assert not any(region.collective_matmul for region in plan.regions)


def test_without_hierarchical_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {"dp": 4, "zero": 0, "hierarchical_all_reduce": 0}
    plan, program = run_without(HIERARCHICAL_ALL_REDUCE, monkeypatch, nodes_of_two(4), pins)
    assert plan.hierarchical_all_reduce_bytes == 0 and program.hierarchical is None


def test_the_switch_is_on_or_off() -> None:
    with pytest.raises(OptionError, match="write chained_chunks=1 or chained_chunks=0"):
        CompileOptions(pins={"chained_chunks": 2})
