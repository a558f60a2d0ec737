"""The plan file as pydantic models: what plan.json may hold, and the published JSON Schema.

The file is for people first: model, strategy, mesh, time and memory near the top, units in names,
layouts as text ("S0,I": one type per mesh axis), one line of text per op. Nothing beyond the
declared fields is accepted. meshfold.plan_file.io turns these documents into meshfold.ir.plan and back.

Text lines of a region (several layouts are separated by a space, "-" is an empty one):

    slots    "self_attn.q_proj.weight  S0,I"                       name, stored layout
    ops      "aten.linear.default  b,o  S0,R I,S0 -> S0,S2"        op, rules, operands -> outputs
"""

import json
import sys
from typing import Annotated, Any, Literal

from pydantic import Field

from meshfold.documents import Bytes, Count, Document, Positive, Seconds
from meshfold.ir.options import Mode, Precision
from meshfold.ir.plan import PLAN_VERSION
from meshfold.ir.strategy import Offload, PartsOf, Recompute
from meshfold.plan_file.cluster_file import ClusterModel
from meshfold.simulation_document import SimulationDocument

LayoutText = Annotated[
    str,
    Field(
        pattern=r"^(-|([IRP]|[SE]\d+(/\d+)?(\+\d*)?)(,([IRP]|[SE]\d+(/\d+)?(\+\d*)?))*)$",
        description="One SPMD type per mesh axis: I, R, P, S<dim> or S<dim>/<blocks>; - for none",
    ),
]


class InputDocument(Document):
    name: str
    shape: tuple[Count, ...]
    dtype: str


class ModelDocument(Document):
    name: str
    fingerprint: str = Field(description="Hash over the folded graph; binds the plan to the model")
    batch_size: Positive
    num_parameters: Count
    num_ops: Count
    num_distinct_ops: Count
    inputs: tuple[InputDocument, ...]


class StrategyDocument(Document):
    label: str = Field(description="The strategy in words; derived from the fields below")
    dp: Positive
    tp: Positive
    zero: Literal[0, 1, 2, 3]
    sequence_parallel: bool
    recompute: Recompute = "none"
    offload: Offload = "none"
    batch_on_tp: bool = Field(
        default=False, description="tp shards the batch inside of what dp leaves"
    )
    pp: Positive = 1
    microbatches: Positive = 1
    cp: Positive = 1
    ep: Positive = 1


class AxisDocument(Document):
    name: str
    size: Positive
    link: str = Field(description="Slowest link that a group of this axis crosses")


class TimeDocument(Document):
    step_s: Seconds = Field(description="Sum of the five parts below")
    forward_s: Seconds = Field(description="Compute only")
    backward_s: Seconds = Field(description="Compute only")
    exposed_communication_s: Seconds
    optimizer_s: Seconds
    bubble_s: Seconds = Field(
        default=0.0, description="What the last stage to end waits for others"
    )
    communication_s: dict[str, Seconds] = Field(description="Per mesh axis, before overlap")


class MemoryDocument(Document):
    """Bytes per device at the moment of the peak."""

    peak_bytes: Bytes = Field(description="Sum of the components below")
    capacity_bytes: Bytes
    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    gathered_parameters_bytes: Bytes
    buckets_bytes: Bytes
    transient_bytes: Bytes
    reserve_bytes: Bytes


class CandidateDocument(Document):
    name: str
    strategy: StrategyDocument
    step_s: Seconds
    peak_bytes: Bytes
    fits: bool
    note: str


class MeshOutcomeDocument(Document):
    mesh: str
    lower_bound_s: Seconds = Field(description="No plan on this mesh is faster")
    step_s: Seconds | None = Field(
        description="Of the best plan found there; null: none, or ruled out"
    )
    reason: str


class SearchDocument(Document):
    num_leaves: Count = Field(description="Of the decision tree, before any cut")
    num_candidates: Count = Field(description="Programs priced exactly")
    num_infeasible: Count = Field(description="Of those, how many did not fit")
    cuts: dict[str, Count] = Field(description="Leaves cut, by rule")
    lower_bound_s: Seconds = Field(description="No plan of this tree that fits is faster")
    gap: Seconds | None = Field(
        description="Step time over the lower bound, less 1; null where nothing was proven"
    )
    gap_before: Seconds = Field(description="What rounding the relaxation would have cost")
    unlimited_s: Seconds = Field(description="Step time if memory were unlimited")
    capped: bool = Field(description="A search stopped at its limit; the bound holds all the same")
    meshes: tuple[MeshOutcomeDocument, ...]


class RunDocument(Document):
    region: str
    first: Count
    count: Positive


