"""meshfold.ir.plan <-> meshfold.plan_file.schema: a plan as a document, and a checked document as a plan.

plan_from_document checks what a schema cannot say: figures that follow from others, layouts with
one type per mesh axis, runs of regions that exist. It raises PlanFormatError with the JSON path.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from meshfold.errors import ClusterSpecError, PlanFormatError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.plan import (
    Alternative,
    Candidate,
    ConversionRecord,
    MemoryEstimate,
    MeshOutcome,
    ModelInfo,
    ParameterPlacement,
    Plan,
    RegionPlan,
    RunPlan,
    SearchStats,
    StageFigures,
    StagePlan,
    TimeEstimate,
)
from meshfold.ir.strategy import Parts, RegionTyping, UniformStrategy
from meshfold.plan_file.cluster_file import ClusterModel, cluster_model
from meshfold.plan_file.schema import (
    AlternativeDocument,
    AxisDocument,
    CandidateDocument,
    ConversionDocument,
    InputDocument,
    MemoryDocument,
    ModelDocument,
    ParameterDocument,
    PlanDocument,
    RegionDocument,
    SearchDocument,
    StageDocument,
    StrategyDocument,
    TimeDocument,
)
from meshfold.plan_file.text import (
    names_or_none,
    read_layout,
    read_op,
    read_slot,
    write_layout,
    write_op,
    write_slot,
)
from meshfold.simulation_document import (
    SimulationDocument,
    simulation_document,
    simulation_of,
)

T = TypeVar("T")


def plan_document(plan: Plan) -> PlanDocument:
    """The plan as a document. Raises pydantic.ValidationError for a plan that no file can hold."""
    return PlanDocument(
        version=plan.version,  # type: ignore[arg-type]  # checked by the document
        meshfold_version=plan.meshfold_version,
        model=_model_document(plan.model),
        strategy=_strategy_document(plan.strategy),
        mesh=tuple(AxisDocument(**asdict(axis)) for axis in plan.mesh.axes),
        time=_time_document(plan.time),
        memory=_memory_document(plan.memory),
        notes=plan.notes,
        baselines=tuple(_candidate_document(c) for c in plan.baselines),
        search=_search_document(plan),
        pins=dict(plan.pins),
        optimizer=plan.optimizer,
        seed=plan.seed,
        precision=plan.precision,
        mode=plan.mode,
        schedule=plan.schedule,
        merge_bytes=plan.merge_bytes,
        merge_gather_bytes=plan.merge_gather_bytes,
        hierarchy_bytes=plan.hierarchy_bytes,
        stages=tuple(StageDocument(**asdict(stage)) for stage in plan.stages),
        regions=tuple(_region_document(region) for region in plan.regions),
        cluster=cluster_model(plan.cluster),
        simulation=_simulation_document(plan),
    )


def _simulation_document(plan: Plan) -> SimulationDocument | None:
    if plan.simulated is None or plan.events is None:
        return None
    return simulation_document(plan.simulated, plan.events)


def _model_document(model: ModelInfo) -> ModelDocument:
    inputs = tuple(InputDocument(name=n, shape=s, dtype=d) for n, s, d in model.inputs)
    return ModelDocument(**{**asdict(model), "inputs": inputs})


def _strategy_document(strategy: UniformStrategy) -> StrategyDocument:
    return StrategyDocument(label=strategy.label, **asdict(strategy))


def _search_document(plan: Plan) -> SearchDocument:
    gap = plan.gap if math.isfinite(plan.gap) else None
    return SearchDocument(**{**asdict(plan.search), "cuts": dict(plan.search.cuts), "gap": gap})


def _time_document(time: TimeEstimate) -> TimeDocument:
    return TimeDocument(
        step_s=time.step_s,
        forward_s=time.forward_s,
        backward_s=time.backward_s,
        exposed_communication_s=time.exposed_communication_s,
        optimizer_s=time.optimizer_s,
        bubble_s=time.bubble_s,
        communication_s=dict(time.communication_s),
    )


def _memory_document(memory: MemoryEstimate) -> MemoryDocument:
    components = {f"{name}_bytes": value for name, value in asdict(memory).items()}
    return MemoryDocument(peak_bytes=memory.peak, **components)


def _candidate_document(candidate: Candidate) -> CandidateDocument:
    strategy = _strategy_document(candidate.strategy)
    return CandidateDocument(**{**asdict(candidate), "strategy": strategy})


def _region_document(region: RegionPlan) -> RegionDocument:
    typing = region.typing
    targets = region.op_targets or ("",) * len(typing.ops)
    names = region.slot_names or ("",) * len(typing.slots)
    return RegionDocument(
        name=region.name,
        num_instances=region.num_instances,
        example_scope=region.example_scope,
        fingerprint=region.fingerprint,
        forward_s=region.forward_s,
        backward_s=region.backward_s,
        communication_s=dict(region.communication_s),
        saved_bytes=region.saved_bytes,
        parts=region.parts.count,
        parts_of=region.parts.of,
        ring=region.ring,
        strategy=_strategy_document(region.strategy),
        choice=AlternativeDocument(**asdict(region.choice)),
        alternatives=tuple(AlternativeDocument(**asdict(a)) for a in region.alternatives),
        fallback_ops=region.fallback_ops,
        parameters=tuple(_parameter_document(p) for p in region.parameters),
        conversions=tuple(_conversion_document(c) for c in region.conversions),
        slots=tuple(write_slot(n, s) for n, s in zip(names, typing.slots, strict=True)),
        ops=tuple(write_op(t, op) for t, op in zip(targets, typing.ops, strict=True)),
        outputs=tuple(write_layout(layout) for layout in typing.outputs),
    )


def _parameter_document(parameter: ParameterPlacement) -> ParameterDocument:
    return ParameterDocument(
        name=parameter.name,
        shape=parameter.shape,
        dtype=parameter.dtype,
        stored=write_layout(parameter.stored),
        used=write_layout(parameter.used),
        num_bytes=parameter.num_bytes,
    )


def _conversion_document(record: ConversionRecord) -> ConversionDocument:
    return ConversionDocument(
        value=record.value,
        kind=record.kind,  # type: ignore[arg-type]  # checked by the document
        source=write_layout(record.source),
        target=write_layout(record.target),
        forward=record.forward,
        backward=record.backward,
        num_bytes=record.num_bytes,
        forward_s=record.forward_s,
        backward_s=record.backward_s,
    )


def plan_from_document(document: PlanDocument) -> Plan:
    """The plan that a document holds. Raises PlanFormatError with the JSON path."""
    axes = tuple(MeshAxis(**axis.model_dump()) for axis in document.mesh)
    mesh = _at("mesh", lambda: Mesh(axes))
    regions = tuple(
        _region(region, f"regions[{k}]", len(axes)) for k, region in enumerate(document.regions)
    )
    step, events = simulation_of(document.simulation) if document.simulation else (None, None)
    plan = Plan(
        model=_model(document.model),
        cluster=_cluster(document.cluster),
        mesh=mesh,
        strategy=_strategy(document.strategy, "strategy"),
        pins=document.pins,
        optimizer=document.optimizer,
        seed=document.seed,
        precision=document.precision,
        mode=document.mode,
        regions=regions,
        stages=_stages(document.stages, {region.name for region in regions}),
        memory=_memory(document.memory),
        time=_time(document.time),
        baselines=tuple(
            _candidate(candidate, f"baselines[{k}]")
            for k, candidate in enumerate(document.baselines)
        ),
        search=_search(document.search),
        meshfold_version=document.meshfold_version,
        version=document.version,
        notes=document.notes,
        schedule=document.schedule,
        merge_bytes=document.merge_bytes,
        merge_gather_bytes=document.merge_gather_bytes,
        hierarchy_bytes=document.hierarchy_bytes,
        simulated=step,
        events=events,
    )
    if document.search.gap is not None:
        _follows("search.gap", document.search.gap, plan.gap)
    return plan


def _search(document: SearchDocument) -> SearchStats:
    meshes = tuple(MeshOutcome(**m.model_dump()) for m in document.meshes)
    return SearchStats(**{**document.model_dump(exclude={"gap"}), "meshes": meshes})


def _at(path: str, read: Callable[[], T]) -> T:
    """Runs `read`; a ValueError of it becomes a PlanFormatError at the JSON path."""
    try:
        return read()
    except ValueError as error:
        raise PlanFormatError(f"{path}: {error}") from error


def _each(
    path: str, lines: tuple[str, ...], read: Callable[[str, int], T], num_axes: int
) -> tuple[T, ...]:
    return tuple(_at(f"{path}[{k}]", partial(read, line, num_axes)) for k, line in enumerate(lines))


def _follows(path: str, found: object, expected: object) -> None:
    """Refuses a figure that contradicts those it follows from."""
    if found != expected:
        raise PlanFormatError(
            f"{path}: the file says {found!r}, its parts give {expected!r}; "
            "edit both or make the plan anew"
        )


def _cluster(document: ClusterModel) -> ClusterSpec:
    try:
        return document.spec()
    except ClusterSpecError as error:
        raise PlanFormatError(f"cluster.{error}") from error


def _model(document: ModelDocument) -> ModelInfo:
    inputs = tuple((i.name, i.shape, i.dtype) for i in document.inputs)
    return ModelInfo(**{**document.model_dump(), "inputs": inputs})


def _strategy(document: StrategyDocument, path: str) -> UniformStrategy:
    strategy = UniformStrategy(**document.model_dump(exclude={"label"}))
    _follows(f"{path}.label", document.label, strategy.label)
    return strategy


def _time(document: TimeDocument) -> TimeEstimate:
    time = TimeEstimate(**document.model_dump(exclude={"step_s"}))
    _follows("time.step_s", document.step_s, time.step_s)
    return time


def _memory(document: MemoryDocument) -> MemoryEstimate:
    components = document.model_dump(exclude={"peak_bytes"})
    memory = MemoryEstimate(**{k.removesuffix("_bytes"): v for k, v in components.items()})
    _follows("memory.peak_bytes", document.peak_bytes, memory.peak)
    return memory


def _candidate(document: CandidateDocument, path: str) -> Candidate:
    strategy = _strategy(document.strategy, f"{path}.strategy")
    return Candidate(**{**document.model_dump(), "strategy": strategy})


def _stages(documents: tuple[StageDocument, ...], regions: set[str]) -> tuple[StagePlan, ...]:
    for s, stage in enumerate(documents):
        for r, run in enumerate(stage.runs):
            if run.region not in regions:
                raise PlanFormatError(
                    f"stages[{s}].runs[{r}].region: no region {run.region!r} in this plan; "
                    f"it has {', '.join(sorted(regions))}"
                )
    return tuple(_stage(stage) for stage in documents)


def _stage(document: StageDocument) -> StagePlan:
    runs = tuple(RunPlan(**run.model_dump()) for run in document.runs)
    if document.figures is None:
        return StagePlan(runs)
    return StagePlan(runs, StageFigures(**document.figures.model_dump()))


def _region(document: RegionDocument, path: str, num_axes: int) -> RegionPlan:
    slots = _each(f"{path}.slots", document.slots, read_slot, num_axes)
    ops = _each(f"{path}.ops", document.ops, read_op, num_axes)
    outputs = _each(f"{path}.outputs", document.outputs, read_layout, num_axes)
    strategy = _strategy(document.strategy, f"{path}.strategy")
    return RegionPlan(
        name=document.name,
        fingerprint=document.fingerprint,
        num_instances=document.num_instances,
        example_scope=document.example_scope,
        typing=RegionTyping(
            slots=tuple(layout for _, layout in slots),
            ops=tuple(typing for _, typing in ops),
            outputs=outputs,
            recompute=strategy.recompute,
            keeps_gathered=strategy.keeps_gathered,
            whole_gradients=strategy.whole_gradients,
        ),
        parameters=tuple(
            _parameter(p, f"{path}.parameters[{k}]", num_axes)
            for k, p in enumerate(document.parameters)
        ),
        conversions=tuple(
            _conversion(c, f"{path}.conversions[{k}]", num_axes)
            for k, c in enumerate(document.conversions)
        ),
        fallback_ops=document.fallback_ops,
        forward_s=document.forward_s,
        backward_s=document.backward_s,
        communication_s=document.communication_s,
        saved_bytes=document.saved_bytes,
        strategy=_strategy(document.strategy, f"{path}.strategy"),
        choice=Alternative(**document.choice.model_dump()),
        alternatives=tuple(Alternative(**a.model_dump()) for a in document.alternatives),
        op_targets=names_or_none(target for target, _ in ops),
        slot_names=names_or_none(name for name, _ in slots),
        parts=Parts(document.parts, document.parts_of),
        ring=document.ring,
    )


def _parameter(document: ParameterDocument, path: str, num_axes: int) -> ParameterPlacement:
    layouts = {
        "stored": _at(f"{path}.stored", lambda: read_layout(document.stored, num_axes)),
        "used": _at(f"{path}.used", lambda: read_layout(document.used, num_axes)),
    }
    return ParameterPlacement(**{**document.model_dump(), **layouts})


def _conversion(document: ConversionDocument, path: str, num_axes: int) -> ConversionRecord:
    layouts = {
        "source": _at(f"{path}.source", lambda: read_layout(document.source, num_axes)),
        "target": _at(f"{path}.target", lambda: read_layout(document.target, num_axes)),
    }
    return ConversionRecord(**{**document.model_dump(), **layouts})
