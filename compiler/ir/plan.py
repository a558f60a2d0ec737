"""The plan: what the search chose, why, and what it predicts. Frozen data; JSON is in plan_io.

Layouts here are the types of meshfold.ir.spmd; in the file they are text ("S0,I").
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.options import Mode, Precision
from meshfold.ir.spmd import Layout
from meshfold.ir.step_events import SimulatedStep, StepEvents
from meshfold.ir.strategy import Parts, RegionTyping, UniformStrategy

PLAN_VERSION = 1


@dataclass(frozen=True)
class ModelInfo:
    """Which model the plan is for. `fingerprint` is a hash over the folded graph."""

    name: str
    fingerprint: str
    num_parameters: int
    num_ops: int
    num_distinct_ops: int
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, global shape, dtype name) of every input."""
    batch_size: int


@dataclass(frozen=True)
class ParameterPlacement:
    """One parameter slot of a region. `stored` is where the state lives between steps, `used` what
    the ops read after the gather; `num_bytes` is the stored bytes per rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: Layout
    used: Layout
    num_bytes: int


@dataclass(frozen=True)
class ConversionRecord:
    """A conversion that costs something. `forward` and `backward` are collective names ("-": none);
    `num_bytes` is the local payload of one forward (else backward) collective."""

    value: str
    kind: str  # "activation" or "parameter"
    source: Layout
    target: Layout
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    num_bytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Alternative:
    """A strategy that a region did not take. time_s: of one instance, exposed communication and
    optimizer included; held_bytes: states and activations that one instance holds. `reason` says
    why it lost."""

    name: str
    time_s: float
    held_bytes: int
    reason: str


@dataclass(frozen=True)
class RegionPlan:
    """What one distinct region does. Times and bytes are per instance and per rank. choice: the
    strategy and its own figures, as Alternative has them; alternatives: the best that lost."""

    name: str
    fingerprint: str
    num_instances: int
    example_scope: str
    typing: RegionTyping
    parameters: tuple[ParameterPlacement, ...]
    conversions: tuple[ConversionRecord, ...]
    fallback_ops: tuple[str, ...]
    forward_s: float
    backward_s: float
    communication_s: Mapping[str, float]
    """Seconds of collectives per axis name, forward and backward, before overlap."""
    saved_bytes: int
    """Activations kept for the backward."""
    strategy: UniformStrategy = UniformStrategy()
    choice: Alternative = Alternative("", 0.0, 0, "")
    alternatives: tuple[Alternative, ...] = ()
    op_targets: tuple[str, ...] = ()
    """Names of typing.ops for people ("aten.linear.default"); may be left out."""
    slot_names: tuple[str, ...] = ()
    """Names of typing.slots for people; may be left out."""
    parts: Parts = Parts()
    ring: tuple[int, ...] = ()
    """Groups of products that take rows of other ranks as they come round, by number among those
    that can (passes.ring_graph)."""


@dataclass(frozen=True)
class RunPlan:
    """`count` consecutive instances of one region, the first being instance `first`."""

    region: str
    first: int
    count: int


@dataclass(frozen=True)
class StageFigures:
    """What one stage of a pipeline does. forward_s, backward_s: per microbatch, exposed
    communication included; sync_s: once per step, after the last backward. in_flight: microbatches
    whose activations are held at the worst moment of its device. Of the device, with all of its
    stages where there are several: end_s, from the start of the step to the end of its last work;
    peak_bytes."""

    forward_s: float
    backward_s: float
    sync_s: float
    end_s: float
    in_flight: int
    peak_bytes: int


@dataclass(frozen=True)
class StagePlan:
    """A stage's runs, in order; figures where the batch is run in microbatches."""

    runs: tuple[RunPlan, ...]
    figures: StageFigures | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device at the moment of the peak, by component; `capacity` is the budget."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered_parameters: int
    buckets: int
    transient: int
    reserve: int
    capacity: int

    @property
    def peak(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.gathered_parameters
            + self.buckets
            + self.transient
            + self.reserve
        )

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one step. step_s = forward_s + backward_s + exposed_communication_s +
    optimizer_s + bubble_s, where forward_s and backward_s are compute only. In a pipeline all are
    of the stage that ends last, and bubble_s is what it waits for others."""

    forward_s: float
    backward_s: float
    exposed_communication_s: float
    optimizer_s: float
    communication_s: Mapping[str, float]
    bubble_s: float = 0.0

    @property
    def step_s(self) -> float:
        work_s = self.forward_s + self.backward_s + self.exposed_communication_s
        return work_s + self.optimizer_s + self.bubble_s


@dataclass(frozen=True)
class Candidate:
    """A strategy that was priced: a named baseline, or the best of the rest."""

    name: str
    strategy: UniformStrategy
    step_s: float
    peak_bytes: int
    fits: bool
    note: str = ""


@dataclass(frozen=True)
class MeshOutcome:
    """What the search found on one mesh: the fastest plan that fits (None: nothing fits, or the
    bound alone ruled the mesh out), the bound, and why the mesh was not taken."""

    mesh: str
    lower_bound_s: float
    step_s: float | None
    reason: str


@dataclass(frozen=True)
class SearchStats:
    """What the search looked at and what it proves.

    num_leaves: of the decision tree, cuts: how many of them each rule cut. num_candidates: programs
    whose exact step time and peak memory were taken, num_infeasible of them did not fit.
    lower_bound_s: no plan of this tree that fits is faster. gap_before: what rounding the
    relaxation would have cost, relative. unlimited_s: step time of the best plan if memory were
    unlimited. capped: a search stopped at its limit; the bound holds all the same.
    """

    num_leaves: int
    num_candidates: int
    num_infeasible: int
    cuts: Mapping[str, int] = field(default_factory=dict)
    lower_bound_s: float = 0.0
    gap_before: float = 0.0
    unlimited_s: float = 0.0
    capped: bool = False
    meshes: tuple[MeshOutcome, ...] = ()


@dataclass(frozen=True)
class Plan:
    model: ModelInfo
    cluster: ClusterSpec
    mesh: Mesh
    strategy: UniformStrategy
    pins: Mapping[str, int | str]
    optimizer: str
    seed: int
    regions: tuple[RegionPlan, ...]
    stages: tuple[StagePlan, ...]
    memory: MemoryEstimate
    time: TimeEstimate
    baselines: tuple[Candidate, ...]
    search: SearchStats
    meshfold_version: str
    version: int = PLAN_VERSION
    notes: tuple[str, ...] = ()
    precision: Precision = "model"
    mode: Mode = "eager"
    """How the program of a rank runs."""
    schedule: str = ""
    """In which order stages run their microbatches; empty for a step in one pass."""
    merge_bytes: int = 0
    """Up to which reductions of gradients are merged (meshfold.ir.bucketing); 0 for none."""
    merge_gather_bytes: int = 0
    """Up to which gathers of parameters are."""
    hierarchy_bytes: int = 0
    """Of the pieces in which all-reduces of gradients run in phases (meshfold.ir.node_groups); 0 where
    none do."""
    simulated: SimulatedStep | None = None
    """The step as simulated from its events; time has what the search added up."""
    events: StepEvents | None = None
    """Of a step in one pass that can run."""

    @property
    def world_size(self) -> int:
        return self.mesh.num_ranks

    @property
    def gap(self) -> float:
        """(step time - proven lower bound) / lower bound; infinite where nothing was proven."""
        bound_s = self.search.lower_bound_s
        return max(0.0, self.time.step_s / bound_s - 1) if bound_s > 0 else math.inf
