"""Ring attention: numbers, order and overlap of its collectives, memory, and full programs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.graphs.ops import SingleOp, check_typings, mesh_of
from support.graphs.tensors import real
from support.models.factories import ring_gpt2, ring_llama
from support.models.hugging_face import tiny_model, with_padding
from support.models.recompute import emit_recomputed
from support.processes.pool import Pools
from support.processes.ranks import ThreadMesh, run_on_simulated_ranks
from support.processes.ring import ATTENTION, ring_operands, ring_typing, rings_of, slow_devices
from support.programs.local_programs import errors_of_a_step
from support.programs.memory import EchoMesh, EmittedStep
from torch import Tensor, nn

from meshfold.api import find_plan
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.ops import ring_attention as ring
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.region.typing import MeshSearch
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.validation.verify import _report

EXACT = 1e-12


def log_of_a_step(size: int) -> list[list[str]]:
    """Per rank the collectives that a causal op starts, forward and backward."""
    op = ring_operands("causal")
    module = op.emitted(ring_typing(op, size), mesh_of(size))

    def body(mesh: RankMesh) -> list[str]:
        assert isinstance(mesh, ThreadMesh)
        width = 12 // size
        with torch.enable_grad():
            parts = (x.detach().narrow(2, mesh.rank * width, width) for x in op.tensors)
            (out,) = module(StepContext(mesh), *(x.clone().requires_grad_() for x in parts))
            out.sum().backward()
        return [f"{kind} over {' '.join(axes)}" for kind, axes in mesh.log]

    return run_on_simulated_ranks(mesh_of(size), body)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_passes_on_as_often_whatever_it_computes(size: int) -> None:
    """n - 1 times forward; backward as often, gradients once more."""
    expected = ["exchange over dp"] * ((size - 1) + (size - 1) + size)
    assert log_of_a_step(size) == [expected] * size


class NotedMesh(EchoMesh):
    """Without peers; notes what it starts and waits for."""

    def __init__(self, size: int) -> None:
        super().__init__(mesh_of(size), size - 1, torch.device("cpu"))
        self.notes: list[str] = []

    def start_exchange(self, x: Tensor, axes: Axes, sent: list[int], received: list[int]) -> Tensor:
        self.notes.append("start")
        return super().start_exchange(x, axes, sent, received)

    def wait(self, in_flight: Tensor) -> Tensor:
        self.notes.append("wait")
        return super().wait(in_flight)


def test_keys_are_on_their_way_while_a_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = NotedMesh(3)

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            mesh.notes.append("compute")
            return run(*args)

        return noted

    monkeypatch.setattr(ring, "block_forward", noting(ring.block_forward))
    monkeypatch.setattr(ring, "block_backward", noting(ring.block_backward))
    op = ring_operands("causal")
    leaves = [x.detach().narrow(2, 8, 4).clone().requires_grad_() for x in op.tensors]
    (out,) = op.emitted(ring_typing(op, 3), mesh_of(3))(StepContext(mesh), *leaves)
    assert mesh.notes == ["start", "compute", "wait"] * 2 + ["compute"]
    mesh.notes.clear()
    out.sum().backward()
    # Keys start, then the gradients of the keys before them, which are waited for one visit later.
    first, middle = ["start", "compute", "wait", "start"], ["start", "compute", "wait", "wait"]
    assert mesh.notes == [*first, *middle, "start", "compute", "wait", "start", "wait"]


def test_ranks_leave_out_what_their_rows_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank leaves out nothing."""
    computed = [0] * 4
    forward = ring.block_forward

    def counted(of: Any, query: Tensor, *rest: Any) -> Any:
        computed[int(query[0, 0, 0, 0])] += 1
        return forward(of, query, *rest)

    monkeypatch.setattr(ring, "block_forward", counted)
    query = torch.arange(4.0, dtype=torch.float64).reshape(1, 1, 4, 1).expand(1, 1, 4, 2)
    op = SingleOp(ATTENTION, query.contiguous(), query.contiguous(), query.contiguous())
    op = SingleOp(ATTENTION, *op.tensors, is_causal=True)
    module = op.emitted(ring_typing(op, 4), mesh_of(4))
    run_on_simulated_ranks(
        mesh_of(4),
        lambda mesh: module(StepContext(mesh), *(x.narrow(2, mesh.rank, 1) for x in op.tensors)),
    )
    assert computed == [1, 2, 3, 4]


