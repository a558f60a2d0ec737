"""The Plan of a pipeline: mesh, stages with their runs, costs of the worst stage.

Its program is typed on the mesh of one stage (pipeline/simulated.py); on the pp axis nothing is
shared and every type is Invariant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from meshfold._version import __version__
from meshfold.ir.mesh import Mesh
from meshfold.ir.plan import (
    Alternative,
    ConversionRecord,
    ModelInfo,
    Plan,
    PricedStrategy,
    RegionPlan,
    SearchStats,
    StageCosts,
    StagePlan,
    TimeEstimate,
)
from meshfold.ir.spmd import INVARIANT, Layout
from meshfold.ir.step_events import SimulatedStep
from meshfold.ir.strategy import KeptResults, OpTyping, RegionTyping
from meshfold.passes.fold.assemble import graph_fingerprint
from meshfold.passes.graph.variants import most_used
from meshfold.passes.pipeline.device_memory import device_memory, microbatch_bytes
from meshfold.passes.pipeline.layers import StrategyCosts
from meshfold.passes.pipeline.search import PricedPipeline
from meshfold.passes.pipeline.simulated import TypedPipeline
from meshfold.passes.planner.assembly import losers, runs_of
from meshfold.passes.planner.check import placements

T = TypeVar("T")


def assemble_pipeline(
    typed: TypedPipeline,
    *,
    model: ModelInfo,
    pieces: tuple[int, ...],
    baselines: tuple[PricedStrategy, ...],
    stats: SearchStats,
    notes: tuple[str, ...],
) -> Plan:
    """The plan of a pipeline. model: that was captured; pieces: ops of each layer if it was cut."""
    problems, found = typed.problems, typed.found
    writer = _Writer(typed)
    options = problems.options
    return Plan(
        model=model,
        cluster=problems.cluster,
        mesh=writer.mesh,
        strategy=most_used(
            typed.split, [typed.choices[r].layer_costs.strategy for r in range(len(typed.choices))]
        ),
        pins=dict(options.pins),
        optimizer=options.optimizer,
        seed=options.seed,
        precision=options.captured_precision,
        mode="eager" if found.plan.schedule.splits_backward else options.modes[0],
        asked_mode=options.mode,
        regions=tuple(writer.region(r) for r in range(len(writer.split.regions))),
        stages=tuple(writer.stage(s) for s in range(len(found.plan.stages))),
        memory=max(writer.memories, key=lambda memory: memory.peak),
        time=step_time(found),
        baselines=baselines,
        search=stats,
        meshfold_version=__version__,
        notes=(*problems.folded.notes, *writer.search.slack_notes(), *notes),
        schedule=str(found.plan.schedule),
        pieces=pieces,
        simulated=writer.simulated_step(),
    )


def _of_device(
    found: PricedPipeline, needs: Sequence[float]
) -> tuple[tuple[int, ...], list[StrategyCosts]]:
    """Numbers of the stages and the layers of the device that needs most, the first of several."""
    worst = max(range(len(needs)), key=lambda i: (needs[i], -i))
    numbers = found.plan.schedule.stages_of(worst)
    stages = [found.plan.stages[s] for s in numbers]
    return numbers, [x for stage in stages for x in found.layers[stage.first : stage.end]]


def step_time(found: PricedPipeline) -> TimeEstimate:
    """The step by component, of the device that ends last."""
    problem, m = found.problem, found.problem.degrees.microbatches
    numbers, layers = _of_device(found, found.device_s)
    forward_s = m * sum(x.compute_forward_s for x in layers)
    backward_s = m * sum(x.compute_backward_s for x in layers)
    stages = found.plan.stages
    busy_s = m * sum(stages[s].forward_s + stages[s].backward_s for s in numbers)
    exposed_s = sum(x.exposed_s + x.tied_s + x.loss_s for x in layers)
    optimizer_s = sum(x.optimizer_s for x in layers) + problem.launch_s
    exposed_s += max(0.0, busy_s - forward_s - backward_s)
    crosses = found.plan.schedule.crosses_devices
    entries = (b for s in numbers for b in (s, s + 1) if crosses(b))
    hops_s = m * sum(problem.chain.hop_s[stages[b].first] for b in entries)
    by_axis = {
        name: m * sum(x.graph_s.get(name, 0.0) for x in layers) for name in problem.mesh.names
    }
    if "pp" in by_axis:
        by_axis["pp"] = 2 * float(hops_s) + sum(x.tied_s for x in layers)
    if data := _data_axis(problem.mesh):
        by_axis[data] += sum(
            m * (2 * x.gather_s + x.shard_reduce_s) + x.once_s + x.loss_s for x in layers
        )
    work_s = forward_s + backward_s + exposed_s + optimizer_s
    return TimeEstimate(
        forward_s=forward_s,
        backward_s=backward_s,
        exposed_communication_s=exposed_s,
        optimizer_s=optimizer_s,
        communication_s=by_axis,
        bubble_s=max(0.0, found.step_s - work_s),
    )


def _data_axis(mesh: Mesh) -> str:
    """The axis that gathers and reductions of parameters are put down to: the outermost of those
    that shard the batch, or tp."""
    return next((name for name in mesh.names if name != "pp"), "")


class _Writer:
    def __init__(self, typed: TypedPipeline) -> None:
        self.problems, self.found = typed.problems, typed.found
        self.typed = typed
        self.mesh = self.found.problem.mesh
        self.split, self.choices = typed.split, typed.choices
        self.search, self.program = typed.search, typed.program
        devices = range(self.found.plan.schedule.num_devices)
        self.memories = [device_memory(typed, device) for device in devices]

    def simulated_step(self) -> SimulatedStep:
        """As of the search, with the peak that the plan states."""
        peak_bytes = max(memory.peak for memory in self.memories)
        return replace(self.typed.simulated_step(), peak_bytes=peak_bytes)

    def stage(self, number: int) -> StagePlan:
        """A stage's runs and costs."""
        stage = self.found.plan.stages[number]
        schedule, hop_s = self.found.plan.schedule, self.found.problem.chain.hop_s
        device = schedule.device_of(number)
        layer_costs = StageCosts(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            sync_s=stage.sync_s,
            end_s=self.found.device_s[device],
            in_flight=stage.in_flight,
            peak_bytes=self.memories[device].peak,
            memory=self.memories[device],
            microbatch_bytes=microbatch_bytes(self.typed, number),
            weight_s=stage.weight_s if schedule.splits_backward else 0.0,
            hop_s=float(hop_s[stage.first]) if number else 0.0,
        )
        return StagePlan(runs_of(self.split, range(stage.first, stage.end)), layer_costs)

    def region(self, r: int) -> RegionPlan:
        """What one region of the split graph does."""
        region, choice = self.split.regions[r], self.choices[r]
        instances = [i for i in self.split.instances if i.region == r]
        typing = self._typing(r)
        strategy, taken = choice.layer_costs.strategy, self._alternative(choice.layer_costs)
        others = [
            self._alternative(x)
            for (region, _), x in self.found.problem.layer_costs.items()
            if region == choice.region and x.strategy != strategy
        ]
        return RegionPlan(
            name=region.name,
            fingerprint=graph_fingerprint(self.problems.folded.regions[choice.region].graph),
            num_instances=len(instances),
            example_scope=instances[0].scope,
            typing=typing,
            parameters=placements(region.graph, typing, self.mesh),
            conversions=tuple(map(self._record, self.typed.conversions(r))),
            fallback_ops=self.search.fallback_ops[choice.region],
            forward_s=choice.layer_costs.compute_forward_s,
            backward_s=choice.layer_costs.compute_backward_s,
            communication_s=self._communication_s(choice.layer_costs),
            saved_bytes=choice.layer_costs.activation_bytes,
            strategy=strategy,
            choice=taken,
            alternatives=losers(taken, others),
            op_targets=tuple(op.target for op in region.graph.ops),
            slot_names=tuple(slot.name for slot in region.graph.slots),
        )

    def _communication_s(self, layer_costs: StrategyCosts) -> Mapping[str, float]:
        """Seconds by axis of one microbatch; reductions once per step are the stage's sync_s."""
        by_axis = {name: layer_costs.graph_s.get(name, 0.0) for name in self.mesh.names}
        if data := _data_axis(self.mesh):
            by_axis[data] += 2 * layer_costs.gather_s + layer_costs.shard_reduce_s
        return by_axis

    def _alternative(self, layer_costs: StrategyCosts) -> Alternative:
        m = self.found.problem.degrees.microbatches
        return Alternative(
            layer_costs.strategy.label,
            m * (layer_costs.forward_s + layer_costs.backward_s) + layer_costs.sync_s,
            layer_costs.state_bytes + layer_costs.activation_bytes,
            "taken",
        )

    # Types on the whole mesh.

    def _typing(self, region: int) -> RegionTyping:
        typing = self.typed.typings[region]
        return replace(
            typing,
            slots=self._on_mesh(typing.slots),
            ops=tuple(
                OpTyping(
                    (*self._prefix("I"), *op.rules),
                    self._on_mesh(op.inputs),
                    self._on_mesh(op.outputs),
                )
                for op in typing.ops
            ),
            outputs=self._on_mesh(typing.outputs),
            kept=self._kept(typing.kept),
        )

    def _kept(self, kept: KeptResults) -> KeptResults:
        values = [v for v, _ in kept.conversions]
        layouts = self._on_mesh([layout for _, layout in kept.conversions])
        return KeptResults(kept.ops, tuple(zip(values, layouts, strict=True)))

    def _on_mesh(self, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        return tuple((*self._prefix(INVARIANT), *layout) for layout in layouts)

    def _prefix(self, entry: T) -> tuple[T, ...]:
        """What stands for the pp axis, if there is one."""
        return (entry,) if self.mesh.names[:1] == ("pp",) else ()

    def _record(self, record: ConversionRecord) -> ConversionRecord:
        source, target = self._on_mesh((record.source, record.target))
        return replace(record, source=source, target=target)
