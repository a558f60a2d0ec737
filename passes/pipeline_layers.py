"""What one layer of a pipeline costs, per microbatch and per step, under every strategy.

A region is typed on the tp axis alone, for the graph that one rank sees of one microbatch
(passes/pipeline_microbatch.py, batch / (dp x microbatches)): whatever dp and pp are, its kernels,
its collectives on tp and what it keeps are the same (RegionTable, the dear part, shared). Data
parallelism and ZeRO are arithmetic on top (layer_figures):

    per microbatch   forward    max(f + c, g)             f, b kernels, c collectives on tp,
                     backward   max(b + c, g + d_shard)   g gather on dp, only under ZeRO-3
    once per step    sync       max(0, d_whole - (b + c)) + first + d_tied + optimizer

ZeRO 0 and 1 keep whole gradients, add up microbatches, and reduce them beside the last backward.
ZeRO-3 keeps shards: it gathers a layer for each forward and again for each backward, and reduces
(d_shard) after each backward; parameters that cannot be sharded are reduced once. ZeRO-2 would
reduce in every microbatch and keep parameters whole all the same: it is not offered. The first
layer of a stage has nothing to hide its reduction and its gather behind; so that a step stays a sum
over layers, each is charged its share of one layer in L / p (first).

A parameter that several layers read is held by each (the embedding and the head of a language model
are on different stages), stored whole on dp, and its gradients are added up over the holders once
(d_tied). Gradients are held all the time. What the optimizer makes for itself is there when no
activations are: the larger of both would count; charged is what it needs beyond one microbatch's.
Seconds and bytes of one rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshfold.cost_models.cost_model import CostModel
from meshfold.cost_models.memory import RegionMemory
from meshfold.cost_models.step_memory import FOREACH_FACTOR, STATE_FACTOR
from meshfold.mesh import Mesh
from meshfold.opgraph import OpGraph, SlotKind, Value
from meshfold.passes.data_parallel import zero3_layout
from meshfold.passes.parameter_prices import local_bytes, widening
from meshfold.passes.region_price import RegionPrice
from meshfold.passes.step_time import optimizer_s
from meshfold.spmd import INVARIANT, Layout
from meshfold.strategy import Recompute, UniformStrategy

PIPELINE_ZERO_LEVELS = (0, 1, 3)

Collective = Callable[[str, float], float]
"""(kind, bytes) -> seconds over one group."""


@dataclass(frozen=True)
class Parameter:
    """One parameter slot: its value and layout on the mesh of tp alone, and how many layers of the
    program read it."""

    value: Value
    layout: Layout
    num_holders: int


@dataclass(frozen=True, eq=False)
class RegionTable:
    """A region typed for one microbatch of one rank. prices and memories: by what is recomputed.
    weight_s: of the backward, what only makes weight gradients (pipeline_weights.py).
    kept_output_bytes: of its outputs, what a reader keeps for its backward."""

    mesh: Mesh
    prices: Mapping[Recompute, RegionPrice]
    memories: Mapping[Recompute, RegionMemory]
    parameters: tuple[Parameter, ...]
    weight_s: float
    kept_output_bytes: int

    @cached_property
    def fastest_s(self) -> float:
        """Forward and backward of a microbatch under any strategy take at least this."""
        return min(_forward_s(p) + _backward_s(p) for p in self.prices.values())

    @cached_property
    def least_forward_s(self) -> float:
        """A forward of a microbatch under any strategy takes at least this."""
        return min(_forward_s(p) for p in self.prices.values())


def parameters_of(
    graph: OpGraph, layouts: Sequence[Layout], num_holders: Sequence[int]
) -> tuple[Parameter, ...]:
    """The parameter slots of a region. layouts, num_holders: per slot."""
    return tuple(
        Parameter(graph.values[i], layouts[i], num_holders[i])
        for i, slot in enumerate(graph.slots)
        if slot.kind is SlotKind.PARAMETER
    )


@dataclass(frozen=True, eq=False)
class LayerFigures:
    """One layer under one strategy; the module docstring says what each figure is.

    Per microbatch: compute_forward_s, compute_backward_s (kernels), forward_s, backward_s (with
    exposed communication), weight_s of it for weight gradients alone, gather_s, shard_reduce_s,
    graph_s (collectives on tp), activation_bytes.
    Per step: reduce_s (all of d_whole), exposed_s (what of that, and of the first layer's
    gather, nothing hides), tied_s, optimizer_s. update_bytes: what
    the optimizer needs beyond one microbatch's activations. gathered_bytes of passing_bytes: what
    passes by while the layer runs.
    """

    strategy: UniformStrategy
    compute_forward_s: float
    compute_backward_s: float
    forward_s: float
    backward_s: float
    weight_s: float
    gather_s: float
    shard_reduce_s: float
    graph_s: float
    reduce_s: float
    exposed_s: float
    tied_s: float
    optimizer_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    update_bytes: int
    activation_bytes: int
    gathered_bytes: int
    passing_bytes: int

    @property
    def sync_s(self) -> float:
        """Once per step, after the last backward."""
        return self.exposed_s + self.tied_s + self.optimizer_s

    @property
    def state_bytes(self) -> int:
        """Held all the time."""
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.update_bytes


@dataclass(frozen=True)
class Surroundings:
    """What a layer's figures depend on besides its table: the degree dp, the share of layers that
    are the first of a stage, collectives over dp and over the ranks that hold a tied parameter
    (bytes, holders), kernels, and the optimizer."""

    dp: int
    first_share: float
    over_dp: Collective
    over_holders: Callable[[float, int], float]
    costs: CostModel
    optimizer: str


def layer_figures(
    table: RegionTable, strategy: UniformStrategy, around: Surroundings
) -> LayerFigures:
    """The figures of a layer of `table` under `strategy`."""
    price, memory = table.prices[strategy.recompute], table.memories[strategy.recompute]
    sums = _Parameters(table, strategy.zero, around.dp)
    forward_s, backward_s = _forward_s(price), _backward_s(price)
    gather_s = around.over_dp("all_gather", sums.gathered)
    shard_reduce_s = around.over_dp("reduce_scatter", sums.scattered)
    reduce_s = around.over_dp("all_reduce", sums.reduced) + sum(price.reduce_s.values())
    whole_s = optimizer_s(sums.updated, around.costs, around.optimizer)
    late_s = max(0.0, reduce_s - backward_s)
    first_s = reduce_s - late_s + gather_s + shard_reduce_s
    activation_bytes = memory.saved_bytes + table.kept_output_bytes
    update_bytes = FOREACH_FACTOR[around.optimizer] * sums.updated
    return LayerFigures(
        strategy=strategy,
        compute_forward_s=price.forward_s,
        compute_backward_s=price.backward_s,
        forward_s=max(forward_s, gather_s),
        backward_s=max(backward_s, gather_s + shard_reduce_s),
        weight_s=table.weight_s,
        gather_s=gather_s,
        shard_reduce_s=shard_reduce_s,
        graph_s=sum(price.communication_s.values()),
        reduce_s=reduce_s,
        exposed_s=late_s + around.first_share * first_s,
        tied_s=sum(around.over_holders(size, holders) for size, holders in sums.tied),
        optimizer_s=whole_s - around.costs.launch_s if sums.updated else 0.0,
        parameter_bytes=sums.stored,
        gradient_bytes=sums.gradients,
        optimizer_bytes=STATE_FACTOR[around.optimizer] * sums.updated,
        update_bytes=max(0, update_bytes - activation_bytes),
        activation_bytes=activation_bytes,
        gathered_bytes=2 * sums.gathered,
        passing_bytes=sums.passing_bytes(memory),
    )


class _Parameters:
    """Sums over the parameters of a region, in bytes of one rank.

    stored, gradients, updated (parameters whose optimizer states are here); gathered before use;
    scattered: gradients reduced per microbatch; reduced: per step; tied: (bytes, holders).
    """

    def __init__(self, table: RegionTable, zero: int, dp: int) -> None:
        sizes = table.mesh.sizes
        self.stored = self.gradients = self.updated = 0
        self.gathered = self.scattered = self.reduced = 0
        self.tied: list[tuple[int, int]] = []
        for parameter in table.parameters:
            value = parameter.value
            used = local_bytes(value, parameter.layout, sizes)
            cut = zero3_layout(value, (INVARIANT, *parameter.layout), (dp, *sizes), (0,))
            part = local_bytes(value, cut, (dp, *sizes))
            is_tied = parameter.num_holders > 1
            is_sharded = zero == 3 and part < used and not is_tied
            wide = widening(value)
            here = wide * (part if is_sharded else used)
            self.stored += here
            self.gathered += used if is_sharded else 0
            if not value.requires_grad:
                continue
            self.gradients += here
            self.updated += wide * part if zero == 1 else here
            if is_sharded:
                self.scattered += wide * used
            elif dp > 1:
                self.reduced += wide * used
            if is_tied:
                self.tied.append((wide * used, parameter.num_holders))

    def passing_bytes(self, memory: RegionMemory) -> int:
        """The worst of forward, backward and reduction: temporaries, two layers' gathered
        parameters, a reduction in flight, flat buffers and results of the layer's own."""
        inside = memory.backward_peak_bytes - memory.saved_bytes
        buckets = self.scattered + self.reduced
        result = self.gradients if buckets else 0
        return max(
            memory.forward_peak_bytes + 2 * self.gathered,
            inside + 2 * self.gathered + self.scattered,
            sum(memory.slot_gradient_bytes) + self.gathered + buckets + result,
        )


def _forward_s(price: RegionPrice) -> float:
    return price.forward_s + price.graph_forward_s


def _backward_s(price: RegionPrice) -> float:
    return price.backward_s + price.graph_backward_s