@pytest.mark.parametrize("mask", ["none", "causal", "flags"])
def test_fused_blocks_on_ranks(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run on 16 and 32 bits, here in float64, at both places of the rows."""
    monkeypatch.setattr(ring, "is_fused", lambda *_: True)
    flags = torch.rand((2, 1, 16, 16), generator=torch.Generator().manual_seed(1)) > 0.3
    op = SingleOp(
        ATTENTION,
        *(real(2, heads, 16, 8, seed=heads) for heads in (4, 2, 2)),
        attn_mask=flags if mask == "flags" else None,
        is_causal=mask == "causal",
        enable_gqa=True,
    )
    for place in (1, 2):
        check_typings(op, mesh_of(2), [ring_typing(op, 2, place)])


@pytest.mark.parametrize("kind", ["causal", "mask"])
def test_two_axes_are_visited_like_the_digits_of_a_number(kind: str) -> None:
    op = ring_operands(kind)
    both = [t for t in op.typings(2, 3) if all(name.startswith("ring") for name in t.rules)]
    assert len(both) > 1
    check_typings(op, mesh_of(2, 3), both)


def test_key_and_value_with_different_rows_are_refused() -> None:
    op = ring_operands("causal")
    module = op.emitted(ring_typing(op, 2), mesh_of(2))
    query, key, value = (x.detach() for x in op.tensors)
    with pytest.raises(ValueError, match="have different rows"):
        module(StepContext(NotedMesh(2)), query[:, :, :6], key[:, :, :6], value[:, :, :4])


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["causal", "mask"])
@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_on_processes(pools: Pools, size: int, kind: str) -> None:
    for errors in pools.run(size, "support.processes.ring:ring_errors", mesh_of(size), kind):
        assert max(errors) <= EXACT


# Whole programs.

CASES = [
    ("llama", Degrees(cp=2), False),
    ("three_llama", Degrees(cp=2), False),
    ("gpt2", Degrees(cp=4), False),
    ("llama", Degrees(cp=2, tp=2), True),
]


@cache
def program_of(
    family: str, degrees: Degrees, sequence_parallel: bool
) -> tuple[nn.Module, dict[str, Tensor], Captured, EmittedProgram, MeshSearch]:
    """With a batch of one: the sequence is all there is to shard."""
    model, batch = tiny_model(family)
    batch = {name: value[1:2] for name, value in batch.items()}
    if not family.startswith("three"):
        batch = with_padding(batch)
    with float64_everywhere():
        captured = capture(model, batch)
    cluster = slow_devices(degrees.cp * degrees.tp)
    mesh = build_mesh(cluster, 1, degrees.tp, cp=degrees.cp)
    search = MeshSearch(captured.graph, cluster, mesh, 1)
    typed = search.solve(zero=0, mode="sequence" if sequence_parallel else "tensor")
    return (
        model,
        batch,
        captured,
        emit_typed(captured.graph, typed.typings, search.costs),
        search,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_equal_one_process_also_where_layers_are_recomputed(
    case: tuple[str, Degrees, bool],
) -> None:
    model, batch, captured, program, _ = program_of(*case)
    assert set(rings_of(program)) == {"ring"}
    for run in (program, emit_recomputed(program, only_layers=True)):
        for errors in errors_of_a_step(model, batch, captured, run):
            worst = max(errors, key=errors.__getitem__)
            assert errors[worst] <= EXACT, worst


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_predicted_peak_is_that_of_a_step(case: tuple[str, Degrees, bool]) -> None:
    model, batch, captured, program, search = program_of(*case)
    found, _ = MemoryModel(search.costs, OpProber()).step(
        captured.graph,
        program.typings,
        optimizer="sgd",
        reserve_bytes=0,
        capacity_bytes=2**30,
    )
    predicted = found.peak - found.parameters - sum(t.nbytes for t in batch.values())
    counted = EmittedStep(model, captured, program, batch).counted_peak_bytes()
    assert predicted == pytest.approx(counted, rel=0.03)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        pytest.param("ring_llama", {"cp": 2, "dp": 1, "tp": 1, "zero": 3}, marks=pytest.mark.slow),
        pytest.param("ring_gpt2", {"cp": 2, "dp": 1, "tp": 2, "sp": 1}, marks=pytest.mark.slow),
        pytest.param("ring_gpt2", {"cp": 2, "dp": 2, "tp": 1}, marks=pytest.mark.slow),
    ],
)
def test_verify_passes_with_three_steps_of_adamw(
    pools: Pools, model: str, pins: dict[str, int]
) -> None:
    """Loss, gradients, parameters after the steps, and one order of collectives on all ranks."""
    size = pins["dp"] * pins["cp"] * pins["tp"]
    build = {"ring_llama": ring_llama, "ring_gpt2": ring_gpt2}[model]
    network, inputs = build()
    plan = find_plan(network, slow_devices(size), inputs, options=CompileOptions(pins=pins))
    names = {name for r in plan.regions for op in r.typing.ops for name in op.rules}
    assert names & {"ring", "ring/2"}
    results = pools.run(
        size,
        "support.processes.verify:compare",
        plan_to_json(plan),
        f"support.models.factories:{model}",
    )
    report = _report(plan, results)
    assert report.passed
    assert max(g.relative for g in report.gradients) < EXACT
    assert max(p.relative for p in report.parameters) < EXACT
