"""Writes the chosen strategy down as a Plan."""

import math
from collections.abc import Collection, Mapping, Sequence

from meshfold import __version__
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph, SlotKind
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import (
    Alternative,
    Candidate,
    ModelInfo,
    Plan,
    RegionPlan,
    RunPlan,
    SearchStats,
    StagePlan,
)
from meshfold.passes.fold.assemble import fingerprint, graph_fingerprint
from meshfold.passes.one_pass.candidates import Leaf
from meshfold.passes.one_pass.planner import MeshPlanner
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.one_pass.shortlist import Finalist
from meshfold.passes.planner.check import placements
from meshfold.passes.region.data_parallel import kept_whole_note, zero_axes
from meshfold.units import bytes_text, seconds_text

NUM_ALTERNATIVES = 6
"""Losing strategies per region that a plan tells about."""


def assemble_plan(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    options: CompileOptions,
    winner: Finalist,
    *,
    model_name: str,
    batch_size: int,
    baselines: tuple[Candidate, ...],
    stats: SearchStats,
    notes: tuple[str, ...],
) -> Plan:
    """The plan that runs `winner`."""
    best, planner = winner.priced, winner.planner
    split = best.split
    origin = {
        new.region: old.region for new, old in zip(split.instances, folded.instances, strict=True)
    }
    return Plan(
        model=model_info(folded, model_name, batch_size),
        cluster=cluster,
        mesh=best.mesh,
        strategy=best.strategy,
        pins=dict(options.pins),
        optimizer=options.optimizer,
        seed=options.seed,
        precision=options.precision,
        mode=options.mode,
        regions=tuple(_region_plan(best, r, origin[r], planner) for r in range(len(split.regions))),
        stages=(
            StagePlan(
                tuple(RunPlan(split.regions[r].name, first, n) for r, first, n in split.runs)
            ),
        ),
        memory=best.memory,
        time=best.time,
        baselines=baselines,
        search=stats,
        meshfold_version=__version__,
        simulated=winner.step,
        events=winner.events,
        notes=(*folded.notes, *_whole_notes(best, _pinned(best, origin, planner)), *notes),
    )


def _pinned(best: Priced, origin: Mapping[int, int], planner: MeshPlanner) -> set[tuple[int, int]]:
    """Parameter slots of the split program whose layout the user fixed. origin: its regions ->
    those of the planner."""
    pinned = planner.search.space.pinned
    return {(r, i) for r in range(len(best.leaves)) for q, i in pinned if q == origin[r]}


def _whole_notes(best: Priced, pinned: Collection[tuple[int, int]]) -> list[str]:
    """Parameters that ZeRO was to shard and could not; none that the user wanted whole."""
    if not best.strategy.zero:
        return []
    num_ranks = math.prod(best.mesh.sizes[axis] for axis in zero_axes(best.mesh))
    found = set()
    for r, (region, leaf) in enumerate(zip(best.split.regions, best.leaves, strict=True)):
        if leaf.strategy.zero and len(leaf.sharded) == leaf.num_shardable:
            for i, slot in enumerate(region.graph.slots):
                if slot.kind is not SlotKind.PARAMETER or (r, i) in pinned:
                    continue
                if i not in leaf.sharded:
                    found.add(f"{slot.name} {list(region.graph.values[i].shape)}")
    return [kept_whole_note(name, num_ranks) for name in sorted(found)]


def model_info(folded: FoldedGraph, name: str, batch_size: int) -> ModelInfo:
    """What a plan says about its model."""
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(folded),
        num_parameters=sum(math.prod(p.shape) for p in folded.parameters),
        num_ops=folded.num_ops,
        num_distinct_ops=sum(len(region.graph.ops) for region in folded.regions),
        inputs=tuple((i.name, i.shape, i.dtype) for i in folded.inputs),
        batch_size=batch_size,
    )


def _region_plan(best: Priced, r: int, origin: int, planner: MeshPlanner) -> RegionPlan:
    region, leaf, price = best.split.regions[r], best.leaves[r], best.prices[r]
    instances = [i for i in best.split.instances if i.region == r]
    return RegionPlan(
        name=region.name,
        fingerprint=graph_fingerprint(region.graph),
        num_instances=len(instances),
        example_scope=instances[0].scope,
        typing=leaf.typing,
        parameters=placements(region.graph, leaf.typing, best.mesh),
        conversions=price.conversions,
        fallback_ops=planner.fallback_ops[origin],
        forward_s=price.forward_s,
        backward_s=price.backward_s,
        communication_s=price.total_communication_s,
        saved_bytes=best.saved_bytes[r],
        strategy=leaf.strategy,
        choice=Alternative(leaf.name, leaf.time_s, leaf.held_bytes, "taken" + _planned(leaf)),
        alternatives=_alternatives(leaf, planner.leaves[origin]),
        op_targets=tuple(op.target for op in region.graph.ops),
        slot_names=tuple(slot.name for slot in region.graph.slots),
    )


def _alternatives(taken: Leaf, leaves: Sequence[Leaf]) -> tuple[Alternative, ...]:
    """The best leaves that lost: those that nothing beats in time and in memory, nearest first."""
    others = [leaf for leaf in leaves if leaf.name != taken.name]
    whole = [x for x in others if len(x.sharded) in (0, x.num_shardable)]
    ordered = sorted(whole, key=lambda leaf: (leaf.time_s, leaf.held_bytes, leaf.name))
    return tuple(
        Alternative(leaf.name, leaf.time_s, leaf.held_bytes, why_lost(leaf, taken) + _planned(leaf))
        for leaf in ordered[:NUM_ALTERNATIVES]
    )


def _planned(leaf: Leaf) -> str:
    return "" if leaf.strategy.runs else "; planned, cannot run yet"


def why_lost(leaf: Leaf | Alternative, taken: Leaf | Alternative) -> str:
    """Where `leaf` is worse than what was taken, in words."""
    slower_s = leaf.time_s - taken.time_s
    more_bytes = leaf.held_bytes - taken.held_bytes
    if slower_s == more_bytes == 0:
        return "as fast and as small: the simpler one was taken"
    if slower_s >= 0 and more_bytes >= 0:
        return f"{seconds_text(slower_s)} slower and holds {bytes_text(more_bytes)} more"
    if slower_s >= 0:
        return f"{seconds_text(slower_s)} slower; its {bytes_text(-more_bytes)} less are not needed"
    return f"holds {bytes_text(more_bytes)} more, which does not fit in every layer"
