"""The plan: what the search chose, why, and what it predicts. Frozen data; JSON is in plan_io.

Layouts here are the types of meshfold.spmd; in the file they are text ("S0,I").
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshfold.cluster import ClusterSpec
from meshfold.mesh import Mesh
from meshfold.spmd import Layout
from meshfold.strategy import RegionTyping, UniformStrategy

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
class RegionPlan:
    """What one distinct region does. Times and bytes are per instance and per rank."""

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
    op_targets: tuple[str, ...] = ()
    """Names of typing.ops for people ("aten.linear.default"); may be left out."""
    slot_names: tuple[str, ...] = ()
    """Names of typing.slots for people; may be left out."""


@dataclass(frozen=True)
class RunPlan:
    """`count` consecutive instances of one region, the first being instance `first`."""

    region: str
    first: int
    count: int


@dataclass(frozen=True)
class StagePlan:
    runs: tuple[RunPlan, ...]


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
    optimizer_s, where forward_s and backward_s are compute only."""

    forward_s: float
    backward_s: float
    exposed_communication_s: float
    optimizer_s: float
    communication_s: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.exposed_communication_s + self.optimizer_s


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
class SearchStats:
    """num_candidates were priced, num_infeasible of them did not fit; cuts: rule name -> count."""

    num_candidates: int
    num_infeasible: int
    cuts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    model: ModelInfo
    cluster: ClusterSpec
    mesh: Mesh
    strategy: UniformStrategy
    pins: Mapping[str, int]
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

    @property
    def world_size(self) -> int:
        return self.mesh.num_ranks
