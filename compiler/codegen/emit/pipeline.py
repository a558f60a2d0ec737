"""The emitted pipeline: the program of every stage, and in which order devices run them.

    captured graph --microbatches--> graph of one microbatch   (passes/split/microbatch.py)
                   --plan----------> typed regions             (passes/graph/variants.py)
                   --stages--------> a program per stage       (passes/split/stage_graphs.py,
                                                               codegen/emit/region.py)

All ranks emit all stages, so that `digest` covers the whole pipeline; a rank runs the stages of its
device, its coordinate on the axis pp. meshfold.runtime.pipeline_runner runs them.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.codegen.emit.check_program import check_program
from meshfold.codegen.emit.pass_pipeline import Watch, bucketed, emit
from meshfold.codegen.emit.region import check_runs, emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.program.text import rank_text
from meshfold.codegen.schedule.list_scheduling import scheduled
from meshfold.codegen.schedule.split_backward import split_backward
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.pipeline.action_checks import check_actions
from meshfold.cost_models.pipeline.actions import ActionLists, actions_text
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import OptionError, PlanMismatchError
from meshfold.ir.mesh import PIPELINE_AXIS, Mesh
from meshfold.ir.node_groups import NodeLevels
from meshfold.ir.op_graph import Dependence, FoldedGraph, SourceKind
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import Layout
from meshfold.passes.graph.variants import (
    offloaded_parameters,
    parameters_by_layer,
    planned_graph,
)
from meshfold.passes.planner.plan_types import check_plan_types
from meshfold.passes.split.as_planned import as_planned
from meshfold.passes.split.loss_counts import LossCount, loss_counts
from meshfold.passes.split.loss_sums import pending_axes
from meshfold.passes.split.microbatch import MicrobatchGraphs, has_own_statistics
from meshfold.passes.split.pieces import cut_as
from meshfold.passes.split.stage_graphs import StageGraph, stage_graphs


@dataclass(frozen=True)
class EmittedPipeline:
    """A pipeline of `mesh`. folded: the full batch's graph, in the pieces of the plan. graphs,
    stages: per stage its graph and its program. input_layouts: per input its layout over the
    microbatches; output_layouts: of every output but the loss. counts: the means over targets of
    `folded`; their instances are numbered as captured."""

    folded: FoldedGraph
    mesh: Mesh
    schedule: Schedule
    graphs: tuple[StageGraph, ...]
    stages: tuple[EmittedProgram, ...]
    input_layouts: Mapping[str, Layout]
    output_layouts: tuple[Layout, ...]
    counts: tuple[LossCount, ...]

    @cached_property
    def actions(self) -> ActionLists:
        """What each device runs, in order; checked to run to its end."""
        actions = self.schedule.actions()
        check_actions(actions, self.schedule)
        return actions

    def device_of(self, coords: tuple[int, ...]) -> int:
        """The device of the pipeline that a rank belongs to."""
        names = self.mesh.names
        return coords[names.index(PIPELINE_AXIS)] if PIPELINE_AXIS in names else 0

    def stage_programs(self, coords: tuple[int, ...]) -> tuple[EmittedProgram, ...]:
        """The programs that a rank runs."""
        return tuple(self.stages[s] for s in self.schedule.stages_of(self.device_of(coords)))

    @cached_property
    def stored(self) -> Mapping[str, Layout]:
        """Layout in which each parameter lives between steps, on the ranks of its stages."""
        return {name: layout for stage in self.stages for name, layout in stage.stored.items()}

    @cached_property
    def updates_once(self) -> bool:
        """Whether a step updates buffers once, as the whole batch does, and not with every
        microbatch: no update depends on samples."""
        return not any(
            region.graph.values[value].depends is Dependence.BATCH
            for region in self.folded.regions
            for _, value in region.graph.mutations
        )

    @property
    def levels(self) -> NodeLevels:
        """The levels of its mesh, see EmittedProgram.levels."""
        return self.stages[0].levels

    @property
    def unsharded(self) -> Layout:
        """Invariant on every axis."""
        return self.stages[0].unsharded

    @property
    def offloaded(self) -> frozenset[str]:
        """As of EmittedProgram, of all stages."""
        return frozenset[str]().union(*(stage.offloaded for stage in self.stages))

    @property
    def by_layer(self) -> frozenset[str]:
        """As of EmittedProgram, of all stages."""
        return frozenset[str]().union(*(stage.by_layer for stage in self.stages))

    @property
    def counted_buffers(self) -> frozenset[str]:
        """The buffers that targets are counted by."""
        return frozenset[str]().union(*(count.buffers for count in self.counts))

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The devices that hold each parameter and buffer, ascending, by name."""
        found: dict[str, set[int]] = {}
        for s, stage in enumerate(self.stages):
            names = [p.name for p in stage.folded.parameters]
            names += [b.name for b in stage.folded.buffers]
            for name in names:
                found.setdefault(name, set()).add(self.schedule.device_of(s))
        return {name: tuple(sorted(devices)) for name, devices in found.items()}

    @cached_property
    def digest(self) -> str:
        """Hash of everything that all ranks must agree on."""
        digests = (stage.digest for stage in self.stages)
        lines = [str(self.schedule), *digests, *self._stage_boundaries()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over which the loss is summed once per step: microbatches leave it a pending
        sum on them."""
        last = self.stages[-1]
        source = last.folded.outputs[0].source
        if not self.folded.returns.has_loss or source.kind is not SourceKind.VALUE:
            return ()
        typing = last.typings[last.folded.instances[source.instance].region]
        return pending_axes(typing.outputs[source.output], self.mesh.names)

    def axis_sets(self) -> tuple[tuple[str, ...], ...]:
        """The sets of axes that the program communicates over as one group, in a fixed order."""
        found = {axes for stage in self.stages for axes in stage.axis_sets()}
        return tuple(sorted(found | ({self.loss_axes} if self.loss_axes else set())))

    def text(self, rank: int = 0) -> str:
        """The programs as `rank` runs them. Raises ValueError if the mesh has no such rank."""
        lines = [*rank_text(self.levels, rank, self.axis_sets())]
        device = self.device_of(self.mesh.coords(rank))
        lines.append(f"schedule {self.schedule}, device {device}")
        lines.append(f"  {actions_text(self.actions).splitlines()[device]}")
        boundaries = list(self._stage_boundaries())
        for s in self.schedule.stages_of(device):
            lines += [boundaries[s], *self.stages[s].body()]
        return "\n".join(lines)

    def _stage_boundaries(self) -> Iterator[str]:
        for s, graph in enumerate(self.graphs):
            arrives, leaves = (
                ", ".join(b.name for b in values) or "nothing"
                for values in (graph.arrives, graph.leaves)
            )
            yield f"stage {s}: takes over {arrives}, hands on {leaves}"


def emit_plan(
    folded: FoldedGraph, plan: Plan, watch: Watch | None = None
) -> EmittedProgram | EmittedPipeline:
    """The program of every rank of `plan.mesh`. watch: sees the passes of a step in one pass.

    Raises PlanMismatchError if the plan's regions or stages are not those of `folded`, if its types
    break the tables, or if it uses what can be planned but not run; OptionError where the batch
    cannot be split.
    """
    folded = as_planned(folded, plan)
    if plan.schedule:
        return emit_pipeline(folded, plan)
    check_runs(plan)
    check_plan_types(planned_graph(folded, plan), plan)
    return emit(folded, plan, watch)


def _counting(stage: StageGraph, whole: FoldedGraph, counts: Sequence[LossCount]) -> StageGraph:
    """A stage with the buffers that its losses count their targets by, wherever ops read them."""
    own = [count for count in counts if count.op[0] in stage.numbers]
    names = frozenset[str]().union(*(count.buffers for count in own))
    names |= {b.name for b in stage.folded.buffers}
    buffers = tuple(b for b in whole.buffers if b.name in names)
    return replace(stage, folded=replace(stage.folded, buffers=buffers))


def emit_pipeline(folded: FoldedGraph, plan: Plan) -> EmittedPipeline:
    """The programs of a plan with stages or microbatches; raises as emit_plan does."""
    check_runs(plan)
    schedule = _schedule(plan)
    num_microbatches = schedule.num_microbatches
    pieces = cut_as(folded, plan.pieces)
    folded = pieces.folded
    per_microbatch = has_own_statistics(plan.pins)
    graphs = MicrobatchGraphs(
        folded, plan.cluster, plan.model.batch_size, per_microbatch=per_microbatch
    )
    planned = planned_graph(graphs.graph(num_microbatches), plan)
    typings = [region.typing for region in plan.regions]
    check_plan_types(planned, plan)
    costs = CostModel(plan.cluster, plan.mesh)
    found = loss_counts(folded) if num_microbatches > 1 else ()
    starts = [stage.runs[0].first for stage in plan.stages]
    by_stage = tuple(_counting(s, folded, found) for s in stage_graphs(planned, typings, starts))
    stages = tuple(
        emit_typed(
            stage.folded,
            stage.typings,
            costs,
            tuple(pieces.numbers[k] for k in stage.numbers),
            {value.name: value.layout for value in stage.arrives},
        )
        for stage in by_stage
    )
    stages = _placed(stages, planned, plan)
    if plan.mode == "scheduled":
        stages = tuple(
            scheduled(stage, costs, _free_bytes(plan, s)) for s, stage in enumerate(stages)
        )
    for stage in stages:
        check_program(stage, "schedule" if plan.mode == "scheduled" else "emit")
    if schedule.splits_backward:
        for stage in stages:
            for region in stage.regions:
                split_backward(region.graph, stage.folded.regions[region.region].graph)
    inputs = graphs.input_layouts() if num_microbatches > 1 else {}
    return EmittedPipeline(
        folded,
        plan.mesh,
        schedule,
        by_stage,
        stages,
        inputs,
        graphs.output_layouts(),
        tuple(replace(c, op=(pieces.numbers[c.op[0]], c.op[1])) for c in found),
    )


def _placed(
    stages: tuple[EmittedProgram, ...], planned: FoldedGraph, plan: Plan
) -> tuple[EmittedProgram, ...]:
    """The stages with the plan's buckets, and with what it stores on the host."""
    offloaded, by_layer = offloaded_parameters(planned, plan), parameters_by_layer(planned, plan)
    return tuple(
        replace(
            bucketed(stage, plan),
            offloaded=offloaded.intersection(stage.stored),
            by_layer=by_layer.intersection(stage.stored),
        )
        for stage in stages
    )


def _free_bytes(plan: Plan, stage: int) -> int:
    """Bytes that the plan leaves free on the device of a stage. Weight gradients are deferred
    within their region's backward only, in which no other action runs."""
    costs = plan.stages[stage].costs
    return max(0, plan.memory.capacity - costs.peak_bytes) if costs else 0


def _schedule(plan: Plan) -> Schedule:
    """The plan's schedule, checked against its mode, stages and mesh."""
    try:
        schedule = Schedule.parse(plan.schedule)
    except OptionError as error:
        raise PlanMismatchError(f"the plan's schedule: {error}") from error
    if plan.mode == "scheduled" and schedule.splits_backward:
        raise PlanMismatchError(
            f"mode scheduled: the schedule {schedule} splits the backward itself; write mode "
            "eager, or plan again"
        )
    names = plan.mesh.names
    devices = plan.mesh.sizes[names.index(PIPELINE_AXIS)] if PIPELINE_AXIS in names else 1
    if (schedule.num_devices, schedule.num_stages) != (devices, len(plan.stages)):
        raise PlanMismatchError(
            f"the plan has {len(plan.stages)} stages on {devices} devices, its schedule {schedule} "
            f"{schedule.num_stages} on {schedule.num_devices}; plan again"
        )
    empty = next((s for s, stage in enumerate(plan.stages) if not stage.runs), None)
    if empty is not None:
        raise PlanMismatchError(f"stage {empty} of the plan has no layer; plan again")
    return schedule
