"""Parameters that are gathered and reduced alone: without copies, and without a trace in the
numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.hugging_face import families, tiny_model
from support.processes.pool import Pools
from support.programs.local_programs import errors_of_a_step
from support.programs.memory import EmittedStep
from support.programs.schedules import captured_family

from meshfold.api import plan_captured
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, Mode
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import INVARIANT, REPLICATE, Layout, Shard
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.validation.collective_order import collectives_of
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.zero.parameter_group import GroupBuffers, GroupMember, ParameterGroup

EXACT = 1e-12

CASES: dict[str, dict[str, Any]] = {
    "zero3": {"dp": 2, "zero": 3},
    "zero2": {"dp": 4, "zero": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3 x tp2+sp": {"dp": 2, "tp": 2, "sp": 1, "zero": 3},
    "zero3, recompute": {"dp": 2, "zero": 3, "recompute": "full"},
}


def quick_links(num_ranks: int, launches: float = 0.0) -> ClusterSpec:
    """This machine with collectives that take as long to start as so many kernels: at 0 every copy
    is worth one, a little above 1 that of a weight is, and that of a vector is not."""
    spec = resolve_cluster("local-cpu", num_ranks)
    (group,) = spec.groups
    start_s = launches * group.device.launch_s
    link = replace(group.link, latency_s=0.0, start_s=start_s, ramp_bytes=0.0)
    return replace(spec, groups=(replace(group, link=link),))


def planned(
    family: str, case: str, mode: Mode = "eager", launches: float = 0.0, **pins: Any
) -> Plan:
    fixed = CASES[case]
    links = quick_links(fixed.get("dp", 1) * fixed.get("tp", 1), launches)
    options = CompileOptions(pins={**fixed, **pins}, mode=mode)
    return plan_captured(captured_family(family), family, links, options)


def emitted(plan: Plan, family: str) -> EmittedProgram:
    program = emit_plan(captured_family(family).graph, plan)
    assert isinstance(program, EmittedProgram)
    return program


def alone(program: EmittedProgram) -> list[ParameterGroup]:
    return [b for region in program.regions for b in region.groups if b.is_unbucketed]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["eager", "scheduled"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", families("gpt2", "llama", "mixtral", without=("t5",)))
def test_gradients_are_those_of_one_process(family: str, case: str, mode: Mode) -> None:
    program = emitted(planned(family, case, mode), family)
    assert len(alone(program)) > 3
    for errors in errors_of_a_step(*tiny_model(family), captured_family(family), program):
        assert max(errors.values()) < EXACT


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero3", "zero3 x tp2+sp"])
def test_the_same_on_processes(pools: Pools, case: str) -> None:
    plan = planned("llama", case)
    arguments = "llama", captured_family("llama"), plan_to_json(plan)
    for loss_error, gradient_error, name, uneven in pools.run(
        plan.mesh.num_ranks, "support.programs.emit:compare_step", *arguments
    ):
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


@pytest.mark.parametrize("case", ["zero3", "zero2", "zero3 x tp2+sp"])
def test_what_is_simulated_is_what_runs(case: str) -> None:
    plan, captured = planned("llama", case), captured_family("llama")
    assert plan.events is not None
    model, batch = tiny_model("llama")
    step = EmittedStep(model, captured, emitted(plan, "llama"), batch)
    with float64_everywhere(), collectives_of(step.runner.mesh) as calls:
        step.train()
    found = [t.collective for t in simulate(plan.events).transfers]
    real = [(c.kind, c.axes) for c in calls if c.kind in ("all_gather", "reduce_scatter")]
    assert real == [(c.kind, c.axes) for c in found if c.kind in ("all_gather", "reduce_scatter")]
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize("case", ["zero3", "zero2"])
def test_memory_of_a_step_is_as_predicted(case: str) -> None:
    plan, captured = planned("llama", case), captured_family("llama")
    program = emitted(plan, "llama")
    assert plan.events is not None and len(alone(program)) > 3
    *memory, _ = simulate(plan.events).memory  # without the optimizer, which does not run here
    simulated = max(num_bytes for _, num_bytes in memory) - plan.events.fixed_bytes
    model, batch = tiny_model("llama")
    with float64_everywhere():
        counted = EmittedStep(model, captured, program, batch).counted_peak_bytes()
    assert 0.9 * simulated <= counted <= 1.05 * simulated


def test_they_are_never_coalesced_with_others() -> None:
    plan = planned(
        "llama", "zero3", launches=1.02, reduce_bucket_bytes="1GB", allgather_bucket_bytes="1GB"
    )
    program = emitted(plan, "llama")
    assert len(alone(program)) > 3
    assert plan.events is not None and program.reduced_together and program.gathered_together
    for places in (*program.reduced_together, *program.gathered_together):
        buckets = [program.region_of(k).groups[number] for k, number in places]
        assert not any(b.is_unbucketed for b in buckets)
    simulated = [
        one.groups for one in (*plan.events.reduce_buckets, *plan.events.allgather_buckets)
    ]
    assert sorted(simulated) == sorted((*program.reduced_together, *program.gathered_together))


def test_a_slow_start_makes_parameters_share() -> None:
    slow = plan_captured(
        captured_family("llama"),
        "llama",
        resolve_cluster("local-cpu", 2),
        CompileOptions(pins=CASES["zero3"]),
    )
    assert not alone(emitted(slow, "llama"))


# Without copies.


def buffers(stored: Layout, dtype: str = "float32", master: str = "") -> GroupBuffers:
    member = GroupMember(0, "p", (4, 6), stored, (REPLICATE,), ())
    gather = (0,) if stored[0].is_shard else ()
    return GroupBuffers(ParameterGroup(gather, dtype, True, (member,), master, bool(gather)), (2,))


def test_a_gradient_is_reduced_where_it_lies() -> None:
    gradient = torch.arange(24.0).view(4, 6)
    whole = buffers((Shard(0),)).as_unsharded([gradient])
    assert whole is not None and whole.data_ptr() == gradient.data_ptr()
    assert whole.tolist() == gradient.flatten().tolist()


@pytest.mark.parametrize(
    ("of", "gradient"),
    [
        (buffers((Shard(1),)), torch.zeros(4, 6)),
        (buffers((INVARIANT,)), torch.zeros(4, 6)),
        (buffers((Shard(0),)), None),
        (buffers((Shard(0),)), torch.zeros(6, 4).t()),
        (buffers((Shard(0),)), torch.zeros(1, 6).expand(4, 6)),
        (buffers((Shard(0),), "bfloat16", "float32"), torch.zeros(4, 6, dtype=torch.bfloat16)),
    ],
    ids=["columns", "all-reduced", "none", "strided", "expanded", "narrow"],
)
def test_other_gradients_are_copied(of: GroupBuffers, gradient: torch.Tensor | None) -> None:
    assert of.as_unsharded([gradient]) is None
