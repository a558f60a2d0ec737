"""The stage level's answer: which layers each stage runs, how, and what that costs.

A plan that loses or repeats a layer, or that overruns a budget, cannot be built.
"""

from dataclasses import dataclass

from meshfold.cost_models.pipeline.schedules import Schedule


@dataclass(frozen=True)
class LayerBlock:
    """`count` consecutive layers of run number `run` of the chain with one strategy."""

    run: int
    layer: str
    strategy: str
    count: int


@dataclass(frozen=True)
class Stage:
    """The layers [first, end) of the chain. Seconds per microbatch but for sync_s (per step).

    memory_bytes: what they need at in_flight microbatches.
    """

    first: int
    end: int
    blocks: tuple[LayerBlock, ...]
    forward_s: float
    backward_s: float
    weight_s: float
    sync_s: float
    in_flight: int
    memory_bytes: int

    def __post_init__(self) -> None:
        placed = sum(block.count for block in self.blocks)
        if placed != self.end - self.first or self.end <= self.first:
            raise ValueError(
                f"stage of layers {self.first} to {self.end} has strategies for {placed} layers"
            )

    @property
    def total_s(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class PipelinePlan:
    """Stages in order, the schedule that runs them and the proof.

    step_s: simulated makespan with transfers, each device's sync_s after its last pass.
    lower_bound_s: no plan under any of the schedules given is faster. first_step_s: the step of
    the first plan, before closing. budgets_bytes: per device. capped:
    the search stopped at its limit of stages solved exactly, so the gap may be larger than it had
    to be. Raises ValueError unless every layer
    0..num_layers-1 is in exactly one stage and every device within its budget.
    """

    num_layers: int
    schedule: Schedule
    stages: tuple[Stage, ...]
    budgets_bytes: tuple[int, ...]
    step_s: float
    first_step_s: float
    lower_bound_s: float
    capped: bool

    def __post_init__(self) -> None:
        boundaries = [stage.first for stage in self.stages] + [self.num_layers]
        ends = [0, *(stage.end for stage in self.stages)]
        if boundaries != ends or len(self.stages) != self.schedule.num_stages:
            raise ValueError(
                f"stages {[(s.first, s.end) for s in self.stages]} do not hold each of the layers "
                f"0 to {self.num_layers - 1} exactly once in {self.schedule.num_stages} stages"
            )
        over = [n for n, b in zip(self.memory_bytes, self.budgets_bytes, strict=True) if n > b]
        if over:
            raise ValueError(f"{len(over)} devices are over their memory: {self.memory_bytes}")

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes needed on each device."""
        return tuple(
            sum(self.stages[s].memory_bytes for s in self.schedule.stages_of(i))
            for i in range(len(self.budgets_bytes))
        )

    @property
    def gap(self) -> float:
        """How much slower than the best plan this one can be at most, relative to it."""
        return self.step_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def gap_before(self) -> float:
        """The gap of the first plan."""
        return self.first_step_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0
