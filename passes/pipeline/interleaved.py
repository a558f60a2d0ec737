"""Schedules of several virtual stages per device beside the best pipeline of one.

With v virtual stages on each of p devices a pipeline fills in 1 / v of the time, and in less where
weight gradients fill the gaps; but layers have to divide into v p parts, and every device holds
more microbatches. Best first by an estimate of the step, which rises as more is known:

    kernels   every layer at its least seconds, T of a microbatch through all of them, with shares
              f of forward, w of weight gradients, b of input gradients:
              T (m + fill (p - 1)) / p + launch of the optimizer, with fill

                  interleaved 1 / v    interleaved_zero_bubble, dualpipev (1 - 2 w) / v
                  zbv max(f, b, 2 (b - w)) / 2

              which even stages take where transfers take no time, and dualpipev or more
    memory    the same with layers fluid under the memory of the devices (stages/memory_bound.py)
    transfers even divisions simulated with their transfers, if that is more
    search    MOST_TRIED schedules of fused backwards and as many of split ones
              (stages/virtual_stages.py), and how far a plan is above its estimate goes for others
              of its degrees, too

until the next estimate is above the best plan by more than simulation may make up for
(CLOSE). An estimate proves nothing: what was not tried is left out, and counted, unless
the kernels alone on all devices take longer than the best plan (bounds.py).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from meshfold.cost_models.pipeline.schedules import V_ORDERS, Schedule, ScheduleKind
from meshfold.cost_models.pipeline.waves import Waves
from meshfold.passes.pipeline.bounds import KernelSums
from meshfold.passes.pipeline.problem import PipelineProblem
from meshfold.passes.run.hull import FloatArray, IntArray
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.fluid_paths import KnownMixes
from meshfold.passes.stages.memory_bound import fluid_step_s
from meshfold.passes.stages.moves import neighbours
from meshfold.passes.stages.problem import LayerCosts, StageProblem
from meshfold.passes.stages.virtual_stages import (
    VirtualStageSearch,
    even_divisions,
    simulated_steps_s,
    waves_of,
)

INTERLEAVED = "interleaved schedules"
V_SCHEDULES = "schedules in a V"
"""The names of what is left out."""

CLOSE = 1.1
"""Multiple of the best sum up to which schedules are tried: an estimate is a few per cent high, and
a plan that wins by simulation may add up to more than the one it beats. Chosen: DualPipeV added up
to 5.2 % more (ViT-huge on two nodes of A100, PCIe)."""

LEAST_GAIN = 0.005
"""Share of the step that a schedule must be able to gain to be tried."""

MOST_TRIED = 5
"""Schedules that are searched, with fused backwards and with split ones."""

MOST_FURTHER = 2
"""Schedules that are searched from NUM_STARTS more divisions, the fastest ones."""

NUM_STARTS = 8
"""Chosen: of 22 schedules of Llama-2-7B in 4 stages at 26 and 40 GB, 14 were faster by 0.1 to 16 %
(median 1 %), for 1 to 8 CPU seconds each; 20 starts gain 1 % more at the median."""

MOST_PRICED = 4
"""Degrees whose layers are priced for these schedules alone."""

MOST_PASSES = 8192
"""Forwards of all stages and microbatches of a schedule that is searched, whose simulation is a
step for each of them."""

MOST_ROUNDS = 3
"""Rounds of as many microbatches as devices that an estimate simulates."""

MOST_MOVED = 64
"""Stages up to which an estimate tries to move layers: their pairs are looked at."""

MOST_SPLIT_PASSES = 2048
"""The same where weight gradients are passes of their own, in an order without a closed form."""


class Degrees(Protocol):
    """What a choice of degrees is asked for, dearest last."""

    @property
    def is_typed(self) -> bool:
        """Whether its kernels are at hand."""

    @property
    def has_replicas(self) -> bool:
        """Whether ZeRO shards over a part of dp."""

    @property
    def kernels(self) -> KernelSums:
        """Of its layers."""

    @property
    def is_priced(self) -> bool:
        """Whether its problem is at hand."""

    @property
    def problem(self) -> PipelineProblem:
        """Its chain."""


@dataclass(frozen=True, eq=False)
class InterleavedOutcome:
    """found: plans below the limit with the numbers of their degrees, the fastest first. left_out:
    by name, how many schedules were not tried and not ruled out. searches: of what was tried, with
    its launch."""

    found: tuple[tuple[int, PipelinePlan], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    searches: tuple[tuple[VirtualStageSearch, float], ...] = ()

    def bound_s(self, step_s: float) -> float:
        """What is proven of the schedules that were tried, no more than step_s. The lowest is asked
        for more until it has none; chains that were priced for one serve all of its schedule."""
        queue = [(s.bound_s + launch_s, k) for k, (s, launch_s) in enumerate(self.searches)]
        heapq.heapify(queue)
        asked: set[int] = set()
        known: KnownMixes = {}
        while queue and queue[0][0] < step_s and queue[0][1] not in asked:
            _, number = heapq.heappop(queue)
            asked.add(number)
            heapq.heappush(queue, (_proven_s(*self.searches[number], step_s, known), number))
        return min([step_s, *(bound_s for bound_s, _ in queue[:1])])


@dataclass(eq=False)
class _Offer:
    """A schedule on some degrees. bound_s: what is proven of it, launch included; estimate_s: what
    it may take."""

    index: int
    degrees: Degrees
    schedule: Schedule
    launch_s: float
    bound_s: float = 0.0
    estimate_s: float = 0.0

    @property
    def name(self) -> str:
        return V_SCHEDULES if self.schedule.kind in V_ORDERS else INTERLEAVED

    @property
    def family(self) -> tuple[int, str, bool]:
        """Those of a family are as far above their estimates."""
        return self.index, self.name, self.schedule.splits_backward

    def ask_kernels(self) -> None:
        """Not of fewer microbatches than devices where that takes a region search of its own: they
        leave most of the bubble to any schedule. Of replicas (HSDP) no estimate but where one stage
        per device came far: their kernels are those of ZeRO over all of dp."""
        schedule, degrees = self.schedule, self.degrees
        is_few = schedule.num_microbatches < schedule.num_devices
        if not degrees.is_typed and (is_few or degrees.has_replicas):
            self.estimate_s = np.inf
            return
        kernels = self.degrees.kernels
        evenly_s = schedule.num_microbatches * kernels.total_s / schedule.num_devices
        self.bound_s = evenly_s + self.launch_s
        self.estimate_s = kernels.total_s * _even_steps(schedule, kernels) + self.launch_s
        if degrees.has_replicas and not degrees.is_priced:
            self.estimate_s = np.inf

    def ask_memory(self) -> None:
        in_memory_s = fluid_estimate_s(
            self.degrees.problem.chain, self.schedule, self.degrees.kernels
        )
        self.estimate_s = max(self.estimate_s, in_memory_s + self.launch_s)

    def ask_transfers(self, waves: dict[Schedule, Waves | None]) -> None:
        """waves: of schedules that were simulated."""
        even_s = even_step_s(self.degrees.problem.chain, self.schedule, waves)
        self.estimate_s = max(self.estimate_s, even_s + self.launch_s)

    @property
    def is_short(self) -> bool:
        """Whether its passes can be simulated one by one."""
        schedule = self.schedule
        most = MOST_SPLIT_PASSES if schedule.splits_backward else MOST_PASSES
        return schedule.num_stages * schedule.num_microbatches <= most


def search_interleaved(
    degrees: Mapping[int, Degrees],
    schedules: Mapping[int, Iterable[Schedule]],
    beat_s: float,
    launch_s: float,
    num_starts: int = NUM_STARTS,
) -> InterleavedOutcome:
    """Plans under schedules of several virtual stages that are close to beat_s, the step of the
    best plan known, or faster: as simulated they may change places. degrees, schedules: by number
    of the candidate; launch_s: of a step, beside its stages; num_starts: of the divisions that the
    fastest schedules are searched from besides."""
    offers = [
        _Offer(index, degrees[index], schedule, launch_s)
        for index in sorted(schedules)
        for schedule in schedules[index]
    ]
    for offer in offers:
        offer.ask_kernels()
    tried: list[tuple[_Offer, VirtualStageSearch]] = []
    above: dict[tuple[int, str, bool], float] = {}

    def is_open(offer: _Offer) -> bool:
        splits = offer.schedule.splits_backward
        may_gain = offer.bound_s < (1 - LEAST_GAIN) * beat_s
        may_gain &= offer.estimate_s * above.get(offer.family, 1.0) < CLOSE * beat_s
        return may_gain and sum(x.schedule.splits_backward == splits for x, _ in tried) < MOST_TRIED

    for offer in _promising(offers, CLOSE * beat_s, is_open):
        search = VirtualStageSearch(offer.degrees.problem.chain, offer.schedule)
        offer.bound_s = max(offer.bound_s, search.bound_s + launch_s)
        if is_open(offer):
            search.find(CLOSE * beat_s - launch_s)
            above[offer.family] = (search.step_s + launch_s) / offer.estimate_s
            tried.append((offer, search))
            beat_s = min(beat_s, search.step_s + launch_s)
    beat_s = _beaten_further([search for _, search in tried], beat_s, launch_s, num_starts)
    untried = set(offers).difference(offer for offer, _ in tried)
    left_out = Counter(x.name for x in untried if x.bound_s < beat_s)
    within = [
        (search.step_s, number)
        for number, (_, search) in enumerate(tried)
        if search.step_s + launch_s < CLOSE * beat_s
    ]
    found = [tried[number] for _, number in sorted(within)]
    return InterleavedOutcome(
        tuple((offer.index, search.plan(search.proven_s, capped=False)) for offer, search in found),
        dict(sorted(left_out.items())),
        tuple((search, launch_s) for _, search in tried),
    )


def _beaten_further(
    tried: Sequence[VirtualStageSearch], beat_s: float, launch_s: float, num_starts: int
) -> float:
    """Searches the fastest of what was tried from more divisions; the step to beat after it."""
    for search in sorted(tried, key=lambda search: search.step_s)[:MOST_FURTHER]:
        if search.step_s + launch_s < CLOSE * beat_s:
            search.find_further(num_starts)
            beat_s = min(beat_s, search.step_s + launch_s)
    return beat_s


def _promising(
    offers: Sequence[_Offer], limit_s: float, is_open: Callable[[_Offer], bool]
) -> Iterator[_Offer]:
    """The offers that are estimated to take less than limit_s, the least first. is_open: whether
    one may still be tried; others are asked for nothing."""
    queue = [(x.estimate_s, k, 0) for k, x in enumerate(offers) if x.is_short]
    heapq.heapify(queue)
    priced: set[int] = set()
    waves: dict[Schedule, Waves | None] = {}
    while queue and queue[0][0] < limit_s:
        _, number, num_asked = heapq.heappop(queue)
        offer = offers[number]
        if not is_open(offer):
            continue
        if num_asked == 2:
            yield offer
            continue
        if not offer.degrees.is_priced:
            if offer.index not in priced and len(priced) == MOST_PRICED:
                continue
            priced.add(offer.index)
        if num_asked:
            offer.ask_transfers(waves)
        else:
            offer.ask_memory()
        heapq.heappush(queue, (offer.estimate_s, number, num_asked + 1))


def _proven_s(
    search: VirtualStageSearch, launch_s: float, step_s: float, known: KnownMixes
) -> float:
    schedule = search.schedule
    tolerance = 0.005 * min(1.0, schedule.num_devices / schedule.num_microbatches)
    search.prove(step_s - launch_s, tolerance, known)
    return search.bound_s + launch_s


def fluid_estimate_s(problem: StageProblem, schedule: Schedule, kernels: KernelSums) -> float:
    """The step in even stages of fluid layers; infinite where they do not fit. No bound."""
    m, v = schedule.num_microbatches, schedule.num_virtual_stages
    if schedule.kind in V_ORDERS:
        most = schedule.num_devices + (schedule.kind is ScheduleKind.DUALPIPEV)
        in_flight = np.full((schedule.num_devices, 1), min(m, most))
    else:
        in_flight = np.array([[-(-n // v)] for n in schedule.in_flight])
    return fluid_step_s(problem, in_flight, _even_steps(schedule, kernels))


def even_step_s(
    problem: StageProblem, schedule: Schedule, waves: dict[Schedule, Waves | None]
) -> float:
    """The step of a division that is as even as a layer more or less makes it, every layer at its
    fastest, whatever the memory: simulated for MOST_ROUNDS of microbatches, of which more repeat.
    No bound. waves: of schedules that were simulated."""
    p, m = schedule.num_devices, schedule.num_microbatches
    short = replace(schedule, num_microbatches=min(m, MOST_ROUNDS * p))
    if short not in waves:
        waves[short] = waves_of(short)
    layers = [_fastest(run.layer, m) for run in problem.runs]
    layer_s = np.repeat(layers, [run.count for run in problem.runs], axis=0)
    boundaries, busiest_s = _most_even(layer_s[:, 0] + layer_s[:, 1], schedule)
    seconds = np.add.reduceat(layer_s, boundaries[:-1], axis=0).T[:, :, None]
    hop_s = problem.hop_s[boundaries[1:-1]][:, None]
    (step_s,) = simulated_steps_s(short, seconds, hop_s, waves[short])
    return float(step_s) + (m - short.num_microbatches) * busiest_s


def _fastest(layer: LayerCosts, num_microbatches: int) -> tuple[float, ...]:
    """Forward, backward, weight gradients and sync of the strategy that takes least in a step."""
    at = int((layer.total_s + layer.sync_s / num_microbatches).argmin())
    columns = layer.forward_s, layer.backward_s, layer.weight_s, layer.sync_s
    return tuple(float(column[at]) for column in columns)


def _most_even(layer_s: FloatArray, schedule: Schedule) -> tuple[IntArray, float]:
    """The division whose busiest device works least, and how much per microbatch, among those of
    stages of like times and of like numbers of layers, and these with a layer moved."""
    done_s = np.concatenate(([0.0], np.cumsum(layer_s)))
    own = [list(schedule.stages_of(device)) for device in range(schedule.num_devices)]
    even = even_divisions(layer_s, schedule.num_stages)
    rows = np.array(even)
    if schedule.num_stages <= MOST_MOVED:
        rows = np.vstack([rows, *map(neighbours, even)])
    each_s = np.diff(done_s[rows], axis=1)
    busiest_s = np.max([each_s[:, stages].sum(axis=1) for stages in own], axis=0)
    at = int(busiest_s.argmin())
    return rows[at], float(busiest_s[at])


def _even_steps(schedule: Schedule, kernels: KernelSums) -> float:
    """A step in even stages over a microbatch through all of them."""
    p, m, v = schedule.num_devices, schedule.num_microbatches, schedule.num_virtual_stages
    total_s = kernels.total_s if 0 < kernels.total_s < np.inf else 1.0
    forward, weight = min(1.0, kernels.forward_s / total_s), kernels.weight_s / total_s
    inputs = 1.0 - forward - weight
    fill = 1.0 / v
    if schedule.kind is ScheduleKind.ZBV:
        fill = max(forward, inputs, 2 * (inputs - weight)) / 2
    elif schedule.splits_backward:
        fill = max(0.0, 1.0 - 2 * weight) / v
    return (m + (p - 1) * fill) / p
