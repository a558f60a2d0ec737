"""Events of microbatches: the collectives of a step that really runs, microbatch by microbatch."""

from collections.abc import Sequence
from functools import cache
from typing import cast

import pytest
from support.programs.events import PROBER, SCALAR
from support.programs.memory import EchoMesh, local_part
from support.programs.out_of_sight import NoPeers
from support.programs.pipeline import ROWS, model_and_batch
from torch import device, nn

from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.simulation.pipeline import simulate_stages
from meshfold.ir.op_graph import ITEM_BYTES, SlotKind, Value
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import Layout
from meshfold.passes.events.bucketing import BucketSizes, with_bucket_sizes
from meshfold.passes.events.program import written_regions
from meshfold.passes.events.region import Microbatch
from meshfold.passes.pipeline.simulated import TypedPipeline
from meshfold.passes.planner import find_pipeline
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.price import parameter_groups
from meshfold.passes.price.parameters import member_copies
from meshfold.runtime.batches import BatchReader
from meshfold.runtime.pipeline_runner import PipelineRunner
from meshfold.runtime.stage_p2p import StageLinks
from meshfold.validation.collective_order import collectives_of

BUCKETS = {"reduce_bucket_bytes": "40KB", "allgather_bucket_bytes": "40KB"}
Collectives = list[tuple[str, str, int]]


@cache
def captured_llama():
    model, batch = model_and_batch("llama", 3)
    return model, batch, capture(model, batch)


def planned(
    pins: dict[str, int | str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Plan, TypedPipeline]:
    """The plan on four devices, and the typed program that it was written down from."""
    made: list[TypedPipeline] = []

    class Noted(TypedPipeline):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(find_pipeline, "TypedPipeline", Noted)
    _, _, captured = captured_llama()
    plan = find_plan_for(
        captured.graph,
        resolve_cluster("local-cpu", 4),
        CompileOptions(pins=pins),
        model_name="llama",
        batch_size=ROWS,
        probe=PROBER,
    )
    (typed,) = made
    options = typed.problems.options
    sizes = BucketSizes(options.reduce_bucket_pin, options.allgather_bucket_pin)
    return with_bucket_sizes(plan, sizes), typed


def recorded(plan: Plan, rank: int = 0) -> Collectives:
    """(kind, axes, bytes as the cost model counts them) of a step of a rank without peers; no
    scalars."""
    model, batch, captured = captured_llama()
    pipeline = emit_plan(captured.graph, plan)
    assert isinstance(pipeline, EmittedPipeline)
    mesh = EchoMesh(pipeline.mesh, rank, device("cpu"), pipeline.levels)
    program = pipeline.stages[pipeline.device_of(mesh.coords)]
    parameters = {
        p.name: nn.Parameter(local_part(program, p.name, model.get_parameter(p.name), mesh))
        for p in captured.graph.parameters
        if p.name in program.stored
    }
    buffers = {b.name: model.get_buffer(b.name).clone() for b in captured.graph.buffers}
    runner = PipelineRunner(pipeline, mesh, captured.constants)
    if pipeline.schedule.num_devices > 1:
        runner.links = cast(StageLinks, NoPeers())
    with collectives_of(mesh) as calls:
        runner.run(parameters, buffers, BatchReader(pipeline.stages, mesh, {}).read(batch))
    found = []
    for call in calls:
        num_bytes = ITEM_BYTES[call.dtype]
        for size in call.shape:
            num_bytes *= size
        if call.kind == "all_gather":
            num_bytes *= mesh.size(call.axes)
        kind = call.kind.removesuffix("_in_place")
        found.append((kind, ",".join(call.axes), num_bytes))
    return [call for call in found if call[2] > SCALAR]


def predicted(typed: TypedPipeline, num_microbatches: int) -> Collectives:
    (passes,) = simulate_stages(typed.events, typed.found.plan.schedule)
    inner = [passes.backward, passes.forward]
    run = [passes.first_forward, *inner * (num_microbatches - 1), passes.last_backward]
    of = [t.collective for one in run for t in one.transfers]
    return [(c.kind, ",".join(c.axes), c.num_bytes) for c in of if c.num_bytes > SCALAR]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("zero", [1, 3])
def test_stages_that_wait_gather_ahead(
    zero: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins: dict[str, int | str] = {"pp": 2, "dp": 2, "microbatches": 2, "zero": zero}
    plan, typed = planned({**pins, "schedule": "1f1b", "recompute": "none"}, monkeypatch)
    passes = simulate_stages(typed.events, typed.found.plan.schedule)[stage]
    ahead = passes.ahead.gathers if passes.ahead else ()
    assert bool(ahead) == bool(stage)
    order = ["first_forward", "forward", "backward", "last_backward"]
    if stage:
        order[1:3] = reversed(order[1:3])
    of = [*ahead, *(t for name in order for t in getattr(passes, name).transfers)]
    expected = [(c.collective.kind, c.collective.num_bytes) for c in of]
    real = recorded(plan, 2 * stage)
    assert [(kind, size) for kind, _, size in real] == [c for c in expected if c[1] > SCALAR]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "pins",
    [
        *({"dp": 4, "microbatches": 2, "zero": zero} for zero in range(4)),
        {"dp": 2, "tp": 2, "sp": 1, "microbatches": 2, "zero": 3},
        {"dp": 2, "tp": 2, "sp": 0, "microbatches": 2, "zero": 1, "recompute": "full"},
        {"dp": 4, "dp_shard": 2, "microbatches": 2, "zero": 3},
        {"dp": 4, "dp_shard": 2, "microbatches": 2, "zero": 1},
        *({"dp": 4, "microbatches": 2, "zero": zero, **BUCKETS} for zero in (0, 1, 3)),
    ],
    ids=lambda pins: "-".join(f"{k}{v}" for k, v in pins.items()),
)
def test_collectives_are_those_of_a_real_step_in_their_order(
    pins: dict[str, int | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, typed = planned(pins, monkeypatch)
    real = recorded(plan)
    assert len(real) > 3
    assert predicted(typed, 2) == real


def test_gradients_that_are_added_up_are_copied_also_from_a_parameter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one pass the reduction of a parameter with its own collective reads its gradient; autograd
    may have it elsewhere, too, by the next microbatch."""

    def has_shards(_value: Value, _stored: Layout, gather: Sequence[int], _costs: object) -> bool:
        return bool(gather)

    monkeypatch.setattr(parameter_groups, "is_unbucketed", has_shards)
    pins: dict[str, int | str] = {"dp": 4, "microbatches": 2, "zero": 1, "recompute": "none"}
    _, typed = planned(pins, monkeypatch)
    _, typings, pricers, _, _ = program = typed._writer._program
    typing, pricer = typings[1], pricers[1]
    copied_s = 0.0
    for v, slot in enumerate(pricer.graph.slots):
        if slot.kind is SlotKind.PARAMETER:
            stored, value = typing.slots[v], pricer.graph.values[v]
            gather = tuple(k for k, t in enumerate(stored) if t.is_shard)
            copied_s += member_copies(value, stored, gather, pricer.costs.storage).reduced_s
    ops_s = pricer.price(typing.slots).ops_backward_s
    for kind in Microbatch:
        (_, written, *_), _ = written_regions(*program, kind)
        backward_s = sum(e.seconds for e in written.events.backward)
        is_copied = backward_s == pytest.approx(ops_s + copied_s)
        assert is_copied == (kind is not Microbatch.ONLY), kind
