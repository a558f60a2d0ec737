"""Strategies of the layers that one device runs under the interleaved schedule, all virtual stages
at once.

Virtual stages share the memory of their device. At any moment virtual stage c has n_c microbatches
in flight; which tuples n occur is known (schedules.counted_in_flight). With states s,
activations a and transients u of the layers l that are chosen, x the resident bytes of a virtual
stage's first layer, a device needs

    sum_l s_l + max over n of sum_c (n_c x_c + sum_{l in c} max(n_c a_l, o_l)) + max_l u_l

with o what the optimizer takes when the microbatches are gone, counted where n_c > 0. Where the
backward is split, n has as many entries again: microbatches between B and W, of which the layers
keep what they put off, w_l for a_l.

The strategies are exact for one n, that with the most activations if all layers were at their
fastest. Where those overrun at another n, they are solved again for that one, for the most that
each virtual stage ever has, which is safe but may ask for more than is needed, and for the first n
with as much less room as was missing; the fastest that fits is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule, counted_in_flight
from meshfold.passes.run.hull import IntArray
from meshfold.passes.stages.answer import LayerBlock, Stage
from meshfold.passes.stages.problem import InFlight, LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.solved import SolvedStage, StageSolver, summed_costs

MOST_NODES = 2_000
"""Plans of a device that are looked at: divisions are tried, nothing is proven by them. Chosen: to
go on takes half of the time of GPT-3 on 1,024 devices, and changed no plan of the five cases of
`benchmarks/plan.py` that were compared (not DeepSeek-V3)."""

ONE_IN_FLIGHT: InFlight = (1,)
"""Of layers whose activations are those of all their microbatches."""


@dataclass(frozen=True)
class _LayersOfStage:
    """`count` layers of run number `run` in virtual stage number `virtual stage` of a device."""

    virtual_stage: int
    run: int
    count: int


@dataclass(frozen=True)
class _Device:
    """What a device has of a division. spans: (first layer, end) of its virtual stages; vectors:
    microbatches in flight in these that occur, a row each, likely among them; budget: bytes."""

    groups: list[_LayersOfStage]
    spans: list[tuple[int, int]]
    vectors: IntArray
    likely: InFlight
    budget: int


class VirtualStageSolver:
    """Solves the devices of one schedule and keeps what it has solved. in_flight: of
    counted_in_flight, where it is at hand."""

    def __init__(
        self,
        problem: StageProblem,
        schedule: Schedule,
        in_flight: Sequence[Sequence[InFlight]] = (),
    ) -> None:
        self.problem = problem
        self.schedule = schedule
        self.in_flight = in_flight or counted_in_flight(schedule)
        self._vectors = [np.array(vectors) for vectors in self.in_flight]
        self._problems: dict[tuple[object, ...], StageProblem] = {}
        self._bounds: dict[tuple[object, ...], float] = {}
        self._known: dict[tuple[object, ...], SolvedStage | None] = {}

    def stages(self, boundaries: Sequence[int], beat_s: float = np.inf) -> tuple[Stage, ...] | None:
        """The stages of a division in order; None where a device does not fit, or works as long as
        beat_s whatever the strategies of its layers are."""
        devices = [self._device(i, boundaries) for i in range(self.schedule.num_devices)]
        if any(self._least_s(device) >= beat_s for device in devices):
            return None
        found: list[Stage | None] = [None] * (len(boundaries) - 1)
        for number, device in enumerate(devices):
            solved = self._solved(device)
            if solved is None:
                return None
            for s, stage in zip(self.schedule.stages_of(number), solved, strict=True):
                found[s] = stage
        return tuple(stage for stage in found if stage is not None)

    def _device(self, number: int, boundaries: Sequence[int]) -> "_Device":
        spans = [(boundaries[s], boundaries[s + 1]) for s in self.schedule.stages_of(number)]
        groups = [
            _LayersOfStage(virtual_stage, run, count)
            for virtual_stage, (first, end) in enumerate(spans)
            for run, count in self.problem.run_slices(first, end)
        ]
        vectors = self._vectors[number]
        likely = _last_of_most(vectors, vectors @ self._fastest_bytes(groups))
        return _Device(groups, spans, vectors, likely, int(self.problem.memory_bytes[number]))

    def _least_s(self, device: "_Device") -> float:
        """Seconds of a step, from below: at each moment its layers have to fit, so at the likely
        one."""
        key, alone = self._alone(device, device.likely)
        if key not in self._bounds:
            room = int(alone.memory_bytes[0])
            self._bounds[key] = alone.num_microbatches * StageSolver(alone).least_s(
                ONE_IN_FLIGHT, room
            )
        return self._bounds[key]

    def _solved(self, device: "_Device") -> list[Stage] | None:
        likely = self._solve(device, device.likely)
        if likely is None:
            return None
        worst, stages, missing_bytes = self._at_worst(likely, device)
        if missing_bytes <= 0:
            return stages
        most = tuple(device.vectors.max(axis=0).tolist())
        smaller = replace(device, budget=device.budget - missing_bytes)
        found: list[Stage] | None = None
        best_s = np.inf
        for of, in_flight in ((device, worst), (device, most), (smaller, device.likely)):
            solved = self._solve(of, in_flight)
            if solved is None or solved.objective_s >= best_s:
                continue
            _, stages, missing_bytes = self._at_worst(solved, device)
            if missing_bytes <= 0:
                found, best_s = stages, solved.objective_s
        return found

    def _at_worst(
        self, solved: SolvedStage, device: "_Device"
    ) -> tuple[InFlight, list[Stage], int]:
        """(the moment at which these layers need most, their stages then, bytes that are missing
        then, 0 or less where there is room)."""
        sizes = self._kept_bytes(solved, device)
        worst = _last_of_most(device.vectors, sizes)
        stages = self._built(solved, device.groups, device.spans, worst)
        return worst, stages, sum(stage.memory_bytes for stage in stages) - device.budget

    def _fastest_bytes(self, groups: Sequence[_LayersOfStage]) -> IntArray:
        """Activations per microbatch in flight by the entries of InFlight, every layer at its
        fastest."""
        v, each = self.schedule.num_virtual_stages, [0] * len(self.in_flight[0][0])
        for group in groups:
            kept = self._fastest[group.run]
            for k in range(group.virtual_stage, len(each), v):
                each[k] += group.count * kept[k // v]
        return np.array(each)

    @cached_property
    def _fastest(self) -> list[tuple[int, int]]:
        """Of a layer of each run at its fastest: what it keeps before the end of B, and from there
        to W."""
        layers = [run.layer for run in self.problem.runs]
        best = [int(costs.total_s.argmin()) for costs in layers]
        return [
            (int(costs.activation_bytes[at]), int(costs.put_off_bytes[at]))
            for costs, at in zip(layers, best, strict=True)
        ]

    def of(self, in_flight: InFlight, virtual_stage: int) -> InFlight:
        """The entries of one virtual stage."""
        return in_flight[virtual_stage :: self.schedule.num_virtual_stages]

    def _solve(self, device: "_Device", in_flight: InFlight) -> SolvedStage | None:
        """The best strategies with `in_flight` microbatches in the virtual stages."""
        key, alone = self._alone(device, in_flight)
        if key not in self._known:
            room = int(alone.memory_bytes[0])
            solver = StageSolver(alone, MOST_NODES)
            self._known[key] = solver.solve(0, alone.num_layers, (ONE_IN_FLIGHT,), room)
        return self._known[key]

    def _alone(
        self, device: "_Device", in_flight: InFlight
    ) -> tuple[tuple[object, ...], StageProblem]:
        """The layers of a device as one stage, with a name for what it depends on."""
        room = device.budget - sum(
            n * int(self.problem.resident_bytes[first])
            for n, (first, _) in zip(in_flight, device.spans, strict=False)
        )
        numbers = tuple(
            (x.run, x.count, self.of(in_flight, x.virtual_stage)) for x in device.groups
        )
        if (numbers, room) not in self._problems:
            runs = tuple(
                LayerRun(_with_in_flight(self.problem.runs[run].layer, n), count)
                for run, count, n in numbers
            )
            self._problems[numbers, room] = StageProblem.build(
                runs,
                num_stages=1,
                num_microbatches=self.problem.num_microbatches,
                memory_bytes=room,
            )
        return (numbers, room), self._problems[numbers, room]

    def _kept_bytes(self, solved: SolvedStage, device: "_Device") -> IntArray:
        """What these layers keep, and what their stages took over, by moment."""
        v, vectors = len(device.spans), device.vectors
        arrived = np.array([self.problem.resident_bytes[first] for first, _ in device.spans])
        kept = vectors[:, :v] @ arrived
        for block in solved.blocks:
            group = device.groups[block.run]
            costs = self.problem.runs[group.run].layer
            layer = costs.only(costs.strategies.index(block.strategy))
            in_flight = tuple(vectors.T[group.virtual_stage :: v])
            kept = kept + block.count * layer.kept_bytes(in_flight).astype(np.int64)
        return np.asarray(kept)

    def _built(
        self,
        solved: SolvedStage,
        groups: Sequence[_LayersOfStage],
        spans: Sequence[tuple[int, int]],
        in_flight: InFlight,
    ) -> list[Stage]:
        """The virtual stages of a device as stages with what they need at one moment; the transient
        of the device is charged to the first virtual stage that has it."""
        blocks: list[list[LayerBlock]] = [[] for _ in spans]
        for block in solved.blocks:
            group = groups[block.run]
            blocks[group.virtual_stage].append(replace(block, run=group.run))
        stages, transients = [], []
        for number, ((first, end), own) in enumerate(zip(spans, blocks, strict=True)):
            n = self.of(in_flight, number)
            layers = [(self.problem.runs[b.run].layer, b.strategy, b.count) for b in own]
            numbered = [
                (_with_in_flight(costs, n), costs.strategies.index(s), count)
                for costs, s, count in layers
            ]
            seconds, memory, transient = summed_costs(numbered, ONE_IN_FLIGHT)
            memory += n[0] * int(self.problem.resident_bytes[first])
            stages.append(Stage(first, end, tuple(own), *seconds, sum(n), memory))
            transients.append(transient)
        most = transients.index(max(transients))
        stages[most] = replace(
            stages[most], memory_bytes=stages[most].memory_bytes + transients[most]
        )
        return stages


def _last_of_most(vectors: IntArray, sizes: IntArray) -> InFlight:
    """Of the moments, the one at which most bytes are there; of equal ones the last."""
    return tuple(vectors[np.flatnonzero(sizes == sizes.max())[-1]].tolist())


def _with_in_flight(costs: LayerCosts, in_flight: InFlight) -> LayerCosts:
    """`costs` with what so many microbatches keep as that of one."""
    kept = costs.kept_bytes(in_flight).astype(np.int64)
    return replace(costs, activation_bytes=kept, update_bytes=np.zeros_like(kept))
