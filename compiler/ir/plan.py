"""The plan: what the search chose, why, and what it predicts. Frozen data; meshfold.plan_file reads
and writes it as JSON.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.limits import Bytes, Count, Flops, Instances, Positive, Seconds
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CHAINED_CHUNKS, Mode, ModeChoice, Precision
from meshfold.ir.returns import SUM, Returns
from meshfold.ir.spmd import Layout
from meshfold.ir.step_events import SimulatedStep, StepEvents
from meshfold.ir.strategy import Chunking, RegionTyping, UniformStrategy
from meshfold.ir.throughput import Throughput

PLAN_VERSION: Literal[2] = 2

TOKEN_DTYPES = ("int64", "int32")

ConversionKind = Literal["activation", "parameter"]
"""What is converted."""


class ModelInput(NamedTuple):
    """One input of a model, for a global batch."""

    name: str
    shape: tuple[Count, ...]
    dtype: str


def model_inputs(graph: FoldedGraph) -> tuple[ModelInput, ...]:
    """The inputs of a captured model."""
    return tuple(ModelInput(i.name, i.shape, i.dtype) for i in graph.inputs)


@dataclass(frozen=True)
class ModelInfo:
    """The model that the plan is for."""

    name: str
    fingerprint: str
    """Hash over the folded graph; binds the plan to the model."""
    num_parameters: Count
    num_ops: Count
    num_distinct_ops: Count
    inputs: tuple[ModelInput, ...]
    batch_size: Positive
    loss: str = ""
    """Path of the loss in what the model returns; of several joined by " + " the sum."""
    outputs: tuple[str, ...] = ()
    """Paths of what a step returns in the model's structure; none where it returns the loss."""
    sharded_outputs: bool = False
    """Whether these stay on the ranks that compute them."""
    flops: Flops = 0.0
    """Of one step on the global batch, forward and backward, each op once
    (meshfold.passes.price.model_flops); 0 in a plan that does not say."""
    compute_dtype: str = ""
    """In which most of these are."""

    @property
    def tokens(self) -> int:
        """Of the global batch: the elements of the first input of whole numbers by [sample,
        position]; 0 for a model without one."""
        for _, shape, dtype in self.inputs:
            if len(shape) == 2 and shape[0] == self.batch_size and dtype in TOKEN_DTYPES:
                return math.prod(shape)
        return 0

    @property
    def returns(self) -> Returns:
        """What of the model's return value is computed."""
        return Returns(
            tuple(self.loss.split(SUM)) if self.loss else (),
            self.outputs,
            sharded=self.sharded_outputs,
        )


