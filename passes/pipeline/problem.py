"""Turns a folded graph and degrees of parallelism into a chain of layers that is divided into
stages.

    MicrobatchGraphs      graph of one microbatch of one rank            (split/microbatch.py)
      -> region search    on ep and tp, per microbatch size and these    (region/typing.py)
      -> TypedRegion      prices and memory by what is recomputed        (memory/typed_region.py)
      -> StageProblem     one run per run of the folded graph, with its
                          strategies, hops and resident bytes               (stages/problem.py)

Instances are layers of the chain in execution order. At a stage boundary every value that is made
before it and read behind it crosses if it depends on the batch; what does not, each stage makes for
itself (split/stage_graphs.py). The next stage receives it, keeps it per microbatch in flight, and
passes it on if a later one reads it, too. All stages of one pipeline are sequence-parallel or none
is, so that the layouts at the boundaries agree.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.hardware.topology import GroupShape, group_shape
from meshfold.cost_models.op_costs.collective_time import collective_s
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.pipeline.bubble_bounds import hop_link, hop_s
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import ITEM_BYTES, FoldedGraph, SourceKind
from meshfold.ir.options import CompileOptions
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import (
    UPDATED_BY_HOST,
    Degrees,
    Recompute,
    TpMode,
    UniformStrategy,
)
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.put_off import put_off
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.memory.typed_region import TypedRegion, saved_output_bytes
from meshfold.passes.memory.zero import program_states
from meshfold.passes.pipeline.layers import (
    PipelineLayer,
    Placed,
    StageContext,
    StrategyCosts,
    microbatch_seconds,
    run_costs,
    strategy_costs,
    undominated,
)
from meshfold.passes.pipeline.parameters import Axes, parameters_of
from meshfold.passes.price.parameters import local_bytes
from meshfold.passes.price.weight_gradients import weight_gradients_s
from meshfold.passes.region.space import SearchCache
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.run.hull import FloatArray, IntArray
from meshfold.passes.split.microbatch import MicrobatchGraphs, has_own_statistics
from meshfold.passes.split.operator_slices import operators_in_slices
from meshfold.passes.split.stage_crossing import crossing_readers
from meshfold.passes.stages.problem import LayerRun, StageProblem

_TableKey = tuple[int, Degrees, TpMode, tuple[Recompute, ...]]
"""(slices of the batch, axes without dp, mode of tp, what is recomputed)."""


@dataclass(frozen=True, eq=False)
class ProgramTables:
    """A program typed for one microbatch of one rank of dp, on ep, cp and tp. crossing_bytes: of
    what crosses the boundary before each instance, 0 before the first. buffer_bytes, input_bytes:
    of one rank."""

    folded: FoldedGraph
    layers: tuple[PipelineLayer, ...]
    recomputes: tuple[Recompute, ...]
    crossing_bytes: IntArray
    buffer_bytes: int
    input_bytes: int
    sharded_fraction: float

    @cached_property
    def output_bytes(self) -> list[int]:
        """Per region, what readers save of its outputs."""
        return saved_output_bytes(self.folded, [x.region for x in self.layers], self.recomputes)


@dataclass(frozen=True, eq=False)
class PipelineProblem:
    """A chain with everything its answer is written down from. layer_costs: region number and name
    of a strategy -> its costs."""

    degrees: UniformStrategy
    mesh: Mesh
    chain: StageProblem
    layer_costs: dict[tuple[int, str], StrategyCosts]
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
        self.microbatches = MicrobatchGraphs(
            folded, cluster, batch_size, per_microbatch=has_own_statistics(options.pins)
        )
        self.reserve_bytes = cluster.reserve_bytes
        self.capacity_bytes = options.memory_bytes or cluster.budget_bytes
        self.launch_s = CostModel(cluster, build_mesh(cluster, 1, 1)).launch_s
        self._holders = _num_holders(folded)
        self._searches: dict[tuple[int, Degrees], MeshSearch] = {}
        self._caches: dict[int, SearchCache] = {}
        self._tables: dict[_TableKey, ProgramTables] = {}
        self._programs: dict[tuple[int, Degrees, TpMode], ProgramTables] = {}
        self._layer_costs: dict[tuple[UniformStrategy, ...], list[list[StrategyCosts]]] = {}
        self.stage_searches: dict[UniformStrategy, MeshSearch] = {}
        self._fastest: dict[tuple[UniformStrategy, ...], list[tuple[float, float]]] = {}
        self._contexts: dict[tuple[int, Degrees], StageContext] = {}
        self._placed: dict[
            object, Placed
        ] = {}  # alike for all stages with the same groups of ranks

    def within(self, options: CompileOptions) -> "PipelineProblems":
        """The same for other options, which share what is typed and priced. They may differ in the
        budget and in pins about strategies."""
        of = copy.copy(self)
        of.options = options
        of.capacity_bytes = options.memory_bytes or self.cluster.budget_bytes
        return of

    def tables(self, degrees: UniformStrategy, recomputes: Sequence[Recompute]) -> ProgramTables:
        """The typed program that the axes, microbatches and sequence_parallel ask for."""
        num_slices, words = degrees.dp * degrees.microbatches, tuple(sorted(recomputes))
        program = num_slices, degrees.degrees._replace(dp=1, dp_shard=0), degrees.tp_mode
        if program not in self._programs:
            self._programs[program] = self._typed(*program)
        key = *program, words
        if key not in self._tables:
            self._tables[key] = replace(self._programs[program], recomputes=words)
        return self._tables[key]

    def problem(self, strategies: Sequence[UniformStrategy]) -> PipelineProblem:
        """The chain whose layers choose among `strategies`, alike in all degrees."""
        degrees = replace(strategies[0], zero=0, recompute="none", offload="none")
        recomputes = list(dict.fromkeys(s.recompute for s in strategies))
        tables = self.tables(degrees, recomputes)
        regions = [undominated(layer_costs) for layer_costs in self.layer_costs(strategies)]
        layers = [
            run_costs(region.name, layer_costs)
            for region, layer_costs in zip(tables.folded.regions, regions, strict=True)
        ]
        fixed_bytes = self.fixed_bytes(tables, degrees)
        chain = StageProblem.build(
            tuple(LayerRun(layers[r], count) for r, _, count in tables.folded.runs),
            num_stages=degrees.pp,
            num_microbatches=degrees.microbatches,
            memory_bytes=max(0, self.capacity_bytes - fixed_bytes),
            hop_s=self.hops_s(tables, degrees),
            resident_bytes=tables.crossing_bytes,
        )
        layer_costs = {
            (r, x.strategy.label): x for r, of_region in enumerate(regions) for x in of_region
        }
        return PipelineProblem(
            degrees,
            self.mesh(degrees),
            chain,
            layer_costs,
            tables,
            fixed_bytes,
            self.capacity_bytes,
            self.launch_s,
        )

    def layer_costs(self, strategies: Sequence[UniformStrategy]) -> list[list[StrategyCosts]]:
        """The costs of a layer of each region under those of `strategies` that differ for it;
        all are alike in all degrees."""
        key = tuple(strategies)
        if key not in self._layer_costs:
            self._layer_costs[key] = self._costs_of_layers(key)
        return self._layer_costs[key]

    def _costs_of_layers(self, strategies: Sequence[UniformStrategy]) -> list[list[StrategyCosts]]:
        recomputes = list(dict.fromkeys(s.recompute for s in strategies))
        tables = self.tables(strategies[0], recomputes)
        is_all_on_host = all(s.offload in UPDATED_BY_HOST for s in strategies)
        context = replace(self._context(strategies[0]), is_all_on_host=is_all_on_host)
        by_region = []
        for layer, num_bytes in zip(tables.layers, tables.output_bytes, strict=True):
            distinct = layer.region.distinct(recomputes)
            different = [s for s in strategies if s.recompute in distinct]
            by_region.append([strategy_costs(layer, s, context, num_bytes) for s in different])
        return by_region

    def fastest_s(self, strategies: Sequence[UniformStrategy]) -> list[tuple[float, float]]:
        """Least seconds of a forward, and of a microbatch both ways, for each layer."""
        key = tuple(strategies)
        if key not in self._fastest:
            self._fastest[key] = self._fastest_of_layers(key)
        return self._fastest[key]

    def _fastest_of_layers(
        self, strategies: Sequence[UniformStrategy]
    ) -> list[tuple[float, float]]:
        tables = self.tables(strategies[0], list(dict.fromkeys(s.recompute for s in strategies)))
        context = self._context(strategies[0])
        # Recomputation only adds seconds.
        quick = [s for s in strategies if s.recompute == "none"] or strategies
        least = []
        for layer in tables.layers:
            each = [microbatch_seconds(layer, strategy, context) for strategy in quick]
            forward_s = min(x.forward_s() for x in each)
            least.append((forward_s, min(x.forward_s() + x.backward_s() for x in each)))
        return [least[i.region] for i in tables.folded.instances]

    def mesh(self, degrees: UniformStrategy) -> Mesh:
        """The mesh of all ranks."""
        return build_mesh(self.cluster, pp=degrees.pp, **degrees.degrees.of_mesh)

    def untied_parameters(self, region: int) -> list[int]:
        """Parameter slots of a region that one layer alone reads."""
        return [i for i, (most, _) in enumerate(self._holders[region]) if most == 1]

    # Tables.

    def _typed(self, num_slices: int, degrees: Degrees, mode: TpMode) -> ProgramTables:
        """Under nothing that is recomputed, which changes no types."""
        folded = self.microbatches.graph(num_slices)
        key = num_slices, degrees
        if key not in self._searches:
            mesh = build_mesh(self.cluster, **degrees.of_mesh)
            size = self.batch_size // num_slices
            cache = self._caches.setdefault(num_slices, SearchCache.of(folded))
            self._searches[key] = MeshSearch(folded, self.cluster, mesh, size, cache)
        search = self._searches[key]
        program = search.solve(zero=0, mode=mode)
        solutions = search.solutions(mode)
        loss_bytes = _loss_bytes(folded)
        model = MemoryModel(search.costs, self.probe)
        layers = tuple(
            PipelineLayer(
                TypedRegion(region.graph, of.typing, of.pricer, model, folded.first_floats[r]),
                parameters_of(region.graph, of.typing, search.mesh, self._holders[r]),
                weight_gradients_s(region.graph, of.rules, search.costs),
                put_off(region.graph, of.typing, search.mesh.sizes).num_bytes,
                loss_bytes.get(r, 0),
            )
            for r, (region, of) in enumerate(zip(folded.regions, solutions, strict=True))
        )
        states = program_states(folded, program.typings, search.mesh)
        crossing = _crossing_bytes(folded, [s.typing.outputs for s in solutions], search)
        return ProgramTables(
            folded,
            layers,
            (),
            crossing,
            states.buffers,
            states.inputs,
            program.sharded_fraction,
        )

    # StageContext.

    def _context(self, degrees: UniformStrategy) -> StageContext:
        key = degrees.pp, degrees.degrees
        if key not in self._contexts:
            self._contexts[key] = self._new_context(degrees)
        return self._contexts[key]

    def _new_context(self, degrees: UniformStrategy) -> StageContext:
        mesh = self.mesh(degrees)
        costs = CostModel(self.cluster, mesh)
        over_pp = GroupShape(1, 1, 1, 1)
        if "pp" in mesh.names:
            over_pp = group_shape(self.cluster, mesh, (mesh.index("pp"),))

        def over(kind: str, num_bytes: float, axes: Axes) -> float:
            of = costs.storage
            return of.collective_s(kind, num_bytes, map(of.mesh.index, axes))

        def over_holders(num_bytes: float, holders: int) -> float:
            holders = min(holders, degrees.pp)
            nodes = holders if over_pp.crosses_nodes else 1
            per_node = 1 if over_pp.crosses_nodes else holders
            group = GroupShape(holders, nodes, per_node, per_node)
            link, network = costs.node_link, self.cluster.network
            return collective_s("all_reduce", num_bytes, group, link, network)

        inner = Mesh(tuple(axis for axis in mesh.axes if axis.name != "pp"))
        names = costs.storage.mesh.names
        shapes = {
            tuple(names[k] for k in axes): shape
            for axes, shape in costs.storage.group_shapes.items()
            if "pp" not in {names[k] for k in axes}
        }
        alike = inner, degrees.pp == 1, self.options.optimizer, tuple(shapes.items())
        return StageContext(
            degrees.pp,
            inner,
            min(1.0, degrees.pp / len(self.folded.instances)),
            over,
            over_holders,
            costs,
            self.options.optimizer,
            placed=self._placed.setdefault(alike, {}),
        )

    def hops_s(self, tables: ProgramTables, degrees: UniformStrategy) -> FloatArray:
        """Seconds of a transfer over the boundary before each layer but the first."""
        crossing = tables.crossing_bytes[1:].tolist()
        if degrees.pp == 1:
            return np.zeros(len(crossing))
        link = hop_link(self.cluster, self.mesh(degrees))
        seconds = {size: hop_s(size, link) for size in set(crossing)}
        return np.array([seconds[size] for size in crossing])

    def fixed_bytes(self, tables: ProgramTables, degrees: UniformStrategy) -> int:
        """Framework, buffers, the batch, and parameters that no layer reads."""
        inputs = degrees.microbatches * tables.input_bytes
        return self.reserve_bytes + tables.buffer_bytes + inputs + self._unread_bytes

    @cached_property
    def _unread_bytes(self) -> int:
        unread = (p for p in self.folded.parameters if not p.used)
        return sum(math.prod(p.shape) * ITEM_BYTES[p.dtype] for p in unread)


def _num_holders(folded: FoldedGraph) -> list[list[tuple[int, int]]]:
    """[region][slot] -> how many layers read the parameter, at the instance where most do and where
    fewest do."""
    readers: dict[str, set[int]] = {}
    for k, instance in enumerate(folded.instances):
        for source in instance.sources:
            if source.kind is SourceKind.PARAMETER:
                readers.setdefault(source.label, set()).add(k)
    holders: list[list[set[int]]] = [[set() for _ in r.graph.slots] for r in folded.regions]
    for instance in folded.instances:
        for i, source in enumerate(instance.sources):
            if source.kind is SourceKind.PARAMETER:
                holders[instance.region][i].add(len(readers[source.label]))
    return [[(max(n, default=0), min(n, default=0)) for n in slots] for slots in holders]


def _loss_bytes(folded: FoldedGraph) -> dict[int, int]:
    """Bytes of the loss, by the region that makes it."""
    source = folded.outputs[0].source
    if not folded.returns.has_loss or source.kind is not SourceKind.VALUE:
        return {}
    region = folded.instances[source.instance].region
    graph = folded.regions[region].graph
    return {region: ITEM_BYTES[graph.values[graph.outputs[source.output]].dtype]}


PARTED_BYTES = 1 << 50
"""What no stage boundary can carry: between slices of an operator there is none, as both stages
would hold the parameter of all its slices."""


def _crossing_bytes(
    folded: FoldedGraph, outputs: Sequence[Sequence[Layout]], search: MeshSearch
) -> IntArray:
    """Bytes that cross the boundary before each instance, PARTED_BYTES where there can be none.
    outputs: layouts, per region."""
    crossing = np.zeros(len(folded.instances), np.int64)
    for (maker, output), reader in crossing_readers(folded, is_returned=False).items():
        region = folded.instances[maker].region
        graph = folded.regions[region].graph
        value = graph.values[graph.outputs[output]]
        size = local_bytes(value, outputs[region][output], search.mesh.sizes)
        crossing[maker + 1 : reader + 1] += size
    for before, after in operators_in_slices(folded):
        crossing[before + 1 : after + 1] += PARTED_BYTES
    return crossing
