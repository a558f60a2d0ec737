"""Writes the chosen strategy down as a Plan."""

import math
from dataclasses import dataclass

from meshfold import __version__
from meshfold.cluster import ClusterSpec
from meshfold.mesh import Mesh
from meshfold.opgraph import FoldedGraph, SlotKind
from meshfold.options import CompileOptions
from meshfold.passes.fold_assemble import fingerprint, graph_fingerprint
from meshfold.passes.parameter_prices import local_bytes
from meshfold.passes.region_price import layouts_of_values
from meshfold.passes.uniform_search import ProgramTyping
from meshfold.plan import (
    Candidate,
    MemoryEstimate,
    ModelInfo,
    ParameterPlacement,
    Plan,
    RegionPlan,
    RunPlan,
    SearchStats,
    StagePlan,
    TimeEstimate,
)
from meshfold.strategy import RegionTyping, UniformStrategy


@dataclass(frozen=True)
class Chosen:
    """A strategy with everything known about it; saved_bytes: per region."""

    strategy: UniformStrategy
    mesh: Mesh
    program: ProgramTyping
    time: TimeEstimate
    memory: MemoryEstimate
    saved_bytes: tuple[int, ...]


def assemble_plan(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    options: CompileOptions,
    chosen: Chosen,
    *,
    model_name: str,
    batch_size: int,
    baselines: tuple[Candidate, ...],
    stats: SearchStats,
    notes: tuple[str, ...],
) -> Plan:
    """The plan that runs `chosen`."""
    regions = folded.regions
    return Plan(
        model=_model_info(folded, model_name, batch_size),
        cluster=cluster,
        mesh=chosen.mesh,
        strategy=chosen.strategy,
        pins=dict(options.pins),
        optimizer=options.optimizer,
        seed=options.seed,
        regions=tuple(_region_plan(folded, r, chosen) for r in range(len(regions))),
        stages=(
            StagePlan(tuple(RunPlan(regions[r].name, first, n) for r, first, n in folded.runs)),
        ),
        memory=chosen.memory,
        time=chosen.time,
        baselines=baselines,
        search=stats,
        meshfold_version=__version__,
        notes=(*folded.notes, *chosen.program.notes, *notes),
    )


def _model_info(folded: FoldedGraph, name: str, batch_size: int) -> ModelInfo:
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(folded),
        num_parameters=sum(math.prod(p.shape) for p in folded.parameters),
        num_ops=folded.num_ops,
        num_distinct_ops=sum(len(region.graph.ops) for region in folded.regions),
        inputs=tuple((i.name, i.shape, i.dtype) for i in folded.inputs),
        batch_size=batch_size,
    )


def _region_plan(folded: FoldedGraph, r: int, chosen: Chosen) -> RegionPlan:
    region = folded.regions[r]
    typing, price = chosen.program.typings[r], chosen.program.prices[r]
    instances = [i for i in folded.instances if i.region == r]
    return RegionPlan(
        name=region.name,
        fingerprint=graph_fingerprint(region.graph),
        num_instances=len(instances),
        example_scope=instances[0].scope,
        typing=typing,
        parameters=_placements(folded, r, typing, chosen.mesh),
        conversions=price.conversions,
        fallback_ops=chosen.program.fallback_ops[r],
        forward_s=price.forward_s,
        backward_s=price.backward_s,
        communication_s=price.total_communication_s,
        saved_bytes=chosen.saved_bytes[r],
        op_targets=tuple(op.target for op in region.graph.ops),
        slot_names=tuple(slot.name for slot in region.graph.slots),
    )


def _placements(
    folded: FoldedGraph, r: int, typing: RegionTyping, mesh: Mesh
) -> tuple[ParameterPlacement, ...]:
    graph = folded.regions[r].graph
    out = []
    for i, (stored, demands) in enumerate(layouts_of_values(graph, typing)[: len(graph.slots)]):
        if graph.slots[i].kind is not SlotKind.PARAMETER:
            continue
        value = graph.values[i]
        out.append(
            ParameterPlacement(
                name=graph.slots[i].name,
                shape=value.shape,
                dtype=value.dtype,
                stored=stored,
                used=demands[0] if demands else stored,
                num_bytes=local_bytes(value, stored, mesh.sizes),
            )
        )
    return tuple(out)
