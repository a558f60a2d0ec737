"""How a plan file holds the records of meshfold.ir.plan, where it is not their fields one by one:
layouts, ops, slots and events are lines of text, runs of equal numbers are short, and figures that
follow from others stand in front of them, for people.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NewType, NotRequired, TypedDict

from pydantic_core.core_schema import (
    dict_schema,
    float_schema,
    int_schema,
    no_info_after_validator_function,
    str_schema,
    tuple_schema,
)

from meshfold.ir.cluster import ClusterSpec, DeviceSpec
from meshfold.ir.limits import MOST_INSTANCES, MOST_NUMBER, Count, Positive, Seconds
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.mesh import Mesh
from meshfold.ir.plan import Plan, RegionPlan, SearchStats, TimeEstimate
from meshfold.ir.spmd import Layout
from meshfold.ir.step_events import CollectiveEvent, Event, SimulatedStep, StepEvents
from meshfold.ir.strategy import (
    ChunkDim,
    Chunking,
    KeptResults,
    OpTyping,
    RegionTyping,
    UniformStrategy,
)
from meshfold.ir.throughput import Throughput
from meshfold.plan_file.event_text import (
    from_run_lengths,
    read_collective,
    read_event,
    run_lengths,
    write_collective,
    write_event,
)
from meshfold.plan_file.records import Form, Records, Special, check_derived, fault, text
from meshfold.plan_file.text import (
    names_or_none,
    read_layout,
    read_op,
    read_slot,
    write_layout,
    write_op,
    write_slot,
)

OpLine = NewType("OpLine", tuple[str, OpTyping])
SlotLine = NewType("SlotLine", tuple[str, Layout])


class _RegionKeys(TypedDict):
    slots: tuple[SlotLine, ...]
    """Per slot: name, layout in which its value arrives."""
    ops: tuple[OpLine, ...]
    """Per op: target, rules, operands -> outputs."""
    outputs: tuple[Layout, ...]
    """Layouts in which outputs leave."""
    micro_chunks: NotRequired[Positive]
    """That it runs its batch in, in mode scheduled."""
    chunk_dim: NotRequired[ChunkDim]
    """What is divided into micro-chunks."""
    kept_ops: NotRequired[tuple[Count, ...]]
    """Under selective recomputation, numbers of the ops whose results are not computed twice."""
    kept_conversions: NotRequired[tuple[tuple[Count, Layout], ...]]
    """The same for steps of conversions: number of a value, layout that the step gave."""


class _SearchKeys(TypedDict):
    gap: Seconds | None
    """Step time over the lower bound, less 1; null where nothing was proven."""


class _PlanKeys(TypedDict):
    throughput: NotRequired[Throughput | None]
    """What a step amounts to, at the step time that the plan states; null where it is not known."""


class _ClusterKeys(TypedDict):
    version: NotRequired[int]
    """Of the format of cluster files."""


CLUSTER_VERSION = 1


def _region_keys(region: RegionPlan) -> dict[str, Any]:
    typing = region.typing
    targets = region.op_targets or ("",) * len(typing.ops)
    names = region.slot_names or ("",) * len(typing.slots)
    return {
        "slots": tuple(zip(names, typing.slots, strict=True)),
        "ops": tuple(zip(targets, typing.ops, strict=True)),
        "outputs": typing.outputs,
        "micro_chunks": region.chunking.count,
        "chunk_dim": region.chunking.dim,
        "kept_ops": typing.kept.ops,
        "kept_conversions": typing.kept.conversions,
    }


def _region_fields(found: dict[str, Any]) -> dict[str, Any]:
    slots, ops, strategy = found["slots"], found["ops"], found["strategy"]
    return {
        "typing": RegionTyping(
            slots=tuple(layout for _, layout in slots),
            ops=tuple(typing for _, typing in ops),
            outputs=found["outputs"],
            recompute=strategy.recompute,
            reshard_after_forward=strategy.reshard_after_forward,
            accumulate_unsharded=strategy.accumulate_unsharded,
            kept=KeptResults(found.get("kept_ops", ()), found.get("kept_conversions", ())),
        ),
        "op_targets": names_or_none(target for target, _ in ops),
        "slot_names": names_or_none(name for name, _ in slots),
        "chunking": Chunking(found.get("micro_chunks", 1), found.get("chunk_dim", "samples")),
    }


def _runs(read: Any, write: Any, least: int | None) -> Special:
    """A sequence of numbers as [number, how often in a row]."""
    number = int_schema(ge=-MOST_NUMBER if least is None else least, le=MOST_NUMBER)
    run = tuple_schema([number, int_schema(ge=1, le=MOST_INSTANCES)], strict=False)
    runs = tuple_schema([run], variadic_item_index=0, strict=False)
    return Special(no_info_after_validator_function(read, runs), write)


def _changes(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return run_lengths([b - a for a, b in pairwise((0, *numbers))])


def _from_changes(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(accumulate(from_run_lengths(runs)))


_TYPE = r"([IRP]|[SE][0-9]+(/[0-9]+)?(\+[0-9]*)?(\*[0-9]+)?)"
_LAYOUT = text(
    read_layout,
    write_layout,
    pattern=rf"^(-|{_TYPE}(,{_TYPE})*)$",
    description="One SPMD type per mesh axis: I, R, P, S<dim> or S<dim>/<blocks>, with *<copies> "
    "under HSDP; - for none",
    context=True,
)
_PEAK_FLOPS = Special(
    dict_schema(str_schema(), float_schema()), lambda of: dict(sorted(of.items()))
)


RECORDS = Records(
    specials={
        Layout: _LAYOUT,
        OpLine: text(read_op, lambda of: write_op(*of), context=True),
        SlotLine: text(read_slot, lambda of: write_slot(*of), context=True),
        Event: text(read_event, write_event),
        CollectiveEvent: text(
            read_collective, write_collective, description="Kind, axes, link, bytes, seconds"
        ),
    },
    forms={
        UniformStrategy: Form(derived=("label",)),
        TimeEstimate: Form(derived=("step_s",)),
        MemoryEstimate: Form(derived=("peak",), suffix="_bytes"),
        SimulatedStep: Form(derived=("step_s", "hidden_share")),
        SearchStats: Form(shown=_SearchKeys, show=lambda _: {"gap": None}),
        Mesh: Form(only="axes"),
        Plan: Form(shown=_PlanKeys, show=lambda plan: {"throughput": plan.throughput}),
        RegionPlan: Form(
            shown=_RegionKeys,
            show=_region_keys,
            hidden=("typing", "op_targets", "slot_names", "chunking"),
            hide=_region_fields,
        ),
        StepEvents: Form(
            special={
                "instances": _runs(from_run_lengths, run_lengths, 0),
                "resident_bytes": _runs(_from_changes, _changes, None),
            }
        ),
        DeviceSpec: Form(special={"peak_flops_per_s": _PEAK_FLOPS}),
        ClusterSpec: Form(shown=_ClusterKeys, show=lambda _: {"version": CLUSTER_VERSION}),
    },
)
"""Of plan files and cluster files."""

_PLAN = RECORDS.validator(Plan)


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as json.dumps takes it. Raises ValidationError for a plan that no file can hold."""
    document = RECORDS.write(plan)
    document["search"]["gap"] = plan.gap if math.isfinite(plan.gap) else None
    # In front of what people scroll past.
    after = document.pop("throughput")
    found: dict[str, Any] = {}
    for key, value in document.items():
        found[key] = value
        if key == "time":
            found["throughput"] = after
    plan_from_document(found)
    return found


def plan_from_document(document: Any) -> Plan:
    """The plan that json.loads found in a file. Raises ValidationError with the path of each
    fault: types, limits, keys, texts, and figures that contradict each other."""
    mesh = document.get("mesh") if isinstance(document, dict) else None
    num_axes = len(mesh) if isinstance(mesh, list) else 0
    plan: Plan = _PLAN.validate_python(document, context=num_axes)
    names = {region.name for region in plan.regions}
    for s, stage in enumerate(plan.stages):
        for r, run in enumerate(stage.runs):
            if run.region not in names:
                what = f"no region {run.region!r} in this plan; it has {', '.join(sorted(names))}"
                raise fault(("stages", s, "runs", r, "region"), what, run.region)
    if "throughput" in document:
        _check_throughput(document["throughput"], plan)
    gap = document["search"]["gap"]
    if gap is not None:
        check_derived(("search", "gap"), gap, plan.gap)
    return plan


def _check_throughput(found: Any, plan: Plan) -> None:
    right = RECORDS.write(plan.throughput) if plan.throughput else None
    if found is None or right is None:
        check_derived(("throughput",), found, right)
        return
    for key, figure in right.items():
        check_derived(("throughput", key), found[key], figure)
