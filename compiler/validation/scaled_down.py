"""A scaled-down model and its plan, for local processes, where the real size does not fit.

    configuration --shrink--> its configuration --plan with pins--> its plan
    pp4 x dp8 x tp2, zero3, 32 microbatches        pp2 x dp2 x tp2, zero3, 4 microbatches

Every axis with several ranks has two, and the search is pinned to what the plan does: degrees, ZeRO
level, sequence parallel, recomputation, schedule, layouts of parameters. What became smaller is
said, and what the scaled-down model does not show. A factory is called as it is: only mesh and
batch shrink.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.options import (
    CHUNKED_LOSS,
    COLLECTIVE_MATMUL,
    LAYOUT,
    MICRO_CHUNKS,
    SLICES,
    VIRTUAL_STAGES,
    CompileOptions,
    PinValue,
)
from meshfold.ir.plan import Plan
from meshfold.models.config_file import Configuration, read_configuration
from meshfold.models.from_argument import (
    BuiltModel,
    accepted_sizes,
    build_model,
    fields_with_defaults,
    is_configuration,
    sequence_length,
)
from meshfold.models.shrink_config import Change, changed, shrink
from meshfold.passes.region.pins import pinned_slots
from meshfold.validation.captured import captured_alike

MAX_PROCESSES = 8
SEQUENCE = 16
ROWS = 2
"""Samples of a rank's microbatch."""
MICROBATCHES = 4
DROPPED_FIRST = ("dp", "cp", "ep", "tp", "pp")
"""Axes, in the order in which they are left out where two ranks on each are too many processes."""
SHARE_OF_MEMORY = 0.5
"""Share of this machine's memory that verify may take."""
FLOAT64_BYTES = 8
WIDENING = 4
"""Bytes of float64 for one of a 16-bit number; too many for a model in float32."""
STATES = 5
"""Parameters, gradients, two moments of AdamW, and the state to begin again from."""


@dataclass(frozen=True)
class ScaledDown:
    """A plan for a scaled-down model."""

    plan: Plan
    model: str | Configuration
    """The factory, or the smaller configuration, that builds it."""
    changes: tuple[str, ...]
    """What is smaller than in reality, and what is left out: a line each."""


def needs_scaling_down(plan: Plan) -> bool:
    """Whether the plan has more processes, or its model more bytes, than this machine takes."""
    return plan.world_size > MAX_PROCESSES or needed_bytes(plan) > _room_bytes()


def _room_bytes() -> int:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(SHARE_OF_MEMORY * memory_bytes)


def needed_bytes(plan: Plan) -> int:
    """About what all processes of verify have in memory, in float64: the program of their rank, and
    the unsharded model with the global batch, which every one of them runs, too."""
    memory = plan.memory
    rank = WIDENING * (memory.peak - memory.reserve)
    batch = WIDENING * (memory.activations + memory.loss) * plan.world_size
    return plan.world_size * (rank + batch + STATES * FLOAT64_BYTES * plan.model.num_parameters)


def scaled_down(plan: Plan, model: str, captured: Captured) -> ScaledDown:
    """A scaled-down plan and model for `plan` of MODEL, whose captured program is given.

    Raises MeshfoldError where there is none, with what to do instead.
    """
    degrees = _small_degrees(plan)
    small_model: str | Configuration = model
    changes: tuple[Change, ...] = ()
    try:
        if is_configuration(model):
            small_model, changes = _smaller(plan, read_configuration(Path(model)))
        built = _built(plan, small_model, degrees)
        captured_small = captured_alike(plan, built)
        small, left_out = _planned(plan, captured_small, degrees)
    except MeshfoldError as error:
        raise MeshfoldError(
            f"no scaled-down version of {model} for local processes: {error}; plan a smaller "
            "model with the same degrees for local-cpux8 or less and verify that"
        ) from error
    before, after = plan.strategy.label, small.strategy.label
    facts = [f"mesh {_mesh_text(plan)} -> {_mesh_text(small)}", f"plan {before} -> {after}"]
    inputs = _inputs_text(plan), _inputs_text(small)
    facts += [] if inputs[0] == inputs[1] else [f"inputs {inputs[0]} -> {inputs[1]}"]
    facts += map(str, changes)
    facts += [*left_out, *_not_shown(plan, small, captured, captured_small)]
    return ScaledDown(small, small_model, tuple(facts))


def _small_degrees(plan: Plan) -> dict[str, int]:
    strategy = plan.strategy
    new = {name: min(getattr(strategy, name), 2) for name in DROPPED_FIRST}
    for name in DROPPED_FIRST:
        if prod(new.values()) > MAX_PROCESSES:
            new[name] = 1
    if strategy.dp_shard and strategy.zero and 2 * prod(new.values()) <= MAX_PROCESSES:
        new["dp"] *= 2
    return new


