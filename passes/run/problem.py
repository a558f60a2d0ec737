"""The run level's problem and its answers, as plain data.

A *run* is `count` consecutive layers of one type. Every layer takes one strategy of its type, each
with a time, a memory and one boundary layout (the layout a layer reads and leaves). A chain of runs
is to be given strategies so that

    sum of time_s + sum of conversion_s[layout of a layer, layout of the next]    is least
    subject to  fixed_bytes + sum of memory_bytes <= budget_bytes.

Units: seconds and whole bytes. What time and memory mean (per microbatch, per step; with how many
microbatches in flight) is the caller's choice, as long as it is one for all strategies and for the
conversions: one conversion is paid once per place where the layout changes.
"""

from dataclasses import dataclass

import numpy as np

from meshfold.passes.run.hull import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class LayerType:
    """What one layer costs under each strategy.

    strategies: unique names; time_s, memory_bytes (whole, >= 0): one entry per strategy.
    layouts: index of each strategy's boundary layout; None when there is only one.
    ValueError when the arrays do not fit together.
    """

    name: str
    strategies: tuple[str, ...]
    time_s: FloatArray
    memory_bytes: IntArray
    layouts: IntArray | None = None

    def __post_init__(self) -> None:
        count = len(self.strategies)
        if not count or len(set(self.strategies)) < count:
            raise ValueError(f"layer type {self.name}: strategies need unique names, at least one")
        shapes = [np.shape(self.time_s), np.shape(self.memory_bytes)]
        shapes += [] if self.layouts is None else [np.shape(self.layouts)]
        if any(shape != (count,) for shape in shapes):
            raise ValueError(f"layer type {self.name}: {count} strategies, but arrays of {shapes}")
        if not np.all(np.isfinite(self.time_s)):
            raise ValueError(f"layer type {self.name}: time_s must be finite")
        if not np.issubdtype(np.asarray(self.memory_bytes).dtype, np.integer):
            raise ValueError(f"layer type {self.name}: memory_bytes must be whole bytes (int64)")
        if np.min(self.memory_bytes) < 0:
            raise ValueError(f"layer type {self.name}: memory_bytes must not be negative")


@dataclass(frozen=True)
class Run:
    """`count` >= 1 consecutive layers of one type."""

    layer_type: LayerType
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a run of {self.layer_type.name} needs at least one layer")


@dataclass(frozen=True, eq=False)
class RunProblem:
    """A chain of runs under one memory budget.

    budget_bytes: None is unlimited. fixed_bytes: already spent, counted in the budget.
    conversion_s: seconds from layout (row) to layout (column), finite, >= 0, need not be symmetric
    nor closed under composition; None makes every conversion free.
    """

    runs: tuple[Run, ...]
    budget_bytes: int | None = None
    fixed_bytes: int = 0
    conversion_s: FloatArray | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("a run problem needs at least one run")
        if self.conversion_s is None:
            return
        matrix = np.asarray(self.conversion_s)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"conversion_s must be square, found shape {matrix.shape}")
        if not np.all(np.isfinite(matrix)) or np.any(matrix < 0):
            raise ValueError("conversion_s must be finite and not negative")
        for run in self.runs:
            layouts = run.layer_type.layouts
            if layouts is not None and not 0 <= np.min(layouts) <= np.max(layouts) < len(matrix):
                raise ValueError(
                    f"layer type {run.layer_type.name}: layouts outside 0..{len(matrix) - 1}"
                )

    @property
    def least_bytes(self) -> int:
        """The least memory any plan needs, fixed bytes included."""
        layers = sum(run.count * int(np.min(run.layer_type.memory_bytes)) for run in self.runs)
        return self.fixed_bytes + layers


@dataclass(frozen=True)
class Block:
    """`count` consecutive layers of run number `run` with one strategy.

    strategy: index into the tables of the layer type, name: its name there.
    """

    run: int
    strategy: int
    name: str
    count: int


@dataclass(frozen=True)
class RunPlan:
    """The best plan of a run problem.

    blocks: in the order of the layers. time_s: with conversions, of which conversion_s.
    memory_bytes: with fixed bytes. dual_s: lower bound of the relaxation. gap_before: of the plan
    that rounds the relaxation, against dual_s. gap: of this plan against what was proven; 0 unless
    capped. nodes: partial plans looked at. capped: the search stopped at its node cap.
    """

    blocks: tuple[Block, ...]
    time_s: float
    conversion_s: float
    memory_bytes: int
    dual_s: float
    gap_before: float
    gap: float
    nodes: int
    capped: bool

    def counts(self, num_runs: int) -> tuple[dict[str, int], ...]:
        """Layers per strategy name for each run, in the order of the layers."""
        found: tuple[dict[str, int], ...] = tuple({} for _ in range(num_runs))
        for block in self.blocks:
            found[block.run][block.name] = found[block.run].get(block.name, 0) + block.count
        return found


@dataclass(frozen=True)
class NothingFaster:
    """No plan that is as fast as the incumbent was found; none is faster than lower_s."""

    lower_s: float


@dataclass(frozen=True)
class NothingFits:
    """No plan fits: even the least memory of all plans is above the budget."""

    least_bytes: int
    budget_bytes: int
