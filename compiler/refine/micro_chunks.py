"""The number of micro-chunks of each region in a scheduled program (passes.split.micro_chunks).

Every number of micro-chunks that may pay is emitted, scheduled and simulated, region by region,
those first in which the step spends most; a number is taken where the whole step is faster for it
and still fits. What cannot pay is neither: with kernels that take w seconds in all, and one
instance of n in a region those of k chunks instead of k0,

    step >= w + n * (kernels of k chunks - kernels of k0)
    step >= step before - n * seconds of collectives inside of the region, as written
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from meshfold.codegen.emit.memo import EmissionMemo
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import MICRO_CHUNKS
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import ChunkDim, Chunking
from meshfold.passes.split.chunk_graph import SPLITS, ChunkingError
from meshfold.passes.split.micro_chunks import ChunkingProblem
from meshfold.refine.program_events import with_program_events

TRIED = (2, 4)
LEAST_GAIN = 0.002
"""Fraction of the step; less is not worth graphs of twice the size."""


def with_micro_chunks(
    plan: Plan, folded: FoldedGraph, pinned: int | None, memo: EmissionMemo | None = None
) -> Plan:
    """`plan` in mode scheduled with the micro-chunks of every region, and with the events and the
    simulated step of its schedule. folded: the captured model.
    pinned: how many to take wherever it is possible; memo: as for emit.

    Raises OptionError where no region can run in as many micro-chunks as pinned.
    """
    if pinned is not None and pinned > 1 and plan.schedule:
        raise OptionError(
            f"pin {MICRO_CHUNKS}={pinned}: stages of a pipeline do not run in micro-chunks; "
            "leave one of the two out"
        )
    if plan.mode != "scheduled" or plan.events is None:
        return with_program_events(plan, folded, memo)
    memo = memo or EmissionMemo(folded, plan)
    best = with_program_events(plan, folded, memo)
    if pinned == 1:
        return best
    problem = memo.chunking
    if pinned is not None:
        return with_program_events(_pinned(best, problem, pinned), folded, memo)
    chances = _Chances(plan, memo)
    for region in by_time(best):
        if not chances.can_hide(best, region):
            continue
        for chunking in _possible(best, problem, region):
            if not chances.may_pay(best, region, chunking):
                continue
            tried = _with(best, region, chunking)
            found = with_program_events(tried, folded, memo)
            # Where two chunks do not pay four may: more hides, and weights are read as often again.
            if is_better(found, best):
                best = found
    return best


@dataclass(frozen=True)
class _Chances:
    """Whether micro-chunks may pay. plan: as the search wrote it, with events."""

    plan: Plan
    memo: EmissionMemo

    @cached_property
    def inside_s(self) -> Mapping[int, float]:
        """Seconds of collectives inside of all instances of each region, as written."""
        assert self.plan.events is not None
        found = dict.fromkeys(range(len(self.plan.regions)), 0.0)
        instances = self.memo.split.instances
        for instance, number in zip(instances, self.plan.events.instances, strict=True):
            region = self.plan.events.regions[number]
            found[instance.region] += sum(
                event.collective.seconds
                for event in (*region.forward, *region.backward)
                if event.kind == "inline" and event.collective is not None
            )
        return found

    def can_hide(self, best: Plan, region: int) -> bool:
        """Whether the step of `best`, with `region` as written, may gain by hiding its
        collectives."""
        return self.inside_s[region] > LEAST_GAIN * best.step_s

    def may_pay(self, best: Plan, region: int, chunking: Chunking) -> bool:
        """Whether the kernels of the step leave a gain where `region` runs so."""
        assert best.simulated is not None
        now = best.regions[region].chunking
        now_s, then_s = (self._region_kernels_s(region, c) for c in (now, chunking))
        more_s = best.regions[region].num_instances * (then_s - now_s)
        return best.simulated.compute_s + more_s < best.step_s * (1 - LEAST_GAIN)

    def _region_kernels_s(self, region: int, chunking: Chunking) -> float:
        """Kernels of one instance, without those that split and join, which chained regions do not
        run."""
        planned, memo = self.plan.regions[region], self.memo
        written = memo.split.regions[region].graph, planned.typing
        if chunking.count > 1:
            written = memo.chunking.chunked(region, planned.typing, chunking)
        times = memo.segments.of(*written, planned.name, memo.costs).op_times
        moving = SPLITS if chunking.count > 1 else ()
        pairs = zip(written[0].ops, times, strict=True)
        return sum(
            time.forward_s + time.backward_s for op, time in pairs if op.target not in moving
        )


def is_better(found: Plan, best: Plan) -> bool:
    assert found.simulated is not None and best.simulated is not None
    gains = found.simulated.step_s < best.simulated.step_s * (1 - LEAST_GAIN)
    return gains and found.memory.fits


def by_time(plan: Plan) -> list[int]:
    """Numbers of the regions, those with most seconds of the step first."""
    spent = [r.num_instances * (r.forward_s + r.backward_s) for r in plan.regions]
    return sorted(range(len(spent)), key=lambda k: (-spent[k], k))


def _possible(plan: Plan, problem: ChunkingProblem, region: int) -> Iterator[Chunking]:
    """The micro-chunks in which a region can run: of its samples, where that is possible, else of
    its sequence, which leaves attention unsplit."""
    found = False
    for of in get_args(ChunkDim):
        for count in TRIED if not found else ():
            try:
                problem.chunked(region, plan.regions[region].typing, Chunking(count, of))
            except ChunkingError:
                break
            found = True
            yield Chunking(count, of)


def _with(plan: Plan, region: int, chunking: Chunking) -> Plan:
    regions = list(plan.regions)
    regions[region] = replace(regions[region], chunking=chunking)
    return replace(plan, regions=tuple(regions))


def _pinned(plan: Plan, problem: ChunkingProblem, count: int) -> Plan:
    """Every region in as many micro-chunks that can run so."""
    why = ""
    found = plan
    for region in by_time(plan):
        for of in get_args(ChunkDim):
            try:
                problem.chunked(region, plan.regions[region].typing, Chunking(count, of))
            except ChunkingError as error:
                why = why or f"region {plan.regions[region].name}: {error}"
            else:
                found = _with(found, region, Chunking(count, of))
                break
    if found is plan:
        raise OptionError(f"pin {MICRO_CHUNKS}={count}: no region can run so ({why})")
    return found