def _batch(plan: Plan, degrees: Mapping[str, int]) -> int:
    """The scaled-down batch: as many samples a microbatch of a rank as there are, ROWS at most."""
    strategy = plan.strategy
    slices = strategy.degrees.batch_ranks * strategy.microbatches
    rows = min(ROWS, max(1, plan.model.batch_size // slices))
    return degrees["dp"] * degrees["ep"] * _microbatches(plan) * rows


def _rewriting(plan: Plan) -> dict[str, PinValue]:
    """The pins about how the graph is rewritten."""
    slices: dict[str, PinValue] = {SLICES: plan.slices} if plan.slices > 1 else {}
    return {CHUNKED_LOSS: int(plan.chunked_loss), **slices}


def _microbatches(plan: Plan) -> int:
    """An even number, as interleaved stages on two devices need, or 1."""
    wanted = min(plan.strategy.microbatches, MICROBATCHES)
    return wanted if wanted == 1 else wanted // 2 * 2


def _smaller(plan: Plan, given: Configuration) -> tuple[Configuration, tuple[Change, ...]]:
    changes = shrink(
        fields_with_defaults(given), sequence=sequence_length(plan), new_sequence=SEQUENCE
    )
    return replace(given, fields=changed(given.fields, changes)), changes


def _built(plan: Plan, model: str | Configuration, degrees: Mapping[str, int]) -> BuiltModel:
    """The model on the inputs of the scaled-down plan. Raises OptionError where a factory's own
    model, which nobody can shrink, does not fit."""
    batch, sequence = _batch(plan, degrees), sequence_length(plan)
    if isinstance(model, Configuration):
        length = None if sequence is None else min(sequence, SEQUENCE)
        return build_model(model, batch=batch, sequence=length)
    num_bytes = prod(degrees.values()) * 2 * STATES * FLOAT64_BYTES * plan.model.num_parameters
    if num_bytes > _room_bytes():
        raise OptionError(
            f"a factory's model cannot be shrunk, and this machine has no room for "
            f"{plan.model.num_parameters:,} parameters in float64 in every process"
        )
    sizes = {"batch": batch, "seq": sequence}
    sizes = {name: size for name, size in sizes.items() if name in accepted_sizes(model)}
    return build_model(model, batch=sizes.get("batch"), sequence=sizes.get("seq"))


def _planned(
    plan: Plan, captured: Captured, degrees: Mapping[str, int]
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of the scaled-down model, and what of the real one it leaves out."""
    strategy = plan.strategy
    pins: dict[str, PinValue] = {**degrees, "zero": strategy.zero, "recompute": strategy.recompute}
    pins |= {"dp_shard": 2} if strategy.dp_shard and degrees["dp"] > 2 else {}
    if prod(degrees[name] for name in ("dp", "ep", "cp")) == 1:
        del pins["zero"]
    if degrees["tp"] > 1 and not strategy.batch_on_tp:
        pins["sp"] = int(strategy.sequence_parallel)
    if _microbatches(plan) > 1:
        pins["microbatches"] = _microbatches(plan)
    if plan.schedule and degrees["pp"] > 1:
        schedule = Schedule.parse(plan.schedule)
        pins["schedule"] = str(schedule.kind)
        pins[VIRTUAL_STAGES] = min(schedule.num_virtual_stages, 2)
    is_chunked = any(region.chunking.count > 1 for region in plan.regions)
    if plan.mode == "scheduled":
        pins[MICRO_CHUNKS] = 2 if is_chunked else 1
    has_matmuls = any(region.collective_matmul for region in plan.regions)
    pins |= {COLLECTIVE_MATMUL: int(has_matmuls), **_rewriting(plan)}
    left_out = []
    options = CompileOptions(pins=dict(plan.pins), mode=plan.mode)
    for pin in options.layout_pins:
        try:
            pinned_slots(captured.graph, (pin,))
        except OptionError:
            left_out.append(f"left out: pin {pin}, of parameters that the scaled-down model lacks")
        else:
            pins[f"{LAYOUT}{pin.pattern}"] = pin.value
    options = CompileOptions(
        pins=pins,
        optimizer=plan.optimizer,
        seed=plan.seed,
        precision=plan.precision,
        mode=plan.mode,
    )
    cluster = f"local-cpux{prod(degrees.values())}"
    try:
        return plan_captured(captured, plan.model.name, cluster, options), tuple(left_out)
    except OptionError:
        if not is_chunked and not has_matmuls:
            raise
    # Few layers are one region with the loss, which no micro-chunk alone can compute; and products
    # of small sizes may be sharded otherwise.
    left_out += ["left out: micro-chunks of layers"] * is_chunked
    left_out += ["left out: collective matmuls"] * has_matmuls
    options = replace(options, pins={**pins, MICRO_CHUNKS: 1, COLLECTIVE_MATMUL: 0})
    return plan_captured(captured, plan.model.name, cluster, options), tuple(left_out)


def _not_shown(
    plan: Plan, small: Plan, captured: Captured, captured_small: Captured
) -> Iterator[str]:
    """What the scaled-down model does not prove."""
    labels = dict.fromkeys(r.strategy.label for r in plan.regions)
    if plan.hierarchical_all_reduce_bytes:
        yield "left out: hierarchical all-reduces; the processes of this machine are one node"
    if plan.mesh.replicas > small.mesh.replicas == 1:
        yield f"left out: replicas of HSDP; {MAX_PROCESSES} processes are too few"
    if len(labels) > 1:
        yield f"left out: the mix of {len(labels)} strategies; all layers do {small.strategy.label}"
    lost = sorted(_targets(captured) - _targets(captured_small))
    if lost:
        yield f"left out: {', '.join(lost)}, ops that only the real size has"


def _targets(captured: Captured) -> set[str]:
    return {op.target for region in captured.graph.regions for op in region.graph.ops}


def _mesh_text(plan: Plan) -> str:
    return " x ".join(f"{axis.name}{axis.size}" for axis in plan.mesh.axes if axis.size > 1) or "1"


def _inputs_text(plan: Plan) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, s))}" for name, s, _ in plan.model.inputs)
