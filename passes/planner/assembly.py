"""Writes the chosen strategy down as a Plan."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshfold._version import __version__
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph, SlotKind
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import (
    Alternative,
    ModelInfo,
    Plan,
    PricedStrategy,
    RegionPlan,
    RegionRun,
    SearchStats,
    StagePlan,
    model_inputs,
)
from meshfold.ir.returns import SUM
from meshfold.passes.fold.assemble import fingerprint, graph_fingerprint
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.zero import whole_notes
from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.shortlist import Shortlisted
from meshfold.passes.pipeline.interleaved import NUM_STARTS
from meshfold.passes.planner.check import placements
from meshfold.passes.planner.shared_work import SharedWork
from meshfold.passes.price.model_flops import model_flops
from meshfold.units import bytes_text, seconds_text

NUM_ALTERNATIVES = 6
"""Losing strategies per region that a plan tells about."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """A model that is to be planned on a cluster."""

    folded: FoldedGraph
    cluster: ClusterSpec
    options: CompileOptions
    model_name: str
    batch_size: int
    """Global batch, the size of dim 0 of the inputs that are to be sharded."""

    probe: Probe
    shared: SharedWork = field(default_factory=SharedWork)
    """With other requests for the same model, cluster and batch."""

    chunked_loss: bool = False
    """Whether losses of `folded` make their logits in chunks."""

    states_on_disk: bool = False
    """Whether optimizer states that leave the device are on the disk of the host."""

    slices: int = 1
    """Of the parameter of the largest operator of `folded`."""

    explains: bool = True
    """Whether an error that nothing fits says what comes nearest, which takes time to find."""

    beat_s: float = math.inf
    """Step time of a plan that is there already: of slower ones none needs to be found."""

    in_one_pass: bool = False
    """Whether stages and microbatches are left out."""

    num_starts: int = NUM_STARTS
    """Divisions into stages that the fastest schedules are searched from besides
    (pipeline/interleaved.py)."""

    wants_rivals: bool = False
    """Whether plans are asked for that may win once they are emitted (one_pass/rivals.py)."""


def assemble_plan(
    request: PlanRequest,
    winner: Shortlisted,
    baselines: tuple[PricedStrategy, ...],
    stats: SearchStats,
    notes: tuple[str, ...],
) -> Plan:
    """The plan that runs `winner`."""
    folded, options = request.folded, request.options
    best, planner = winner.priced, winner.planner
    split, step = best.split, winner.step
    origin = {
        new.region: old.region for new, old in zip(split.instances, folded.instances, strict=True)
    }
    return Plan(
        model=model_info(folded, request.model_name, request.batch_size),
        cluster=request.cluster,
        mesh=best.mesh,
        strategy=best.strategy,
        pins=dict(options.pins),
        optimizer=options.optimizer,
        seed=options.seed,
        precision=options.captured_precision,
        mode=options.modes[0],
        asked_mode=options.mode,
        regions=tuple(_region_plan(best, r, origin[r], planner) for r in range(len(split.regions))),
        stages=(StagePlan(runs_of(split, range(len(split.instances)))),),
        memory=best.memory if step is None else best.memory.of_program(step.peak_bytes),
        time=best.time,
        baselines=baselines,
        search=stats,
        meshfold_version=__version__,
        simulated=step,
        events=winner.events,
        notes=(
            *folded.notes,
            *planner.search.slack_notes(),
            *_unsharded_notes(best, _pinned(best, origin, planner)),
            *notes,
        ),
    )


def _pinned(best: Priced, origin: Mapping[int, int], planner: MeshPlanner) -> set[tuple[int, int]]:
    """Parameter slots of the split program whose layout the user fixed. origin: its regions ->
    those of the planner."""
    pinned = planner.search.space.pinned
    return {(r, i) for r in range(len(best.candidates)) for q, i in pinned if q == origin[r]}


def _unsharded_notes(best: Priced, pinned: Collection[tuple[int, int]]) -> list[str]:
    """Parameters that ZeRO was to shard and could not; none that the user wanted unsharded."""
    if not best.strategy.zero:
        return []
    found: set[str] = set()
    for r, (region, candidate) in enumerate(zip(best.split.regions, best.candidates, strict=True)):
        if candidate.strategy.zero and len(candidate.sharded) == candidate.num_shardable:
            whole = [
                i
                for i, slot in enumerate(region.graph.slots)
                if slot.kind is SlotKind.PARAMETER
                and (r, i) not in pinned
                and i not in candidate.sharded
            ]
            slots, mode = candidate.typing.slots, candidate.strategy.tp_mode
            found.update(whole_notes(region.graph, slots, whole, best.mesh, mode))
    return sorted(found)


def model_info(folded: FoldedGraph, name: str, batch_size: int) -> ModelInfo:
    """What a plan says about its model."""
    flops, compute_dtype = model_flops(folded)
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(folded),
        num_parameters=sum(math.prod(p.shape) for p in folded.parameters),
        num_ops=folded.num_ops,
        num_distinct_ops=sum(len(region.graph.ops) for region in folded.regions),
        inputs=model_inputs(folded),
        batch_size=batch_size,
        loss=SUM.join(folded.returns.loss),
        outputs=tuple(folded.returns.outputs),
        sharded_outputs=folded.returns.sharded,
        flops=flops,
        compute_dtype=compute_dtype,
    )


def _region_plan(best: Priced, r: int, origin: int, planner: MeshPlanner) -> RegionPlan:
    region, candidate, price = best.split.regions[r], best.candidates[r], best.prices[r]
    instances = [i for i in best.split.instances if i.region == r]
    return RegionPlan(
        name=region.name,
        fingerprint=graph_fingerprint(region.graph),
        num_instances=len(instances),
        example_scope=instances[0].scope,
        typing=candidate.typing,
        parameters=placements(region.graph, candidate.typing, best.mesh),
        conversions=price.conversions,
        fallback_ops=planner.search.fallback_ops[origin],
        forward_s=price.forward_s,
        backward_s=price.backward_s,
        communication_s=price.total_communication_s,
        saved_bytes=best.saved_bytes[r],
        strategy=candidate.strategy,
        choice=_alternative(candidate),
        alternatives=_alternatives(candidate, planner.candidates[origin]),
        op_targets=tuple(op.target for op in region.graph.ops),
        slot_names=tuple(slot.name for slot in region.graph.slots),
    )


def _alternatives(
    taken: StrategyCandidate, candidates: Sequence[StrategyCandidate]
) -> tuple[Alternative, ...]:
    """The best candidates that lost: those that nothing beats in time and in memory, nearest
    first."""
    others = [candidate for candidate in candidates if candidate.name != taken.name]
    full = [_alternative(x) for x in others if len(x.sharded) in (0, x.num_shardable)]
    return losers(_alternative(taken), full)[:NUM_ALTERNATIVES]


def _alternative(candidate: StrategyCandidate) -> Alternative:
    return Alternative(candidate.name, candidate.time_s, candidate.resident_bytes, "taken")


def losers(taken: Alternative, others: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """`others` by time, each with the reason why it lost."""
    ordered = sorted(others, key=lambda a: (a.time_s, a.resident_bytes, a.name))
    return tuple(replace(a, reason=why_lost(a, taken)) for a in ordered)


def runs_of(split: FoldedGraph, instances: range) -> tuple[RegionRun, ...]:
    """The runs of one region among consecutive instances."""
    regions = [instance.region for instance in split.instances]
    groups = [(r, list(of)) for r, of in itertools.groupby(instances, key=regions.__getitem__)]
    return tuple(RegionRun(split.regions[r].name, of[0], len(of)) for r, of in groups)


def why_lost(candidate: Alternative, taken: Alternative) -> str:
    """Where `candidate` is worse than what was taken, in words."""
    slower_s = candidate.time_s - taken.time_s
    more_bytes = candidate.resident_bytes - taken.resident_bytes
    if slower_s == more_bytes == 0:
        return "as fast and as small: the simpler one was taken"
    if slower_s >= 0 and more_bytes >= 0:
        return f"{seconds_text(slower_s)} slower and holds {bytes_text(more_bytes)} more"
    if slower_s >= 0:
        return f"{seconds_text(slower_s)} slower; its {bytes_text(-more_bytes)} less are not needed"
    if more_bytes > 0:
        return f"holds {bytes_text(more_bytes)} more, which does not fit in every layer"
    return "faster and no larger by itself, but not beside what other regions do"
