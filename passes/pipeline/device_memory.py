"""The memory of a device of a pipeline, with all of its stages, from the program that it runs.

The passes are simulated (cost_models/simulation/stage_memory.py). The search adds up instead: all
that is in flight at its most, all gradients, and the layer that works with most. So does this where
layers offload: passes know nothing of copies and gradients on their way.
"""

from dataclasses import replace
from itertools import pairwise

from meshfold.cost_models.memory.put_off_bytes import PutOffBytes
from meshfold.cost_models.memory.stage_residents import StageInstance, is_summed, stage_residents
from meshfold.cost_models.memory.step_memory import InstanceOutput, States
from meshfold.cost_models.pipeline.actions import Pass
from meshfold.cost_models.simulation.stage_memory import (
    StageMemory,
    StageUse,
    device_peak,
    stage_memory,
)
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.op_graph import SourceKind
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.memory.put_off import PutOff, most_bytes
from meshfold.passes.memory.region import loss_instance
from meshfold.passes.memory.zero import program_states
from meshfold.passes.pipeline.simulated import TypedPipeline
from meshfold.passes.price.parameters import local_bytes

MICROBATCH_SCALAR_BYTES = 8
"""Of a microbatch: its loss, and the sum of all so far."""


def device_memory(typed: TypedPipeline, device: int) -> MemoryEstimate:
    """By component, at the worst moment of the device."""
    problem, schedule = typed.found.problem, typed.found.plan.schedule
    if typed.is_offloaded:
        return _added_up(typed, device)
    states = _states(typed, device)
    stages = {s: _memory(typed, s) for s in schedule.stages_of(device)}
    worst = device_peak(schedule.actions()[device], stages, states.update.step_bytes)
    reserve = typed.problems.reserve_bytes
    return MemoryEstimate(
        parameters=states.parameters,
        gradients=worst.gradients,
        optimizer=states.update.state_bytes,
        activations=worst.activations + problem.fixed_bytes - reserve,
        gathered_parameters=worst.gathered,
        buckets=worst.buckets,
        transient=worst.transient,
        reserve=reserve,
        capacity=problem.capacity_bytes,
        loss=worst.loss,
    )


def microbatch_bytes(typed: TypedPipeline, stage: int) -> int:
    """Activations that a stage keeps of one microbatch, with what comes from the stage before."""
    if typed.is_offloaded:
        return _microbatch_bytes(typed, stage)
    return _memory(typed, stage).use.residents.kept


def _states(typed: TypedPipeline, device: int) -> States:
    """Parameters of a device, and what their optimizer keeps and does. The batch and buffers are
    those of all stages (PipelineProblem.fixed_bytes)."""
    stages = typed.found.plan.stages
    numbers = [
        k
        for s in typed.found.plan.schedule.stages_of(device)
        for k in range(stages[s].first, stages[s].end)
    ]
    own = replace(typed.split, instances=tuple(typed.split.instances[k] for k in numbers))
    reads = ProgramReads(program_reads(own).instances, (), ())
    optimizer = typed.problems.options.optimizer
    return program_states(own, typed.typings, typed.mesh, reads=reads, optimizer=optimizer)


def _memory(typed: TypedPipeline, stage: int) -> StageMemory:
    """The passes of a stage; simulated once."""
    if stage not in typed.stage_memories:
        events, first = typed.events[stage], typed.first_events[stage]
        splits = typed.found.plan.schedule.splits_backward
        memory = stage_memory(events, first, _use(typed, stage), splits=splits)
        typed.stage_memories[stage] = memory
    return typed.stage_memories[stage]


def _use(typed: TypedPipeline, number: int) -> StageUse:
    plan, split = typed.found.plan, typed.split
    stage, is_last = plan.stages[number], number + 1 == len(plan.stages)
    crosses = plan.schedule.crosses_devices
    before, behind = _crossing(typed, number), 0 if is_last else _crossing(typed, number + 1)
    # What a stage of the same device made is there already; its gradient is a tensor of its own.
    arrived = before if crosses(number) else 0
    leaves = _leaves(typed, stage.first, stage.end)
    loss = loss_instance(split) - stage.first
    uses = [u for k in range(stage.first, stage.end) for u in typed.instances[k].parameters]
    outputs = [o.source for o in split.outputs[1:] if o.source.kind is SourceKind.VALUE]
    flat = [_flat_bytes(typed, k) for k in range(stage.first, stage.end)]
    residents = stage_residents(
        [
            _instance(typed, k, stage.first, typed.events[number].put_off[k - stage.first])
            for k in range(stage.first, stage.end)
        ],
        leaves,
        arrived_bytes=arrived + _made_again(typed, stage.first, stage.end),
        received_bytes=sum(_size(typed, stage.first, x) for x in leaves) if is_last else behind,
        is_only=typed.found.problem.degrees.microbatches == 1,
        splits=plan.schedule.splits_backward,
    )
    return StageUse(
        residents,
        {Pass.FORWARD: arrived, Pass.BACKWARD: behind if crosses(number + 1) else 0},
        sends_back=before,
        outputs=MICROBATCH_SCALAR_BYTES
        + (sum(_size(typed, 0, (s.instance, s.output)) for s in outputs) if is_last else 0),
        loss=loss if 0 <= loss < stage.end - stage.first else -1,
        largest_gradient_bytes=max(
            (use.resident_bytes for use in uses if use.how == "direct"), default=0
        ),
        reduced_bytes=max(map(sum, pairwise((0, *flat, 0)))),
    )


