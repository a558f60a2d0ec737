"""Strategies of the layers that one device runs under the interleaved schedule, all chunks at once.

Chunks share the memory of their device. At any moment chunk c holds n_c microbatches; which tuples
n occur is known (schedules.held_by_chunk). With states s, activations a and transients u of the
layers l that are chosen, x the values held for a chunk's first layer, a device needs

    sum_l s_l + max over n of sum_c n_c (x_c + sum_{l in c} a_l) + max_l u_l

The strategies are exact for one n, that with the most activations if all layers were at their
fastest; where those overrun at another n, they are solved again with the most that each chunk ever
holds, which is safe but may ask for more than is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule, held_by_chunk
from meshfold.passes.run.hull import IntArray
from meshfold.passes.stages.answer import LayerBlock, Stage
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.solved import Cell, RunSolver, StageCells

Held = tuple[int, ...]
"""Microbatches that each chunk of a device holds at one moment."""


@dataclass(frozen=True)
class _Piece:
    """`count` layers of run number `run` in chunk number `chunk` of a device."""

    chunk: int
    run: int
    count: int


class ChunkCells:
    """Solves the devices of one schedule and keeps what it has solved."""

    def __init__(self, problem: StageProblem, schedule: Schedule, solve_run: RunSolver) -> None:
        self.problem = problem
        self.schedule = schedule
        self.held = held_by_chunk(schedule)
        self.num_solved = 0
        self._solve_run = solve_run
        self._known: dict[tuple[object, ...], Cell | None] = {}

    def stages(self, cuts: Sequence[int]) -> tuple[Stage, ...] | None:
        """The stages of a cut in order; None where a device does not fit."""
        found: list[Stage | None] = [None] * (len(cuts) - 1)
        for device in range(self.schedule.num_devices):
            own = self.schedule.stages_of(device)
            spans = [(cuts[s], cuts[s + 1]) for s in own]
            solved = self._device(device, spans)
            if solved is None:
                return None
            for s, stage in zip(own, solved, strict=True):
                found[s] = stage
        return tuple(stage for stage in found if stage is not None)

    def _device(self, device: int, spans: Sequence[tuple[int, int]]) -> list[Stage] | None:
        problem, budget = self.problem, int(self.problem.memory_bytes[device])
        pieces = [
            _Piece(chunk, run, count)
            for chunk, (first, end) in enumerate(spans)
            for run, count in problem.pieces(first, end)
        ]
        vectors = self.held[device]
        likely = max(vectors, key=lambda n: (self._fastest_bytes(pieces, n), n))
        for held in dict.fromkeys((likely, tuple(map(max, *vectors, likely)))):
            cell = self._solve(pieces, spans, held, budget)
            if cell is None:
                return None
            each = self._microbatch_bytes(cell, pieces, spans)
            worst = max(vectors, key=lambda n: (int(each @ n), n))
            stages = self._built(cell, pieces, spans, worst)
            if sum(stage.memory_bytes for stage in stages) <= budget:
                return stages
        return None

    def _fastest_bytes(self, pieces: Sequence[_Piece], held: Held) -> int:
        """Activations at one moment with every layer at its fastest."""
        total = 0
        for piece in pieces:
            costs = self.problem.runs[piece.run].layer
            activation = int(costs.activation_bytes[int(costs.total_s.argmin())])
            total += held[piece.chunk] * piece.count * activation
        return total

    def _solve(
        self, pieces: Sequence[_Piece], spans: Sequence[tuple[int, int]], held: Held, budget: int
    ) -> Cell | None:
        """The best strategies with `held` microbatches in the chunks."""
        room = budget - sum(
            n * int(self.problem.held_bytes[first])
            for n, (first, _) in zip(held, spans, strict=True)
        )
        key = (tuple((x.run, x.count, held[x.chunk]) for x in pieces), room)
        if key not in self._known:
            self.num_solved += 1
            runs = tuple(
                LayerRun(_holding(self.problem.runs[x.run].layer, held[x.chunk]), x.count)
                for x in pieces
            )
            alone = StageProblem.build(
                runs,
                num_stages=1,
                num_microbatches=self.problem.num_microbatches,
                memory_bytes=room,
            )
            cells = StageCells(alone, self._solve_run)
            self._known[key] = cells.solve(0, alone.num_layers, 1, room)
        return self._known[key]

    def _microbatch_bytes(
        self, cell: Cell, pieces: Sequence[_Piece], spans: Sequence[tuple[int, int]]
    ) -> IntArray:
        """Per chunk what it holds for each microbatch in flight."""
        each = np.array([self.problem.held_bytes[first] for first, _ in spans], np.int64)
        for block in cell.blocks:
            piece = pieces[block.run]
            costs = self.problem.runs[piece.run].layer
            at = costs.strategies.index(block.strategy)
            each[piece.chunk] += block.count * costs.activation_bytes[at]
        return each

    def _built(
        self,
        cell: Cell,
        pieces: Sequence[_Piece],
        spans: Sequence[tuple[int, int]],
        held: Held,
    ) -> list[Stage]:
        """The chunks of a device as stages with what they need at one moment; the transient of the
        device is charged to the first chunk that has it."""
        blocks: list[list[LayerBlock]] = [[] for _ in spans]
        for block in cell.blocks:
            piece = pieces[block.run]
            blocks[piece.chunk].append(replace(block, run=piece.run))
        stages, transients = [], []
        for n, (first, end), own in zip(held, spans, blocks, strict=True):
            seconds = np.zeros(4)
            memory, transient = n * int(self.problem.held_bytes[first]), 0
            for block in own:
                costs = self.problem.runs[block.run].layer
                at = costs.strategies.index(block.strategy)
                tables = (costs.forward_s, costs.backward_s, costs.weight_s, costs.sync_s)
                seconds += block.count * np.array([table[at] for table in tables])
                each = costs.state_bytes[at] + n * costs.activation_bytes[at]
                memory += block.count * int(each)
                transient = max(transient, int(costs.transient_bytes[at]))
            forward_s, backward_s, weight_s, sync_s = seconds.tolist()
            stages.append(
                Stage(first, end, tuple(own), forward_s, backward_s, weight_s, sync_s, n, memory)
            )
            transients.append(transient)
        most = transients.index(max(transients))
        stages[most] = replace(
            stages[most], memory_bytes=stages[most].memory_bytes + transients[most]
        )
        return stages


def _holding(costs: LayerCosts, num_microbatches: int) -> LayerCosts:
    """`costs` with the activations of so many microbatches as those of one."""
    return replace(costs, activation_bytes=num_microbatches * costs.activation_bytes)