@dataclass(frozen=True)
class ParameterPlacement:
    """One parameter slot of a region."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    """That it is stored in; ops may read it in fewer bits (precision)."""
    stored: Layout
    """Layout between steps."""
    used: Layout
    """Layout that the ops read, after the gather."""
    num_bytes: Bytes
    """Stored bytes per rank."""


@dataclass(frozen=True)
class ConversionRecord:
    """A conversion between layouts that costs something."""

    value: str
    kind: ConversionKind
    source: Layout
    target: Layout
    forward: tuple[str, ...]
    """Names of the collectives of the forward pass; "-" for none."""
    backward: tuple[str, ...]
    """Names of the collectives of the backward pass; "-" for none."""
    num_bytes: Bytes
    """Local payload of one forward (else backward) collective."""
    forward_s: Seconds
    backward_s: Seconds


@dataclass(frozen=True)
class Alternative:
    """A strategy of a region, as the search priced it."""

    name: str
    time_s: Seconds
    """Of one instance, exposed communication and optimizer included."""
    resident_bytes: Bytes
    """States and saved activations of one instance."""
    reason: str
    """Why it lost."""


@dataclass(frozen=True)
class RegionPlan:
    """What one distinct region does. Times and bytes are per instance and per rank."""

    name: str
    fingerprint: str
    num_instances: Instances
    example_scope: str
    typing: RegionTyping
    parameters: tuple[ParameterPlacement, ...]
    conversions: tuple[ConversionRecord, ...]
    fallback_ops: tuple[str, ...]
    """Ops without a rule, which every rank runs unsharded."""
    forward_s: Seconds
    backward_s: Seconds
    communication_s: Mapping[str, Seconds]
    """Seconds of collectives per axis name, forward and backward, before overlap."""
    saved_bytes: Bytes
    """Activations saved for the backward."""
    strategy: UniformStrategy = UniformStrategy()
    choice: Alternative = Alternative("", 0.0, 0, "")
    """The strategy in words, with its own costs."""
    alternatives: tuple[Alternative, ...] = ()
    """The best that lost."""
    op_targets: tuple[str, ...] = ()
    """Names of typing.ops for people ("aten.linear.default"); may be left out."""
    slot_names: tuple[str, ...] = ()
    """Names of typing.slots for people; may be left out."""
    chunking: Chunking = Chunking()
    """Micro-chunks that it runs its batch in."""
    collective_matmul: tuple[Count, ...] = ()
    """Groups of matrix products that overlap with their collective, by number among those that can
    (passes.split.collective_matmul)."""


@dataclass(frozen=True)
class RegionRun:
    """`count` consecutive instances of one region, the first being instance `first`."""

    region: str
    first: Count
    count: Instances


@dataclass(frozen=True)
class StageCosts:
    """The costs of one stage of a pipeline."""

    forward_s: Seconds
    """Per microbatch, exposed communication included."""
    backward_s: Seconds
    """Per microbatch, exposed communication included."""
    sync_s: Seconds
    """Once per step, after the last backward."""
    end_s: Seconds
    """Of the device: from the start of the step to the end of its last work."""
    in_flight: Count
    """Microbatches whose activations the device keeps at its worst moment."""
    peak_bytes: Bytes
    """Of the device, with all of its stages where there are several."""
    memory: MemoryEstimate | None = None
    """The same by component; None in older plans, which have 0 of what follows."""
    microbatch_bytes: Bytes = 0
    """Activations that the stage keeps of one microbatch."""
    weight_s: Seconds = 0.0
    """Of backward_s, gradients of weights, where the schedule runs them apart."""
    hop_s: Seconds = 0.0
    """A transfer from the stage before, and one back to it."""

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory.peak != self.peak_bytes:
            raise ValueError(
                f"components of memory add up to {self.memory.peak} bytes, but peak_bytes is "
                f"{self.peak_bytes}; plan again"
            )


@dataclass(frozen=True)
class StagePlan:
    """A stage's regions, in order."""

    runs: tuple[RegionRun, ...]
    costs: StageCosts | None = None
    """None for a step without microbatches."""


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one step, by component. In a pipeline all are of the stage that ends last."""

    forward_s: Seconds
    """Compute only."""
    backward_s: Seconds
    """Compute only."""
    exposed_communication_s: Seconds
    optimizer_s: Seconds
    communication_s: Mapping[str, Seconds]
    """Per mesh axis, before overlap."""
    bubble_s: Seconds = 0.0
    """What the last stage to end waits for others."""

    @property
    def step_s(self) -> Seconds:
        work_s = self.forward_s + self.backward_s + self.exposed_communication_s
        return work_s + self.optimizer_s + self.bubble_s


@dataclass(frozen=True)
class PricedStrategy:
    """A strategy that was priced: a named baseline, or the best of the rest."""

    name: str
    strategy: UniformStrategy
    step_s: Seconds
    peak_bytes: Bytes
    fits: bool
    note: str = ""


@dataclass(frozen=True)
class MeshOutcome:
    """What the search found on one mesh."""

    mesh: str
    lower_bound_s: Seconds
    """No plan on this mesh is faster."""
    step_s: Seconds | None
    """Of the fastest plan that fits; None where nothing fits, or the bound ruled the mesh out."""
    reason: str
    """Why the mesh was not taken."""


@dataclass(frozen=True)
class SearchStats:
    """What the search looked at and what it proves."""

    num_leaves: Count
    """Leaves of the decision tree, before pruning."""
    num_priced: Count
    """Programs whose exact step time and peak memory were computed."""
    num_infeasible: Count
    """How many of these did not fit."""
    pruned: Mapping[str, Count] = field(default_factory=dict)
    """Strategy candidates that each pruning rule removed."""
    lower_bound_s: Seconds = 0.0
    """No plan of this tree that fits is faster."""
    least_s: Seconds = 0.0
    """The least sum of the plans that were found and that the bound covers; simulation may have
    taken another one. 0: not known."""
    gap_before: Seconds = 0.0
    """What rounding the relaxation would have cost, relative to the step time."""
    unlimited_s: Seconds = 0.0
    """Step time of the best plan if memory were unlimited, of those in one pass; 0: not known."""
    capped: bool = False
    """Whether a search stopped at its limit; the bound holds all the same."""
    meshes: tuple[MeshOutcome, ...] = ()
    left_out: Mapping[str, Count] = field(default_factory=dict)
    """What the bound does not cover, by restriction: strategy candidates, or schedules."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the search chose, why, and what it predicts. In the order of the plan file: for people
    first."""

    version: Literal[2] = PLAN_VERSION
    """Of the format of the plan file."""
    meshfold_version: str
    model: ModelInfo
    strategy: UniformStrategy
    mesh: Mesh
    """Axes, slowest-varying rank digit first."""
    time: TimeEstimate
    memory: MemoryEstimate
    notes: tuple[str, ...] = ()
    baselines: tuple[PricedStrategy, ...]
    search: SearchStats
    pins: Mapping[str, int | str]
    """Choices that the user fixed."""
    optimizer: str
    seed: int
    precision: Precision = "model"
    """What ops compute in; bf16 and fp16 keep parameters in float32."""
    mode: Mode = "eager"
    """How the program of a rank runs."""
    asked_mode: ModeChoice = "auto"
    """What was asked for: one mode, or the faster."""
    schedule: str = ""
    """The order in which stages run their microbatches; empty for a step without microbatches."""
    reduce_bucket_bytes: Bytes = 0
    """The largest bucket in which reductions of gradients are coalesced; 0 for none."""
    allgather_bucket_bytes: Bytes = 0
    """The largest bucket in which gathers of parameters are coalesced; 0 for none."""
    hierarchical_all_reduce_bytes: Bytes = 0
    """Size of the pieces in which all-reduces of gradients run hierarchically, by node
    (meshfold.ir.node_groups); 0 where none do."""
    chunked_loss: bool = False
    """Whether losses over classes make their logits themselves, in chunks
    (meshfold.passes.split.chunked_losses)."""
    slices: Count = 1
    """Least slices of the parameter of the largest operator; others have as many as make theirs no
    larger (meshfold.passes.split.operator_slices). 1: none is in slices."""
    pieces: tuple[Count, ...] = ()
    """Ops of each layer, in order, where regions were cut in pieces for stages
    (meshfold.passes.split.pieces); empty where none were."""
    stages: tuple[StagePlan, ...]
    regions: tuple[RegionPlan, ...]
    cluster: ClusterSpec
    simulated: SimulatedStep | None = None
    """The step as simulated from its events, or from those of its microbatches; `time` is what the
    search added up."""
    events: StepEvents | None = None
    """Of a step without microbatches that can run."""

    @property
    def chained_chunks(self) -> bool:
        """Whether micro-chunks may cross boundaries of layers (meshfold.codegen.chained_chunks):
        not where parameters are on the device only while their layer runs."""
        by_layer = any(region.strategy.offload == "parameters" for region in self.regions)
        return bool(self.pins.get(CHAINED_CHUNKS, 1)) and not by_layer

    @property
    def world_size(self) -> int:
        return self.mesh.num_ranks

    @property
    def step_s(self) -> Seconds:
        """The step time that the plan states: as simulated where it is, else as added up."""
        return self.time.step_s if self.simulated is None else self.simulated.step_s

    @property
    def throughput(self) -> Throughput | None:
        """What a step of that time amounts to; None where the time or the flops are not known."""
        if self.step_s <= 0 or self.model.flops <= 0:
            return None
        return Throughput.of(
            self.step_s,
            self.cluster,
            flops=self.model.flops,
            dtype=self.model.compute_dtype,
            samples=self.model.batch_size,
            tokens=self.model.tokens,
        )

    @property
    def gap(self) -> float:
        """(step time - proven lower bound) / lower bound; infinite where nothing was proven."""
        bound_s = self.search.lower_bound_s
        return max(0.0, self.time.step_s / bound_s - 1) if bound_s > 0 else math.inf

    @property
    def unproven_gap(self) -> float:
        """That part in which a plan might add up to less than all that were found; the rest is what
        this one adds up to beyond the least sum, which simulation passed over."""
        bound_s = self.search.lower_bound_s
        return max(0.0, self._least_s / bound_s - 1) if bound_s > 0 else math.inf

    @property
    def memory_costs(self) -> float:
        """What the memory limit costs: the least sum that fits over that without a limit, less 1;
        0 where that is not known."""
        unlimited_s = self.search.unlimited_s
        return max(0.0, self._least_s / unlimited_s - 1) if unlimited_s else 0.0

    @property
    def _least_s(self) -> float:
        return min(self.search.least_s or self.time.step_s, self.time.step_s)