def _flat_bytes(typed: TypedPipeline, k: int) -> int:
    """Of the buffers of gradients of instance k that are reduced with every microbatch."""
    once = typed.typings[typed.split.instances[k].region].accumulate_unsharded
    return sum(
        use.flat_bytes
        for use in typed.instances[k].parameters
        if use.how != "direct" and not is_summed(use, once)
    )


def _instance(typed: TypedPipeline, k: int, first: int, put_off: PutOffBytes) -> StageInstance:
    """Instance k, of the stage that begins with number `first`."""
    reads = typed.reads.instances[k]
    own = {
        slot: (maker - first, output)
        for slot, (maker, output) in reads.values.items()
        if maker >= first
    }
    return StageInstance(
        replace(typed.instances[k], sources=own),
        tuple(slot for slot in reads.values if slot not in own),
        put_off,
        typed.typings[typed.split.instances[k].region].accumulate_unsharded,
    )


def _crossing(typed: TypedPipeline, stage: int) -> int:
    """Bytes of a microbatch that a stage takes over."""
    first = typed.found.plan.stages[stage].first
    return int(typed.found.problem.tables.crossing_bytes[first]) if stage else 0


def _leaves(typed: TypedPipeline, first: int, end: int) -> list[InstanceOutput]:
    """Values that instances from `first` to `end` make for later stages; of the last one what the
    backward starts from."""
    split = typed.split
    if end == len(split.instances):
        source = split.outputs[0].source
        return [(source.instance - first, source.output)] if source.instance >= first else []
    made = {
        (maker - first, output)
        for reads in typed.reads.instances[end:]
        for maker, output in reads.values.values()
        if first <= maker < end and (maker, output) in typed.crossing
    }
    return sorted(made)


def _made_again(typed: TypedPipeline, first: int, end: int) -> int:
    """Bytes of what earlier stages make and the instances from `first` to `end` make for
    themselves, too (passes/split/stage_crossing.py)."""
    read = {v for reads in typed.reads.instances[first:end] for v in reads.values.values()}
    again = {v for v in read if v[0] < first and v not in typed.crossing}
    return sum(_size(typed, 0, v) for v in again)


def _size(typed: TypedPipeline, first: int, value: InstanceOutput) -> int:
    """Local bytes of a value, by number of its instance from `first` on."""
    number, output = value
    r = typed.split.instances[first + number].region
    graph, typing = typed.split.regions[r].graph, typed.typings[r]
    value_of = graph.values[graph.outputs[output]]
    return local_bytes(value_of, typing.outputs[output], typed.mesh.sizes)


# Layers that offload.


def _added_up(typed: TypedPipeline, device: int) -> MemoryEstimate:
    """The layer that works with most does so while all that is ever in flight is kept."""
    found, problems = typed.found, typed.problems
    problem = found.problem
    stages = [found.plan.stages[s] for s in found.plan.schedule.stages_of(device)]
    numbers = [k for stage in stages for k in range(stage.first, stage.end)]
    layers = [found.layers[k] for k in numbers]
    at = max(numbers, key=lambda k: found.layers[k].workspace_bytes)
    largest = found.layers[at]
    gathered = min(largest.gathered_bytes, largest.workspace_bytes)
    kept = sum(
        found.plan.stages[s].in_flight * _microbatch_bytes(typed, s)
        for s in found.plan.schedule.stages_of(device)
    )
    working, loss = largest.workspace_bytes - gathered, 0
    if at == loss_instance(problem.tables.folded):
        stage = next(stage for stage in stages if stage.first <= at < stage.end)
        inside = stage.in_flight * largest.activation_bytes
        kept, working, loss = kept - inside, 0, inside + working
    # The optimizer steps when nothing of the microbatches is left.
    more = sum(x.update_bytes for x in layers) - kept - gathered - working - loss
    return MemoryEstimate(
        parameters=sum(x.parameter_bytes for x in layers),
        gradients=sum(x.gradient_bytes for x in layers),
        optimizer=sum(x.optimizer_bytes for x in layers),
        activations=kept + problem.fixed_bytes - problems.reserve_bytes,
        gathered_parameters=gathered + sum(x.gathered_once_bytes for x in layers),
        buckets=0,
        transient=working + max(0, more),
        reserve=problems.reserve_bytes,
        capacity=problem.capacity_bytes,
        loss=loss,
        emitted=_more_for_weights(typed, device),
    )


def _more_for_weights(typed: TypedPipeline, device: int) -> int:
    """How much more a device keeps for gradients of weights that it puts off than the activations
    of its microbatches in flight."""
    schedule, stages = typed.found.plan.schedule, typed.found.plan.stages
    if not schedule.splits_backward:
        return 0
    own = schedule.stages_of(device)
    kept = {s: _microbatch_bytes(typed, s) for s in own}
    put_off = {s: sum(typed.put_off[stages[s].first : stages[s].end], PutOff()) for s in own}
    counted = sum(stages[s].in_flight * kept[s] for s in own)
    return max(0, most_bytes(schedule.actions()[device], kept, put_off) - counted)


def _microbatch_bytes(typed: TypedPipeline, number: int) -> int:
    """Activations that a stage keeps of one microbatch, with what comes from the stage before."""
    stage = typed.found.plan.stages[number]
    inside = sum(x.activation_bytes for x in typed.found.layers[stage.first : stage.end])
    return inside + int(typed.found.problem.chain.resident_bytes[stage.first])
