"""The program of a priced pipeline, typed on the mesh of one stage, and its simulated step.

Layers were priced without the dp axis (layers.py). What is emitted has types on every axis, so the
regions are typed once more here, on dp x ep x cp x tp for the graph of one microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.memory.step_memory import InstanceMemory
from meshfold.cost_models.simulation.pipeline import HostWaits, StageEvents, simulate_pipeline
from meshfold.cost_models.simulation.stage_memory import StageMemory
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import ConversionRecord
from meshfold.ir.step_events import SimulatedStep, StepEvents
from meshfold.ir.strategy import SELECTIVE, KeptResults, RegionTyping
from meshfold.passes.events.bucketing import BucketSizes, bucketed_events
from meshfold.passes.events.stages import StageWriter
from meshfold.passes.graph.reads import program_reads
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.graph.variants import split_regions
from meshfold.passes.memory.put_off import PutOff, put_off
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.memory.zero import sharded_layout
from meshfold.passes.one_pass.shortlist import close_to_best
from meshfold.passes.pipeline.layers import StrategyCosts
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.search import PricedPipeline
from meshfold.passes.price.region import RegionPricer
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.split.loss_sums import loss_place, with_pending_loss
from meshfold.passes.split.stage_crossing import Made, crossing_values


@dataclass(frozen=True)
class RegionChoice:
    """What instances of one region of the split graph do. region: of the graph before."""

    region: int
    layer_costs: StrategyCosts


class TypedPipeline:
    """The program that `found` runs: folded, of one microbatch; split, with a region per choice;
    typings of these, on `mesh`, that of one stage."""

    def __init__(self, problems: PipelineProblems, found: PricedPipeline) -> None:
        degrees = found.problem.degrees
        self.problems = problems
        self.found = found
        self.mesh = build_mesh(problems.cluster, **degrees.degrees.of_mesh)
        self.folded: FoldedGraph = problems.microbatches.graph(degrees.microbatches)
        names = [x.strategy.label for x in found.layers]
        self.split = split_regions(self.folded, names)
        pairs = zip(self.split.instances, self.folded.instances, found.layers, strict=True)
        self.choices = {new.region: RegionChoice(old.region, x) for new, old, x in pairs}
        if degrees not in problems.stage_searches:
            size = problems.batch_size // degrees.microbatches
            of_mesh = MeshSearch(self.folded, problems.cluster, self.mesh, size)
            problems.stage_searches[degrees] = of_mesh
        self.search = problems.stage_searches[degrees]
        self.program = self.search.solve(zero=0, mode=degrees.tp_mode)
        self._loss = loss_place(self.folded)
        self.reads = program_reads(self.split)
        self.stage_memories: dict[int, StageMemory] = {}
        self.typings = tuple(map(self._typing, range(len(self.split.regions))))

    def _typing(self, region: int) -> RegionTyping:
        choice = self.choices[region]
        typing, strategy = self.program.typings[choice.region], choice.layer_costs.strategy
        slots = list(typing.slots)
        if strategy.zero:
            graph = self.folded.regions[choice.region].graph
            for i in self.problems.untied_parameters(choice.region):
                slots[i] = sharded_layout(graph.values[i], slots[i], self.mesh)
        if self._loss is not None and self._loss[0] == choice.region:
            graph = self.folded.regions[choice.region].graph
            typing = with_pending_loss(graph, typing, self._loss[1], self.mesh)
        return replace(
            typing,
            slots=tuple(slots),
            recompute=strategy.recompute,
            reshard_after_forward=strategy.reshard_after_forward,
            accumulate_unsharded=strategy.accumulate_unsharded,
            kept=self._kept(choice, typing),
        )

    def conversions(self, region: int) -> tuple[ConversionRecord, ...]:
        """Of a region of the split graph."""
        of, typing = self.choices[region].region, self.typings[region]
        if typing.outputs == self.program.typings[of].outputs:
            return self.program.prices[of].conversions
        known = self.search.solutions(self.found.problem.degrees.tp_mode)[of].pricer
        pending = replace(self.program.typings[of], ops=typing.ops, outputs=typing.outputs)
        pricer = RegionPricer(known.graph, pending, known.rules, known.costs)
        return pricer.price(pending.slots).conversions

    def _kept(self, choice: RegionChoice, typing: RegionTyping) -> KeptResults:
        """What selective recomputation keeps, chosen without the dp axis, which its conversions
        leave as it is."""
        recompute = choice.layer_costs.strategy.recompute
        if recompute not in SELECTIVE:
            return KeptResults()
        kept = self.found.problem.tables.layers[choice.region].region.kept(recompute)
        layouts = layouts_of_values(self.folded.regions[choice.region].graph, typing)
        conversions = []
        for v, layout in kept.conversions:
            native, _ = layouts[v]
            num_missing = len(native) - len(layout)
            conversions.append((v, (*native[:num_missing], *layout)))
        return KeptResults(kept.ops, tuple(conversions))

    @cached_property
    def put_off(self) -> list[PutOff]:
        """Of every layer, what a schedule that splits the backward keeps for its weights."""
        pairs = zip(self.split.regions, self.typings, strict=True)
        by_region = [put_off(r.graph, typing, self.mesh.sizes) for r, typing in pairs]
        return [by_region[instance.region] for instance in self.split.instances]

    @cached_property
    def crossing(self) -> frozenset[Made]:
        """Values that cross stage boundaries where a later stage reads them."""
        return crossing_values(self.split)

    @cached_property
    def instances(self) -> list[InstanceMemory]:
        """Memory of every layer, on the mesh of a stage."""
        model = MemoryModel(self.search.costs, self.problems.probe)
        return model.instances(self.split, self.typings, reads=self.reads)

    @property
    def is_offloaded(self) -> bool:
        """Whether layers offload."""
        return any(x.strategy.offload != "none" for x in self.found.layers)

    @cached_property
    def _writer(self) -> StageWriter:
        found, degrees = self.found, self.found.problem.degrees
        solutions = self.search.solutions(degrees.tp_mode)
        return StageWriter(
            self.split,
            self.typings,
            [solutions[self.choices[r].region].pricer for r in range(len(self.typings))],
            self.search.costs,
            self.problems.probe,
            first=[stage.first for stage in found.plan.stages],
            num_microbatches=degrees.microbatches,
            splits=found.plan.schedule.splits_backward,
        )

    @cached_property
    def events(self) -> tuple[StageEvents, ...]:
        """What each stage does with a microbatch."""
        splits = self.found.plan.schedule.splits_backward
        found = []
        for events, stage in zip(self._writer.write(), self.found.plan.stages, strict=True):
            layers = self.found.layers[stage.first : stage.end]
            added_s = sum(x.added_s for x in layers)
            found.append(
                replace(
                    events,
                    edge=self._in_buckets(events.edge),
                    inner=self._in_buckets(events.inner),
                    weight_s=stage.weight_s - added_s if splits else 0.0,
                    tied_s=sum(x.tied_s for x in layers),
                    loss_s=sum(x.loss_s for x in layers),
                    update_s=sum(x.optimizer_s for x in layers),
                    host=_host_waits(layers),
                    added_s=added_s,
                )
            )
        return tuple(found)

    @cached_property
    def first_events(self) -> tuple[StepEvents, ...]:
        """What each stage does with a microbatch whose backward is the first."""
        written = self._writer.write_first()
        if written is None:
            return tuple(events.inner for events in self.events)
        return tuple(map(self._in_buckets, written))

    def _in_buckets(self, events: StepEvents) -> StepEvents:
        options = self.problems.options
        pinned = options.reduce_bucket_pin, options.allgather_bucket_pin
        sizes = BucketSizes(*pinned, options.hierarchical_all_reduce_pin)
        if not any((sizes.reductions, sizes.gathers, sizes.hierarchical)):
            return events
        return bucketed_events(events, sizes, self.search.costs, keeps_last=False)

    def simulated_step(self) -> SimulatedStep:
        """The step of the device that ends last."""
        found, problem = self.found, self.found.problem
        needs = found.plan.memory_bytes
        return simulate_pipeline(
            found.plan.schedule,
            self.events,
            problem.chain.hop_s[[stage.first for stage in found.plan.stages[1:]]],
            launch_s=problem.launch_s,
            peak_bytes=max(needs) + problem.fixed_bytes,
        )


def simulated_step_s(problems: PipelineProblems, found: PricedPipeline) -> float:
    """Seconds of the simulated step of `found`, in some 0.05 CPU seconds."""
    return TypedPipeline(problems, found).simulated_step().step_s


def _host_waits(layers: Sequence[StrategyCosts]) -> HostWaits:
    """Of the layers of a stage: nothing hides what comes for the first of a forward, or of a
    backward."""
    return HostWaits(
        sum(x.waits.forward_s for x in layers) + layers[0].waits.first_s,
        sum(x.waits.backward_s for x in layers) + layers[-1].waits.first_s,
        sum(x.waits.once_s for x in layers),
    )


def rank_pipelines(
    problems: PipelineProblems, found: Sequence[PricedPipeline]
) -> list[tuple[PricedPipeline, float]]:
    """Pipelines of one program with their steps, the best first: by simulated time to four digits,
    then as added up. Those that are close to the best sum are simulated
    (passes/one_pass/shortlist.py), of one stage per device and of several; the others follow with
    their sums."""
    by_sum = sorted(found, key=lambda x: x.step_s)
    close: list[PricedPipeline] = []
    for has_several in (False, True):
        alike = [x for x in by_sum if (x.plan.schedule.num_virtual_stages > 1) == has_several]
        first = [x for x in by_sum[:1] if x not in alike]
        close += close_to_best([*first, *alike], lambda x: x.step_s)
    steps = [(x, simulated_step_s(problems, x)) for x in by_sum if x in close]
    ranked = sorted(steps, key=by_step)
    return [*ranked, *((x, x.step_s) for x in by_sum if x not in close)]


def by_step(entry: tuple[PricedPipeline, float]) -> float:
    """The key of a pipeline with its seconds: those to four digits."""
    return float(f"{entry[1]:.3e}")
