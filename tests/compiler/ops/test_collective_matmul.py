"""Products in ring order: the numbers of one process, what is on its way meanwhile, what is chosen,
and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs.ops import mesh_of
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools
from support.programs.local_programs import errors_of_a_step
from support.programs.memory import EchoMesh
from support.programs.schedules import PINS, captured_family
from torch import Tensor

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pass_pipeline import PassRun, emit
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.distributed.rank_mesh import ProcessMesh
from meshfold.distributed.step_context import StepContext
from meshfold.errors import OptionError, PlanMismatchError
from meshfold.ir.options import CompileOptions, Mode
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.models.from_argument import build_model
from meshfold.ops.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from meshfold.passes.planner.check import price_plan
from meshfold.passes.rules.ops.collective_matmul import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.refine.micro_chunks import LEAST_GAIN
from meshfold.refine.program_events import with_program_events
from meshfold.report.plan_diff import compare_plans
from meshfold.training.use_symmetric_memory import ring_axes, share_memory
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.validation.measure_overlap import notes_of

pytestmark = pytest.mark.xdist_group("schedules")

EXACT = 1e-12
CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"


@cache
def planned(family: str, pins: str, mode: Mode = "eager", parts: int = 1) -> Plan:
    """Every product in a ring that can be."""
    num_processes, fixed = PINS[pins]
    fixed = {**fixed, "collective_matmul": 1, **({"micro_chunks": parts} if parts > 1 else {})}
    cluster = resolve_cluster("local-cpu", num_processes)
    options = CompileOptions(pins=fixed, mode=mode)
    return plan_captured(captured_family(family), family, cluster, options)


def targets(program: EmittedProgram) -> list[str]:
    return [op.target for region in program.regions for op in region.ops.ops]


def cases() -> list[object]:
    found = []
    for family in ("gpt2", "llama", "bert", "vit", "mixtral", "t5"):
        for pins in ("tp+sp", "zero3 x tp+sp", "zero3 x tp+sp, again"):
            for mode, parts in (("eager", 1), ("scheduled", 1), ("scheduled", 2)):
                is_quick = family in ("llama", "gpt2") and pins == "tp+sp" and parts == 1
                if family != "t5" or parts == 1:
                    marks = () if is_quick else pytest.mark.slow
                    found.append(pytest.param(family, pins, mode, parts, marks=marks))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "pins", "mode", "parts"), cases())
def test_loss_and_every_gradient_equal_one_process(
    family: str, pins: str, mode: Mode, parts: int
) -> None:
    model, batch = tiny_model(family)
    program = emit(captured_family(family).graph, planned(family, pins, mode, parts))
    assert {ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER} <= set(targets(program))
    with float64_everywhere():
        found = errors_of_a_step(model, batch, captured_family(family), program)
    assert max(max(errors.values()) for errors in found) < EXACT


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["eager", "scheduled"])
@pytest.mark.parametrize("pins", ["tp+sp", pytest.param("zero3 x tp+sp", marks=pytest.mark.slow)])
def test_the_same_on_processes(pools: Pools, pins: str, mode: Mode) -> None:
    plan = plan_to_json(planned("llama", pins, mode))
    arguments = "llama", captured_family("llama"), plan
    for loss_error, gradient_error, name, uneven in pools.run(
        PINS[pins][0], "support.programs.emit:compare_step", *arguments
    ):
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


def test_one_op_stands_for_all_products_of_what_is_gathered() -> None:
    """Of a Llama layer: query, key and value; gate and up; and what adds to the residual."""
    program = emit(captured_family("llama").graph, planned("llama", "tp+sp"))
    layer = program.regions[1].ops
    gathers = [len(op.outputs) for op in layer.ops if op.target == ALL_GATHER_MATMUL]
    assert gathers == [3, 2]
    assert sum(op.target == MATMUL_REDUCE_SCATTER for op in layer.ops) == 2
    assert not any(op.target == "aten.linear.default" for op in layer.ops)


# What is on its way.


class NotedMesh(EchoMesh):
    """Without peers; notes what it starts and waits for."""

    def __init__(self, size: int) -> None:
        super().__init__(mesh_of(size), 0, torch.device("cpu"))
        self.notes: list[str] = []

    def start_exchange(
        self, x: Tensor, axes: tuple[str, ...], sent: list[int], received: list[int]
    ) -> Tensor:
        self.notes.append("start")
        return super().start_exchange(x, axes, sent, received)

    def wait(self, in_flight: Tensor) -> Tensor:
        self.notes.append("wait")
        return super().wait(in_flight)


class Noting(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes products."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.notes.append("compute")
        return function(*args, **(kwargs or {}))


def test_rows_are_on_their_way_while_a_rank_computes() -> None:
    mesh = NotedMesh(3)
    x, weight = torch.randn(2, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with Noting(mesh.notes):
        (out,) = all_gather_matmul(StepContext(mesh), x, [weight], [None], 0, 1, False, "dp")
        assert mesh.notes == ["start", "compute", "wait"] * 2 + ["compute"]
        mesh.notes.clear()
        out.backward(torch.ones_like(out))
    # Last the sum that stays here, and the gradient of the weight, beside the last pass.
    sums = ["compute", "start", "compute", "wait", "start"]
    assert mesh.notes == [*sums, "compute", "compute", "wait"]


def test_sums_are_on_their_way_while_a_rank_computes() -> None:
    mesh = NotedMesh(3)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with Noting(mesh.notes):
        out = matmul_reduce_scatter(StepContext(mesh), x, weight, None, 0, 1, False, "dp")
        assert mesh.notes == ["compute", "start"] + ["compute", "wait", "start", "compute", "wait"]
        mesh.notes.clear()
        out.backward(torch.ones_like(out))
    # Gradients of rows, then that of the weight, from rows that came round.
    assert mesh.notes == ["start", "compute", "wait"] * 2 + ["compute", "compute"]


def test_the_passes_of_a_round_are_one_note() -> None:
    mesh = EchoMesh(mesh_of(4), 0, torch.device("cpu"))
    x, weight = torch.randn(2, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with notes_of(mesh) as notes:
        (out,) = all_gather_matmul(StepContext(mesh), x, [weight], [None], 0, 1, False, "dp")
        mesh.wait(mesh.start_all_reduce(out.detach(), ("dp",)))
        out.sum().backward()
    assert [(n.kind, n.axes) for n in notes] == [
        ("shift", ("dp",)),
        ("all_reduce", ("dp",)),
        ("shift", ("dp",)),
    ]
    assert all(0 < n.lead_s <= n.flight_s for n in notes)
    assert "start_shift" not in vars(mesh)


# What is chosen.


@cache
def wide_llama() -> Captured:
    built = build_model(str(CONFIGS / "llama-3-8b.json"), batch=8, sequence=2048)
    return capture(built.model, built.example_inputs)


@cache
def on_h100s(mode: Mode = "eager", **pins: Any) -> Plan:
    options = CompileOptions(pins={"tp": 8, "sp": 1, **pins}, mode=mode)
    return plan_captured(wide_llama(), "llama", resolve_cluster("dgx-h100"), options)


def test_a_ring_hides_what_a_layer_waits_for() -> None:
    chosen, without = on_h100s(), on_h100s(collective_matmul=0)
    assert chosen.simulated is not None and without.simulated is not None
    assert any(region.collective_matmul for region in chosen.regions)
    assert not any(region.collective_matmul for region in without.regions)
    assert chosen.simulated.step_s < 0.97 * without.simulated.step_s
    assert chosen.simulated.peak_bytes <= chosen.memory.capacity


def test_what_is_chosen_is_not_slower_than_every_product_in_a_ring() -> None:
    """Products that are too short for a pass stay as they are."""
    chosen, all_of_them = on_h100s(), on_h100s(collective_matmul=1)
    assert chosen.simulated is not None and all_of_them.simulated is not None
    assert chosen.simulated.step_s <= all_of_them.simulated.step_s
    pairs = zip(chosen.regions, all_of_them.regions, strict=True)
    assert all(set(some.collective_matmul) <= set(every.collective_matmul) for some, every in pairs)


def test_chunks_and_a_ring_are_weighed_against_each_other() -> None:
    chosen = on_h100s("scheduled")
    others = [
        on_h100s("scheduled", collective_matmul=0),
        on_h100s("scheduled", collective_matmul=1, micro_chunks=1),
    ]
    assert chosen.simulated is not None
    for other in others:
        assert other.simulated is not None
        # What gains less than that is left.
        assert chosen.simulated.step_s <= other.simulated.step_s / (1 - LEAST_GAIN)


def test_plans_keep_the_ring_and_its_figures() -> None:
    plan = planned("llama", "tp+sp")
    assert [region.collective_matmul for region in plan.regions] == [(), (0, 1, 2, 3), (0,)]
    assert plan_from_json(plan_to_json(plan)) == plan
    again = price_plan(captured_family("llama").graph, plan, OpProber())
    again = with_program_events(again, captured_family("llama").graph)
    assert again.simulated == plan.simulated
    options = CompileOptions(pins={**PINS["tp+sp"][1], "collective_matmul": 0}, mode="eager")
    cluster = resolve_cluster("local-cpu", 2)
    without = plan_captured(captured_family("llama"), "llama", cluster, options)
    found = compare_plans(without, plan)
    changes = [(c.first, c.second) for c in found.choices if "collective matmul" in c.what]
    assert changes[0] == ("none", "0, 1, 2, 3")


def test_the_ring_is_a_pass_of_its_own() -> None:
    ran: list[PassRun] = []
    emit(captured_family("llama").graph, planned("llama", "tp+sp", "scheduled", 2), ran.append)
    assert [one.name for one in ran] == [
        "emit",
        "micro_chunks",
        "collective_matmul",
        "schedule",
        "chain",
        "bucket",
    ]
    assert "all_gather_matmul" in ran[2].program.text() and "gather" not in ran[1].name


# What is refused.


def test_a_pin_that_no_product_can_keep_is_refused() -> None:
    options = CompileOptions(pins={"tp": 2, "sp": 0, "collective_matmul": 1})
    with pytest.raises(
        OptionError, match="pin collective_matmul=1: no matrix product reads rows that ranks gather"
    ):
        plan_captured(captured_family("llama"), "llama", resolve_cluster("local-cpu", 2), options)


def test_a_pin_beside_stages_is_refused() -> None:
    options = CompileOptions(pins={"pp": 2, "collective_matmul": 1})
    with pytest.raises(
        OptionError,
        match="pin collective_matmul=1: stages of a pipeline do not have collective matmuls",
    ):
        plan_captured(captured_family("llama"), "llama", resolve_cluster("local-cpu", 2), options)


def test_a_pin_is_yes_or_no() -> None:
    with pytest.raises(
        OptionError,
        match="pin collective_matmul=2: unknown; write collective_matmul=1 or collective_matmul=0",
    ):
        CompileOptions(pins={"collective_matmul": 2})


def test_a_plan_whose_products_are_not_there_is_refused() -> None:
    plan = planned("llama", "tp+sp")
    wrong = replace(plan, regions=tuple(replace(r, collective_matmul=(9,)) for r in plan.regions))
    with pytest.raises(PlanMismatchError, match=r"collective matmuls \[9\], but it has 0 such"):
        emit(captured_family("llama").graph, wrong)


# Symmetric memory.


@pytest.mark.multiprocess
def test_fused_operators_of_symmetric_memory_make_the_same(pools: Pools) -> None:
    ring, fused = (
        pools.run(2, "support.processes.symmetric:on_shared_memory", s) for s in (False, True)
    )
    for of_rank, same in zip(ring, fused, strict=True):
        for found, expected in zip(of_rank, same, strict=True):
            torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_symmetric_memory_is_refused_where_there_is_none() -> None:
    program = emit(captured_family("llama").graph, planned("llama", "tp+sp"))
    with pytest.raises(OptionError, match="for a model that runs"):
        share_memory(program, None)
    assert ring_axes(program) == ("tp",)
    mesh = ProcessMesh(program.mesh, 0, torch.device("cpu"), program.levels)
    with pytest.raises(OptionError, match="takes CUDA devices, and this rank has cpu"):
        share_memory(program, mesh)
    options = CompileOptions(pins={"tp": 2, "sp": 0}, mode="eager")
    cluster = resolve_cluster("local-cpu", 2)
    whole = plan_captured(captured_family("llama"), "llama", cluster, options)
    without = emit(captured_family("llama").graph, whole)
    with pytest.raises(OptionError, match="products in a ring, and the plan has none"):
        share_memory(without, mesh)
