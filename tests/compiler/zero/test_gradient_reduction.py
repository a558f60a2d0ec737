"""Reductions of gradients, coalesced and one by one: the same numbers, whatever is coalesced."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.models.hugging_face import families, tiny_model
from support.processes.pool import Pools
from support.processes.ranks import run_on_simulated_ranks
from support.programs.emit import clipped_steps
from support.programs.events import eager
from support.programs.local_programs import Rank, on_ranks
from support.programs.memory import EmittedStep
from support.programs.pipeline import captured_model, recut
from support.programs.pipeline import planned as planned_pipeline
from support.programs.schedules import PINS, captured_family, planned
from torch import Tensor

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.cost_models.simulation.step import simulate
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.options import CompileOptions, Mode
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import parse_layout
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.events.bucketing import BucketSizes, bucketed_events, with_bucket_sizes
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.zero.gradient_reduction import Reducing, Reduction
from meshfold.zero.hierarchical_all_reduce import AllReduces
from meshfold.zero.microbatch_state import SharedStep
from meshfold.zero.parameter_group import GroupBuffers, GroupMember, ParameterGroup

SOME, EVERYTHING = 100_000, 1 << 40
EXACT = 1e-12
FOUR = ("dp", "zero3", "tp+sp", "zero3 x tp+sp")
MORE = ("zero2 x tp", "zero3 x tp+sp, again")


@cache
def captured_deep(family: str) -> Captured:
    """T5 has layers that repeat from three on."""
    model, batch = tiny_model(family, layers=3 if family == "t5" else 2)
    with float64_everywhere():
        return capture(model, batch)


@cache
def plan_of(family: str, pins: str, mode: Mode) -> Plan:
    num_processes, fixed = PINS[pins]
    cluster = resolve_cluster("local-cpu", num_processes)
    options = CompileOptions(pins={**fixed, "micro_chunks": 1}, mode=mode)
    return plan_captured(captured_deep(family), family, cluster, options)


@cache
def gradients(family: str, pins: str, mode: Mode, most_bytes: int) -> list[list[Tensor | None]]:
    """Of every simulated rank."""
    model, batch = tiny_model(family, layers=3 if family == "t5" else 2)
    captured, plan = captured_deep(family), plan_of(family, pins, mode)
    plan = replace(plan, reduce_bucket_bytes=most_bytes, allgather_bucket_bytes=most_bytes)
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram)
    assert bool(program.reduced_together) == bool(most_bytes)

    def body(rank: Rank) -> list[Tensor | None]:
        rank.loss(batch).backward()
        return [p.grad for p in rank.parameters.values()]

    with float64_everywhere():
        return on_ranks(model, captured, program, body)


def assert_equal(left: Sequence[Sequence[Tensor | None]], right: Sequence[Sequence[Tensor | None]]):
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None)
            assert x is None or y is None or torch.equal(x, y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["eager", "scheduled"])
@pytest.mark.parametrize("pins", [*FOUR, *MORE])
@pytest.mark.parametrize("family", families("gpt2", "llama"))
def test_gradients_are_equal_to_the_bit(family: str, pins: str, mode: Mode) -> None:
    one_by_one = gradients(family, pins, mode, 0)
    assert_equal(gradients(family, pins, mode, EVERYTHING), one_by_one)


@pytest.mark.parametrize("pins", FOUR)
def test_groups_of_a_few_are_as_good(pins: str) -> None:
    assert_equal(gradients("llama", pins, "eager", SOME), gradients("llama", pins, "eager", 0))


@pytest.mark.multiprocess
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "pins", [pytest.param(p, marks=pytest.mark.slow) for p in FOUR[:3]] + ["zero3 x tp+sp"]
)
@pytest.mark.parametrize("family", families("llama", without=("t5",)))
def test_the_same_on_processes(pools: Pools, family: str, pins: str) -> None:
    plan = with_bucket_sizes(planned(family, pins, "eager"), BucketSizes(EVERYTHING, EVERYTHING))
    assert plan.events is not None and plan.events.reduce_buckets
    arguments = family, captured_family(family), plan_to_json(plan)
    found = pools.run(PINS[pins][0], "support.programs.emit:compare_step", *arguments)
    for loss_error, gradient_error, name, uneven in found:
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


@pytest.mark.multiprocess
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_clipping_sees_the_same_norm(pools: Pools, zero: int) -> None:
    expected = clipped_steps("gpt2", {}, 0.3)
    pins = {"dp": 2, "zero": zero, "reduce_bucket_bytes": "1GB", "allgather_bucket_bytes": "1GB"}
    for found in pools.run(2, "support.programs.emit:clipped_steps", "gpt2", pins, 0.3):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-12, atol=EXACT)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_pipeline_merges_once_a_step_what_waits_for_its_end(pools: Pools) -> None:
    """ZeRO 1 and plain copies reduce with the last microbatch, ZeRO 3 with every one."""
    kinds = [
        Schedule(ScheduleKind.ONE_F_ONE_B, 2, 4),
        Schedule(ScheduleKind.ZERO_BUBBLE, 2, 4),
    ]
    pins = (("dp", 2), ("microbatches", 4), ("pp", 2), ("recompute", "none"))
    plans = []
    for zero in (0, 1, 3):
        base = planned_pipeline("llama", 6, 4, (*pins, ("zero", zero)))
        base = replace(base, reduce_bucket_bytes=EVERYTHING, allgather_bucket_bytes=EVERYTHING)
        plans += [recut(base, kind) for kind in kinds]
    arguments = ("llama", 6, captured_model("llama", 6), [plan_to_json(p) for p in plans])
    for outcomes in pools.run(4, "support.programs.pipeline:run_pipelines", *arguments):
        for outcome in outcomes:
            assert max(outcome.loss_error, outcome.gradient_error) < 1e-11
    for counts in pools.run(4, "support.programs.pipeline:count_collectives", *arguments):
        # One for the layers of the stage, and one for what the stage has at its end, if anything.
        assert [c["all_reduce_in_place"] for c in counts[:2]] == [1, 1]
        assert [c["reduce_scatter"] for c in counts[2:]] == [1, 1, 4, 4]
        # ZeRO 1 gathers with the first microbatch alone, ZeRO 3 forward and backward.
        assert [c["all_gather"] for c in counts[2:]] == [1, 1, 8, 8]


def test_a_member_without_gradients_is_not_waited_for() -> None:
    mesh = Mesh((MeshAxis("dp", 2),))
    stored, used = parse_layout("S0"), parse_layout("R")

    def run(rank: RankMesh) -> list[list[float] | None]:
        reducing = Reducing(rank, SharedStep(), False, AllReduces(rank))
        members = tuple(GroupMember(0, "w", (4,), stored, used, ()) for _ in range(1))
        buffers = [
            GroupBuffers(ParameterGroup((0,), "float32", True, members), (2,)) for _ in range(3)
        ]
        keys = [(2, 0), (1, 0), (0, 0)]
        merged = Reduction(
            reducing, list(zip(keys, buffers, strict=True)), on_last_microbatch=False
        )
        for key, gradient in ((keys[0], torch.arange(4.0)), (keys[2], None)):
            merged.pack(key, [gradient], like=torch.zeros(1))
        merged.start_unfinished()
        merged.start_unfinished()  # nothing is left to start
        found = [merged.finish(key) for key in keys]
        return [None if p is None or p[0] is None else p[0].tolist() for p in found]

    first, second = run_on_simulated_ranks(mesh, run)
    assert first == [[0, 2], None, None]
    assert second == [[4, 6], None, None]


@pytest.mark.parametrize("merges", ["reductions", "gathers"])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_memory_of_a_step_is_as_simulated(zero: int, merges: str) -> None:
    case = eager("llama", UniformStrategy(dp=4, zero=zero), layers=6)
    counted, simulated = [], []
    for most_bytes in (0, 200_000, EVERYTHING):
        sizes = BucketSizes(**{merges: most_bytes})
        events = bucketed_events(case.events, sizes, case.pricers[0].costs)
        # Without the optimizer, which does not run here.
        *memory, _ = simulate(events).memory
        simulated.append(max(num_bytes for _, num_bytes in memory) - events.fixed_bytes)
        program = replace(
            case.program,
            reduce_bucket_bytes=sizes.reductions or 0,
            allgather_bucket_bytes=sizes.gathers or 0,
        )
        step = EmittedStep(case.model, case.captured, program, case.batch)
        counted.append(step.counted_peak_bytes())
    # What is merged is held as simulated; here a buffer is read until the next reduction starts, so
    # that shards of two layers are there besides, and what the first norm of a layer makes last.
    shard_bytes = max(g.flat_bytes for r in case.events.regions for g in r.groups) // 4
    norm_bytes = 8 * case.batch["input_ids"].shape[1] * case.model.config.hidden_size
    for real, expected in zip(counted, simulated, strict=True):
        assert real <= expected + 2 * shard_bytes + norm_bytes