class StageFiguresDocument(Document):
    """One stage of a pipeline; seconds per microbatch but for sync_s and end_s."""

    forward_s: Seconds
    backward_s: Seconds
    sync_s: Seconds = Field(description="Once per step, after the last backward pass")
    end_s: Seconds = Field(description="From the start of the step to the end of its last work")
    in_flight: Count = Field(description="Microbatches held at the worst moment of its device")
    peak_bytes: Bytes = Field(description="Of one device at that moment")


class StageDocument(Document):
    runs: tuple[RunDocument, ...]
    figures: StageFiguresDocument | None = None


class ParameterDocument(Document):
    name: str
    shape: tuple[Count, ...]
    dtype: str
    stored: LayoutText = Field(description="Layout between steps")
    used: LayoutText = Field(description="Layout that the ops read")
    num_bytes: Bytes = Field(description="Stored bytes per rank")


class ConversionDocument(Document):
    """A change of layout that costs something."""

    value: str
    kind: Literal["activation", "parameter"]
    source: LayoutText
    target: LayoutText
    forward: tuple[str, ...] = Field(description="Collectives of the forward pass")
    backward: tuple[str, ...] = Field(description="Collectives of the backward pass")
    num_bytes: Bytes = Field(description="Local payload of one collective")
    forward_s: Seconds
    backward_s: Seconds


class AlternativeDocument(Document):
    name: str
    time_s: Seconds = Field(description="One instance, communication and optimizer included")
    held_bytes: Bytes = Field(description="States and activations of one instance")
    reason: str


class RegionDocument(Document):
    """Times and bytes are per instance and per rank."""

    name: str
    num_instances: Positive
    example_scope: str
    fingerprint: str
    forward_s: Seconds
    backward_s: Seconds
    communication_s: dict[str, Seconds]
    saved_bytes: Bytes = Field(description="Activations kept for the backward pass")
    parts: Positive = Field(
        default=1, description="In which it runs, one after the other, in mode scheduled"
    )
    parts_of: PartsOf = Field(default="samples", description="What is cut into parts")
    ring: tuple[Count, ...] = Field(
        default=(),
        description="Products that take rows as they come round, among those that can",
    )
    strategy: StrategyDocument
    choice: AlternativeDocument = Field(description="The strategy in words, with its own figures")
    alternatives: tuple[AlternativeDocument, ...] = Field(description="The best that lost, and why")
    fallback_ops: tuple[str, ...] = Field(description="Ops that run whole for lack of a rule")
    parameters: tuple[ParameterDocument, ...]
    conversions: tuple[ConversionDocument, ...]
    slots: tuple[str, ...] = Field(description="Per slot: name, layout in which its value arrives")
    ops: tuple[str, ...] = Field(description="Per op: target, rules, operands -> outputs")
    outputs: tuple[LayoutText, ...]


class PlanDocument(Document):
    """A meshfold plan: what the search chose, why, and what it predicts."""

    version: Literal[1] = Field(description="Of the format of this file")
    meshfold_version: str
    model: ModelDocument
    strategy: StrategyDocument
    mesh: tuple[AxisDocument, ...] = Field(description="Axes, slowest-varying rank digit first")
    time: TimeDocument
    memory: MemoryDocument
    notes: tuple[str, ...]
    baselines: tuple[CandidateDocument, ...]
    search: SearchDocument
    pins: dict[str, int | str] = Field(description="Choices that the user fixed")
    optimizer: str
    seed: int
    precision: Precision = Field(
        default="model",
        description="What ops compute in; bf16 and fp16 keep parameters in float32",
    )
    mode: Mode = Field(default="eager", description="How the program of a rank runs")
    schedule: str = Field(
        default="", description="Of the microbatches; empty for a step in one pass"
    )
    merge_bytes: Bytes = Field(
        default=0, description="Up to which reductions of gradients are merged; 0 for none"
    )
    merge_gather_bytes: Bytes = Field(
        default=0, description="Up to which gathers of parameters are merged; 0 for none"
    )
    hierarchy_bytes: Bytes = Field(
        default=0,
        description="Of pieces in which all-reduces of gradients run in phases, by node; 0: none",
    )
    stages: tuple[StageDocument, ...]
    regions: tuple[RegionDocument, ...]
    cluster: ClusterModel
    simulation: SimulationDocument | None = Field(
        default=None, description="Of a step in one pass that can run"
    )


def plan_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a plan file."""
    schema = PlanDocument.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"meshfold plan, version {PLAN_VERSION}",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def schema_text() -> str:
    """The published file compiler/plan.schema.json, byte for byte."""
    return json.dumps(plan_schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
