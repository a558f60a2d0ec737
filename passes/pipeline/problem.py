"""From a folded graph and degrees of parallelism to a chain of layers that stages are cut from.

    MicrobatchGraphs      graph of one microbatch of one rank            (pipeline_microbatch.py)
      -> region search    on ep and tp, per microbatch size and these    (uniform_search.py)
      -> RegionTable      prices and memory by what is recomputed        (pipeline_layers.py)
      -> StageProblem     one run per run of the folded graph, with its
                          strategies, hops and held values               (stage_problem.py)

Instances are layers of the chain in execution order. At a cut every value that is made before it
and read behind it crosses if it depends on the batch; what does not, each stage makes for itself
(passes/stage_graphs.py). The next stage receives it, keeps it per microbatch in flight, and hands
it on if a later one reads it, too. All stages of one pipeline are sequence-parallel or none is, so
that the layouts at the cuts agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.hardware.topology import GroupShape, group_shape
from meshfold.cost_models.op_costs.collective_time import collective_s
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.pipeline.bubble_bounds import hop_link, hop_s
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import ITEM_BYTES, Dependence, FoldedGraph, SourceKind
from meshfold.ir.options import CompileOptions
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import Degrees, Recompute, UniformStrategy
from meshfold.passes.memory.region import Probe, memory_of_region
from meshfold.passes.memory.zero import program_states
from meshfold.passes.pipeline.layers import (
    LayerFigures,
    RegionTable,
    Surroundings,
    layer_figures,
)
from meshfold.passes.pipeline.parameters import Axes, parameters_of
from meshfold.passes.price.weight_gradients import weight_gradients_s
from meshfold.passes.region.parameter_tables import local_bytes
from meshfold.passes.region.search import RegionSolution
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.run.hull import FloatArray, IntArray
from meshfold.passes.split.microbatch import MicrobatchGraphs
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem

_TableKey = tuple[int, Degrees, bool, tuple[Recompute, ...]]
"""(parts of the batch, axes without dp, sequence parallel, what is recomputed)."""


@dataclass(frozen=True, eq=False)
class ProgramTables:
    """A program typed for one microbatch of one rank of dp, on ep, cp and tp. crossing_bytes: of
    what crosses the cut before each instance, 0 before the first. buffer_bytes, input_bytes: of one
    rank."""

    folded: FoldedGraph
    regions: tuple[RegionTable, ...]
    crossing_bytes: IntArray
    buffer_bytes: int
    input_bytes: int
    sharded_fraction: float

    @property
    def fastest_s(self) -> list[tuple[float, float]]:
        """Per layer what a forward and what a microbatch both ways take at least, seconds."""
        regions = [self.regions[i.region] for i in self.folded.instances]
        return [(region.least_forward_s, region.fastest_s) for region in regions]


@dataclass(frozen=True, eq=False)
class PipelineProblem:
    """A chain with everything its answer is written down from. figures: region number and name of
    a strategy -> its figures."""

    degrees: UniformStrategy
    mesh: Mesh
    chain: StageProblem
    figures: dict[tuple[int, str], LayerFigures]
    tables: ProgramTables
    fixed_bytes: int
    capacity_bytes: int
    launch_s: float


class PipelineProblems:
    """Problems of one model on one cluster; typed programs are shared by all that ask for the same
    microbatch of a rank of dp and the same ep and tp."""

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        options: CompileOptions,
        batch_size: int,
        probe: Probe,
    ) -> None:
        self.folded = folded
        self.cluster = cluster
        self.options = options
        self.batch_size = batch_size
        self.probe = probe
        self.microbatches = MicrobatchGraphs(folded, cluster, batch_size)
        self.reserve_bytes = max(group.device.reserve_bytes for group in cluster.groups)
        smallest = min(group.device.memory_bytes for group in cluster.groups)
        self.capacity_bytes = options.memory_bytes or smallest
        self.launch_s = CostModel(cluster, build_mesh(cluster, 1, 1)).launch_s
        self._holders = _num_holders(folded)
        self._searches: dict[tuple[int, Degrees], MeshSearch] = {}
        self._tables: dict[_TableKey, ProgramTables] = {}
        self._around: dict[tuple[int, Degrees], Surroundings] = {}

    def tables(self, degrees: UniformStrategy, recomputes: Sequence[Recompute]) -> ProgramTables:
        """The typed program that the axes, microbatches and sequence_parallel ask for."""
        parts, words = degrees.dp * degrees.microbatches, tuple(sorted(recomputes))
        key = parts, degrees.degrees._replace(dp=1), degrees.sequence_parallel, words
        if key not in self._tables:
            self._tables[key] = self._typed(*key)
        return self._tables[key]

    def problem(self, strategies: Sequence[UniformStrategy]) -> PipelineProblem:
        """The chain whose layers choose among `strategies`, alike in all degrees."""
        degrees = replace(strategies[0], zero=0, recompute="none")
        recomputes = list(dict.fromkeys(s.recompute for s in strategies))
        tables = self.tables(degrees, recomputes)
        regions = [_undominated(figures) for figures in self.figures(strategies)]
        layers = [
            _layer_costs(region.name, figures)
            for region, figures in zip(tables.folded.regions, regions, strict=True)
        ]
        fixed_bytes = self._fixed_bytes(tables, degrees)
        chain = StageProblem.build(
            tuple(LayerRun(layers[r], count) for r, _, count in tables.folded.runs),
            num_stages=degrees.pp,
            num_microbatches=degrees.microbatches,
            memory_bytes=max(0, self.capacity_bytes - fixed_bytes),
            hop_s=self._hops_s(tables, degrees),
            held_bytes=tables.crossing_bytes,
        )
        figures = {
            (r, x.strategy.label): x for r, of_region in enumerate(regions) for x in of_region
        }
        return PipelineProblem(
            degrees,
            self.mesh(degrees),
            chain,
            figures,
            tables,
            fixed_bytes,
            self.capacity_bytes,
            self.launch_s,
        )

    def figures(self, strategies: Sequence[UniformStrategy]) -> list[list[LayerFigures]]:
        """Per region the figures of a layer under each of `strategies`, alike in all degrees."""
        recomputes = list(dict.fromkeys(s.recompute for s in strategies))
        tables = self.tables(strategies[0], recomputes)
        around = self._surroundings(strategies[0])
        return [
            [layer_figures(table, strategy, around) for strategy in strategies]
            for table in tables.regions
        ]

    def mesh(self, degrees: UniformStrategy) -> Mesh:
        """Of all ranks."""
        axes = degrees.degrees._asdict()
        return build_mesh(self.cluster, pp=degrees.pp, **axes)

    def untied_parameters(self, region: int) -> list[int]:
        """Parameter slots of a region that one layer alone reads."""
        return [i for i, holders in enumerate(self._holders[region]) if holders == 1]

    # Tables.

    def _typed(
        self,
        parts: int,
        degrees: Degrees,
        sequence_parallel: bool,
        recomputes: Sequence[Recompute],
    ) -> ProgramTables:
        folded = self.microbatches.graph(parts)
        key = parts, degrees
        if key not in self._searches:
            mesh = build_mesh(self.cluster, **degrees._asdict())
            size = self.batch_size // parts
            self._searches[key] = MeshSearch(folded, self.cluster, mesh, size)
        search = self._searches[key]
        program = search.solve(zero=0, sequence_parallel=sequence_parallel)
        solutions = search.solutions(sequence_parallel=sequence_parallel)
        tables = [
            self._region(folded, r, search, solution, recomputes)
            for r, solution in enumerate(solutions)
        ]
        kept = _kept_outputs(folded, tables)
        states = program_states(folded, program.typings, search.mesh)
        crossing = _crossing_bytes(folded, [s.typing.outputs for s in solutions], search)
        return ProgramTables(
            folded,
            tuple(
                replace(table, kept_output_bytes=k) for table, k in zip(tables, kept, strict=True)
            ),
            crossing,
            states.buffers,
            states.inputs,
            program.sharded_fraction,
        )

    def _region(
        self,
        folded: FoldedGraph,
        region: int,
        search: MeshSearch,
        solution: RegionSolution,
        recomputes: Sequence[Recompute],
    ) -> RegionTable:
        graph, typing = folded.regions[region].graph, solution.typing
        floats = next(i.floats for i in folded.instances if i.region == region)
        return RegionTable(
            mesh=search.mesh,
            prices={r: solution.pricer.price(typing.slots, r) for r in recomputes},
            memories={
                r: memory_of_region(
                    graph,
                    replace(typing, recompute=r),
                    search.mesh,
                    self.probe,
                    costs=search.costs,
                    floats=floats,
                )
                for r in recomputes
            },
            parameters=parameters_of(graph, typing, search.mesh, self._holders[region]),
            weight_s=weight_gradients_s(graph, solution.rules, search.mesh, search.costs),
            kept_output_bytes=0,
        )

    # Surroundings.

    def _surroundings(self, degrees: UniformStrategy) -> Surroundings:
        key = degrees.pp, degrees.degrees
        if key not in self._around:
            self._around[key] = self._made_surroundings(degrees)
        return self._around[key]

    def _made_surroundings(self, degrees: UniformStrategy) -> Surroundings:
        mesh = self.mesh(degrees)
        costs = CostModel(self.cluster, mesh)
        over_pp = GroupShape(1, 1, 1, 1)
        if "pp" in mesh.names:
            over_pp = group_shape(self.cluster, mesh, (mesh.index("pp"),))

        def over(kind: str, num_bytes: float, axes: Axes) -> float:
            return costs.collective_s(kind, num_bytes, map(mesh.index, axes))

        def over_holders(num_bytes: float, holders: int) -> float:
            holders = min(holders, degrees.pp)
            nodes = holders if over_pp.crosses_nodes else 1
            per_node = 1 if over_pp.crosses_nodes else holders
            group = GroupShape(holders, nodes, per_node, per_node)
            link, network = costs.node_link, self.cluster.network
            return collective_s("all_reduce", num_bytes, group, link, network)

        return Surroundings(
            Mesh(tuple(axis for axis in mesh.axes if axis.name != "pp")),
            min(1.0, degrees.pp / len(self.folded.instances)),
            over,
            over_holders,
            costs,
            self.options.optimizer,
        )

    def _hops_s(self, tables: ProgramTables, degrees: UniformStrategy) -> FloatArray:
        cuts = tables.crossing_bytes[1:]
        if degrees.pp == 1:
            return np.zeros(len(cuts))
        link = hop_link(self.cluster, self.mesh(degrees))
        seconds = {size: hop_s(size, link) for size in set(cuts.tolist())}
        return np.array([seconds[size] for size in cuts.tolist()])

    def _fixed_bytes(self, tables: ProgramTables, degrees: UniformStrategy) -> int:
        """Framework, buffers, the batch, and parameters that no layer reads."""
        unread = sum(
            int(np.prod(p.shape)) * ITEM_BYTES[p.dtype]
            for p in self.folded.parameters
            if not p.used
        )
        inputs = degrees.microbatches * tables.input_bytes
        return self.reserve_bytes + tables.buffer_bytes + inputs + unread


def _num_holders(folded: FoldedGraph) -> list[list[int]]:
    """Per region and slot: how many layers read the parameter, at the instance where most do."""
    readers: dict[str, set[int]] = {}
    for k, instance in enumerate(folded.instances):
        for source in instance.sources:
            if source.kind is SourceKind.PARAMETER:
                readers.setdefault(source.name, set()).add(k)
    holders = [[0] * len(region.graph.slots) for region in folded.regions]
    for instance in folded.instances:
        of_region = holders[instance.region]
        for i, source in enumerate(instance.sources):
            if source.kind is SourceKind.PARAMETER:
                of_region[i] = max(of_region[i], len(readers[source.name]))
    return holders


def _kept_outputs(folded: FoldedGraph, tables: Sequence[RegionTable]) -> list[int]:
    """Per region, bytes of outputs that a reader keeps for its backward, whatever it recomputes."""
    kept: list[dict[int, int]] = [{} for _ in tables]
    for instance in folded.instances:
        readers = tables[instance.region].memories.values()
        for slot, source in enumerate(instance.sources):
            if source.kind is not SourceKind.VALUE:
                continue
            if any(slot in memory.saved_slots for memory in readers):
                maker = folded.instances[source.instance].region
                sizes = [m.output_bytes[source.output] for m in tables[maker].memories.values()]
                kept[maker][source.output] = max(sizes)
    return [sum(outputs.values()) for outputs in kept]


def _crossing_bytes(
    folded: FoldedGraph, outputs: Sequence[Sequence[Layout]], search: MeshSearch
) -> IntArray:
    """Bytes that cross the cut before each instance. outputs: layouts, per region."""
    last_reader: dict[tuple[int, int], int] = {}
    for k, instance in enumerate(folded.instances):
        for source in instance.sources:
            if source.kind is SourceKind.VALUE:
                last_reader[source.instance, source.output] = k
    crossing = np.zeros(len(folded.instances), np.int64)
    for (maker, output), reader in last_reader.items():
        region = folded.instances[maker].region
        graph = folded.regions[region].graph
        value = graph.values[graph.outputs[output]]
        if value.depends is Dependence.BATCH:
            size = local_bytes(value, outputs[region][output], search.mesh.sizes)
            crossing[maker + 1 : reader + 1] += size
    return crossing


def _undominated(figures: Sequence[LayerFigures]) -> list[LayerFigures]:
    """Without those that another one is no worse than in anything; of equals the first by name."""
    ordered = sorted(figures, key=lambda x: (_criteria(x), x.strategy.label))
    kept: list[LayerFigures] = []
    for x in ordered:
        mine = _criteria(x)
        others = map(_criteria, kept)
        if not any(all(a <= b for a, b in zip(o, mine, strict=True)) for o in others):
            kept.append(x)
    return kept


def _criteria(x: LayerFigures) -> tuple[float, ...]:
    return (
        x.forward_s,
        x.backward_s,
        x.backward_s - x.weight_s,
        x.sync_s,
        x.state_bytes,
        x.activation_bytes,
        x.passing_bytes,
    )


def _layer_costs(name: str, figures: Sequence[LayerFigures]) -> LayerCosts:
    return LayerCosts.build(
        name,
        tuple(x.strategy.label for x in figures),
        forward_s=[x.forward_s for x in figures],
        backward_s=[x.backward_s for x in figures],
        weight_s=[x.weight_s for x in figures],
        sync_s=[x.sync_s for x in figures],
        state_bytes=[x.state_bytes for x in figures],
        activation_bytes=[x.activation_bytes for x in figures],
        transient_bytes=[x.passing_bytes for x in figures],
    )
