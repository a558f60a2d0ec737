"""Bounds on the time of all stages by (microbatches in flight, budget), raised by exact stages.

Shared by all schedules of one search: a stage is the same under each that keeps as many
microbatches in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshfold.passes.run.hull import FloatArray
from meshfold.passes.stages.bounds import Arcs, Indices
from meshfold.passes.stages.problem import Moments, StageProblem
from meshfold.passes.stages.relaxation import MAX_THRESHOLDS, relaxed_s
from meshfold.passes.stages.solved import SolvedStage, StageSolver

Kind = tuple[Moments, int]
"""(microbatches in flight, budget in bytes)."""


@dataclass(frozen=True, eq=False)
class Table:
    """Seconds per microbatch by (first layer, number of layers), from below: without sync_s, and
    with the stage's share of it, which is what stages solved exactly minimise. One array where no
    layer has any."""

    total_s: FloatArray
    objective_s: FloatArray


COARSE_THRESHOLDS = 2
"""Groups of transients that coarse tables tell apart."""


NEIGHBOURS = 4
"""Devices that share a table where the backward is split. Chosen: alone each takes most of the time
of a search."""


class StageTables:
    """Tables of stages of up to `width` layers, computed on demand.

    is_coarse: lower, for a tenth of the time: without sync_s, and devices with like numbers of
    microbatches in flight share the table of the least of them.
    """

    def __init__(
        self, problem: StageProblem, solver: StageSolver, *, is_coarse: bool = False
    ) -> None:
        self.problem, self.solver, self.is_coarse = problem, solver, is_coarse
        has_sync = any(run.layer.sync_s.any() for run in problem.runs)
        self.has_sync = has_sync and not is_coarse
        even = problem.num_layers / problem.num_devices
        self.width = min(problem.num_layers, int(1.5 * even) + 2)
        self._tables: dict[Kind, Table] = {}
        self._relaxed: dict[Kind, tuple[FloatArray, FloatArray]] = {}
        self._alike: dict[Moments, Moments] = {}
        self._exact: dict[tuple[Kind, int, int], float] = {}

    def table(self, kind: Kind) -> Table:
        """The table of stages with kind[0] microbatches in flight under kind[1] bytes."""
        if self.is_coarse:
            lower = (tuple(map(_rounded_down, in_flight)) for in_flight in kind[0])
            kind = tuple(dict.fromkeys(lower)), kind[1]
        if kind not in self._tables:
            plain, full = self._relaxed_s(kind)
            # What exact stages show is of this kind alone.
            own = full.copy()
            self._tables[kind] = Table(own if plain is full else plain, own)
            for (of_kind, first, end), seconds in self._exact.items():
                if of_kind == kind:
                    self._raise(kind, first, end, seconds)
        return self._tables[kind]

    def share(self, of_devices: Sequence[Moments]) -> None:
        """Neighbours of these devices share tables of what all of them keep at least, where the
        backward is split: none keeps as many as another."""
        if all(len(in_flight) == 1 for moments in of_devices for in_flight in moments):
            return
        for at in range(0, len(of_devices), NEIGHBOURS):
            group = of_devices[at : at + NEIGHBOURS]
            least = tuple(self.problem.fullest(moments) for moments in group)
            for moments in group:
                self._alike.setdefault(moments, least)

    def _relaxed_s(self, kind: Kind) -> tuple[FloatArray, FloatArray]:
        """Seconds without sync_s, and with it; one array where they are the same."""
        moments = self._alike.get(kind[0]) or (self.problem.fullest(kind[0]),)
        key = moments, kind[1]
        if key not in self._relaxed:
            costs = [run.layer for run in self.problem.runs]
            objectives = [self.solver.objective_s(layer) for layer in costs]
            totals = [layer.total_s for layer in costs]
            thresholds = COARSE_THRESHOLDS if self.is_coarse else MAX_THRESHOLDS
            of = *key, self.width, thresholds
            plain = full = relaxed_s(self.problem, totals if self.is_coarse else objectives, *of)
            if self.has_sync:
                plain = relaxed_s(self.problem, totals, *of)
            self._relaxed[key] = plain, full
        return self._relaxed[key]

    def widen(self) -> None:
        """Twice as many layers per stage, up to all."""
        self.width = min(self.problem.num_layers, 2 * self.width)
        self._tables.clear()
        self._relaxed.clear()

    def beyond_s(self, kind: Kind, first: int | None) -> float:
        """No stage of more than `width` layers is faster, all of them or those from `first` on."""
        last = self.problem.num_layers - self.width
        column = self.table(kind).total_s[:last, self.width]
        if first is not None:
            column = column[first : first + 1]
        return float(column.min(initial=np.inf))

    def solve(self, kind: Kind, first: int, end: int) -> SolvedStage | None:
        """The exact stage; its time goes into the table."""
        solved = self.solver.solve(first, end, *kind)
        seconds = self.solver.proven_s(first, end, *kind)
        if (kind, first, end) not in self._exact:
            self._exact[kind, first, end] = seconds
            self._raise(kind, first, end, seconds)
        return solved

    def _raise(self, kind: Kind, first: int, end: int, seconds: float) -> None:
        """Raises the bound of all stages that equal the layers [first, end)."""
        table, count = self.table(kind), end - first
        if count > self.width:
            return
        rows = np.array([first])
        for start, stop in zip(self.problem.starts, self.problem.starts[1:], strict=False):
            if start <= first and end <= stop:
                inside = np.arange(start, stop - count + 1)
                resident = self.problem.resident_bytes
                rows = inside[resident[inside] == resident[first]]
        raised = np.maximum(table.objective_s[rows, count], seconds)
        table.objective_s[rows, count] = raised

    def arcs(self, kind: Kind, device: int, most_s: float) -> Arcs:
        """All stages below most_s that `device` may get: at least one layer is left for each other
        device."""
        num_layers, p = self.problem.num_layers, self.problem.num_devices
        last = num_layers - (p - 1 - device)
        rows = slice(0, 1) if device == 0 else slice(device, last)
        values = self.table(kind).total_s[rows]
        start, count = np.nonzero(values < most_s)
        start += rows.start
        end = start + count
        legal = end == num_layers if device == p - 1 else end <= last
        return self.priced(kind, start[legal], end[legal])

    def priced(self, kind: Kind, start: Indices, end: Indices) -> Arcs:
        """The arcs at their present bounds."""
        table = self.table(kind)
        full = table.objective_s[start, end - start]
        if not self.has_sync:
            return Arcs(start, end, full, None)
        return Arcs(start, end, table.total_s[start, end - start], full)


def _rounded_down(number: int) -> int:
    """To three binary digits: 1 to 8, 10, 12, 14, 16, 20, ..."""
    unit = 1 << max(0, number.bit_length() - 3)
    return number // unit * unit
