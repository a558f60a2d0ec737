"""What one layer of a pipeline costs, per microbatch and per step, under every strategy.

A region is typed on the axes ep, cp and tp alone, for the graph that one rank of dp sees of one
microbatch (split/microbatch.py, batch / (dp x microbatches)): whatever dp and pp are, its
kernels, its collectives on ep, cp and tp and what it keeps are the same (PipelineLayer, the dear
part, shared). Data parallelism and ZeRO are arithmetic on top (strategy_costs):

    per microbatch   forward    max(f + c, g) + first             f, b kernels, c collectives in the
                     backward   max(b + c, g + d_shard) + first   graph, g gather, ZeRO-3 alone
    once per step    sync       max(0, g_once - (f + c)) + max(0, d_unsharded - (b + c))
                                + first + d_tied + loss + optimizer

What is gathered and reduced when is said in parameters.py: every backward overlaps
d_shard, the last one d_unsharded, the first forward g_once. The first layer of a stage has nothing
to hide its reduction and its gather behind, in any pass; so that a step stays a sum over layers,
each is charged its share of one layer in L / p (first: g, g + d_shard, g_once + d_unsharded).
Stages behind the first one gather while
they wait for their first microbatch; they are charged all the same, at their own end, which is
seldom the last. Sums of shards over replicas (HSDP under ZeRO 2 and 3) come behind the last
backward, which hides nothing of them, unless it is the only one. Copies into and out of the buffers
of gathers and reductions are kernels: of f and b, of g_once of the sync. So are sums of gradients
over microbatches, of b: the first microbatch has nothing to add to, each is charged its share of
the others'.

A parameter that several layers read is stored by each (the embedding and the head of a language
model are on different stages), and its gradients are added up over the holders once (d_tied); with
one stage it is stored and updated once, and its layers share that (parameters.py). The loss is
summed over dp once per step, at its end (passes/split/loss_sums.py).
Where the host has the states (passes/memory/zero.py), its step is the optimizer's, the parameters
come once per step, which nothing is said to hide, or q for every forward and backward, one layer
ahead; gradients leave with every backward, u, and are added up by the host, which takes longer than
the link, or they leave at the end, if they are added up on the device before they are reduced or
cast:

    forward  max(f + c, g + q) + q / L p      backward  max(b + c, g + d_shard, g + q, u) + q / L p

(the first layer of a pass waits for its q). A parameter that several layers read stays on the
device, unless all layers are pinned to the host.
Gradients that do not leave are resident all the time. What the optimizer allocates for itself is
there when no activations are: the larger of both would count; charged is what it needs beyond one
microbatch's. Seconds and bytes of one rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import REPLICATE_AXIS, Mesh
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.memory.host_use import HostUse
from meshfold.passes.memory.typed_region import TypedRegion
from meshfold.passes.pipeline.parameters import (
    Axes,
    LayerParameters,
    Parameter,
    data_axes,
)
from meshfold.passes.price.overlap import Busy, MicrobatchSeconds
from meshfold.passes.price.step import host_optimizer_s, optimizer_s
from meshfold.passes.stages.problem import LayerCosts

Collective = Callable[[str, float, Axes], float]
"""(kind, bytes, axes of the group) -> seconds."""


@dataclass(frozen=True, eq=False)
class PipelineLayer:
    """A layer typed for one microbatch of one rank. weight_s: of the backward, what only makes
    weight gradients (price/weight_gradients.py), of which W needs put_off_bytes
    (memory/put_off.py). loss_bytes: of the loss, which is summed over the ranks of dp once per
    step; 0 in other layers."""

    region: TypedRegion
    parameters: tuple[Parameter, ...]
    weight_s: float
    put_off_bytes: int
    loss_bytes: int


@dataclass(frozen=True)
class LayerWaits:
    """What a layer waits for the link to the host beyond kernels and collectives, seconds: with
    every forward and backward of a microbatch, the first layer of each for first_s more, and once
    per step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    first_s: float = 0.0
    once_s: float = 0.0


@dataclass(frozen=True, eq=False)
class StrategyCosts:
    """One layer under one strategy, per microbatch unless a field says per step."""

    strategy: UniformStrategy
    compute_forward_s: float
    """Kernels."""

    compute_backward_s: float
    """Kernels."""

    forward_s: float
    """Kernels and exposed communication."""

    backward_s: float
    """Kernels and exposed communication."""

    weight_s: float
    """Seconds of backward_s that compute weight gradients only, and add them up."""

    added_s: float
    """Of these, what adds up."""

    gather_s: float
    shard_reduce_s: float
    graph_s: Mapping[str, float]
    """Collectives in the graph, by axis."""

    once_s: float
    """g_once and d_unsharded, per step."""

    exposed_s: float
    """What nothing hides of once_s, per step."""

    tied_s: float
    """Seconds per step."""

    loss_s: float
    """The sum of the loss over dp, seconds per step."""

    optimizer_s: float
    """Seconds per step."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_once_bytes: int
    """Parameters that are gathered once per step."""

    update_bytes: int
    """What the optimizer takes behind the microbatches, in the place of gathered_once_bytes."""

    host: HostUse = field(default_factory=HostUse, kw_only=True)
    """Parameters, gradients and optimizer states."""

    waits: LayerWaits = field(default_factory=LayerWaits, kw_only=True)
    """Among forward_s, backward_s and exposed_s."""

    activation_bytes: int
    put_off_bytes: int
    """What a split backward keeps from B to W (memory/put_off.py)."""

    gathered_bytes: int
    """Gathered parameters among workspace_bytes."""

    workspace_bytes: int

    @property
    def sync_s(self) -> float:
        """Once per step, after the last backward."""
        return self.exposed_s + self.tied_s + self.loss_s + self.optimizer_s

    @property
    def state_bytes(self) -> int:
        """What is resident all the time."""
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.gathered_once_bytes


Placed = dict[tuple[tuple[Parameter, ...], int], LayerParameters]
"""By what a layer has of parameters, and ZeRO level."""


@dataclass(frozen=True)
class StageContext:
    """What a layer's costs depend on besides its table: the number of stages, the mesh of one, the
    share of layers that are the first of a stage, collectives over its axes and over the ranks that
    hold a tied parameter (bytes, holders), kernels, and the optimizer. is_all_on_host: the host
    updates the parameters of all layers. placed: what parameters come to under a ZeRO level, the
    same for microbatches of any size and whatever is recomputed."""

    num_stages: int
    mesh: Mesh
    first_share: float
    over: Collective
    over_holders: Callable[[float, int], float]
    costs: CostModel
    optimizer: str
    is_all_on_host: bool = False
    placed: Placed = field(default_factory=dict)

    def place(self, parameters: tuple[Parameter, ...], zero: int) -> LayerParameters:
        """The parameters of a layer."""
        key = parameters, zero
        if key not in self.placed:
            self.placed[key] = LayerParameters(
                parameters, zero, self.mesh, self.costs, self.optimizer, self.num_stages
            )
        return self.placed[key]

    def buckets_s(self, placed: LayerParameters, kind: str, *, is_once: bool = False) -> float:
        """Seconds of these collectives."""
        key = kind, is_once
        if key not in placed.seconds:
            buckets = placed.buckets(kind, is_once=is_once)
            placed.seconds[key] = sum(self.over(kind, size, axes) for axes, size in buckets)
        return placed.seconds[key]


def microbatch_seconds(
    layer: PipelineLayer, strategy: UniformStrategy, context: StageContext
) -> MicrobatchSeconds:
    """What a microbatch of `layer` takes under `strategy`."""
    price = layer.region.price(strategy.recompute)
    placed = context.place(layer.parameters, strategy.zero)
    slowdown = context.costs.cluster.overlap_slowdown
    forward_s, backward_s = price.forward_s, price.backward_s + added_s(placed, strategy)
    return MicrobatchSeconds(
        Busy(forward_s + placed.copies_forward_s, price.graph_forward_s, slowdown),
        Busy(backward_s + placed.copies_backward_s, price.graph_backward_s, slowdown),
        context.buckets_s(placed, "all_gather"),
        context.buckets_s(placed, "reduce_scatter"),
    )


def added_s(placed: LayerParameters, strategy: UniformStrategy) -> float:
    """What a microbatch adds to gradients on the device, a mean over those of a step."""
    seconds = placed.added_s if strategy.offload == "none" else placed.left_s
    return seconds * later_share(strategy)


def later_share(strategy: UniformStrategy) -> float:
    """Of the microbatches of a step, those behind the first."""
    return 1 - 1 / strategy.microbatches


def strategy_costs(
    layer: PipelineLayer, strategy: UniformStrategy, context: StageContext, output_bytes: int
) -> StrategyCosts:
    """The costs of `layer` under `strategy`. output_bytes: of its outputs, what readers save."""
    price, memory = layer.region.price(strategy.recompute), layer.region.memory(strategy.recompute)
    sums = context.place(layer.parameters, strategy.zero)
    seconds = microbatch_seconds(layer, strategy, context)
    forward, backward = seconds.forward, seconds.backward
    gather_once_s, reduce_s, all_reduce_s = (
        context.buckets_s(sums, kind, is_once=True)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    trailing_s = _trailing_s(sums, strategy, context)
    reduce_s += all_reduce_s - trailing_s
    gathered_once_bytes = sums.num_bytes("all_gather", is_once=True)
    update = sums.trained.update
    whole_s = optimizer_s(update, context.costs)
    late_s = max(0.0, reduce_s - backward.seconds) + max(0.0, gather_once_s - forward.seconds)
    share = context.first_share
    first_s = reduce_s + gather_once_s - late_s
    late_s += backward.contention_s((1 - share) * reduce_s)
    late_s += forward.contention_s((1 - share) * gather_once_s)
    activation_bytes = memory.saved_bytes + output_bytes
    costs = StrategyCosts(
        strategy=strategy,
        compute_forward_s=forward.kernels_s,
        compute_backward_s=backward.kernels_s,
        forward_s=seconds.forward_s(share),
        backward_s=seconds.backward_s(share),
        weight_s=layer.weight_s + added_s(sums, strategy),
        added_s=added_s(sums, strategy),
        gather_s=seconds.gather_s,
        shard_reduce_s=seconds.shard_reduce_s,
        graph_s=price.communication_s,
        once_s=gather_once_s + reduce_s + trailing_s,
        exposed_s=late_s + trailing_s + sums.copies_once_s + share * first_s,
        tied_s=sum(context.over_holders(size, holders) for size, holders in sums.tied),
        loss_s=context.over("all_reduce", layer.loss_bytes, data_axes(context.mesh)),
        optimizer_s=whole_s - context.costs.launch_s if sums.trained.updated else 0.0,
        parameter_bytes=sums.stored,
        gradient_bytes=sums.gradients,
        optimizer_bytes=update.state_bytes,
        gathered_once_bytes=gathered_once_bytes,
        update_bytes=max(0, update.step_bytes - gathered_once_bytes),
        activation_bytes=activation_bytes,
        put_off_bytes=layer.put_off_bytes,
        gathered_bytes=2 * sums.num_bytes("all_gather"),
        workspace_bytes=sums.workspace_bytes(memory, is_only=strategy.microbatches == 1),
    )
    return costs if strategy.offload == "none" else _on_host(costs, seconds, sums, context)


def _trailing_s(sums: LayerParameters, strategy: UniformStrategy, context: StageContext) -> float:
    """Sums over replicas that begin behind the last backward: those of shards that add up over
    microbatches (ZeRO 2 and 3)."""
    if strategy.zero < 2 or strategy.microbatches == 1:
        return 0.0
    buckets = sums.buckets("all_reduce", is_once=True)
    return sum(
        context.over("all_reduce", num_bytes, axes)
        for axes, num_bytes in buckets
        if REPLICATE_AXIS in axes
    )


def _on_host(
    here: StrategyCosts, seconds: MicrobatchSeconds, sums: LayerParameters, context: StageContext
) -> StrategyCosts:
    """The costs where the host stores the parameters and updates them. What stays of the optimizer
    on the device is for parameters that other layers read, too. seconds: of `here`."""
    costs = context.costs
    alone, stays = sums.alone, sums.also_elsewhere
    share = sums.trained if context.is_all_on_host else alone
    offload = here.strategy.offload
    by_layer = alone.copied if offload == "parameters" else 0
    on_disk = share.update.state_bytes if offload == "disk" else 0
    later = later_share(here.strategy)
    leaves_s = max(costs.host_s(sums.leaving), later * costs.host_update_s(3 * sums.leaving))
    late_s = costs.host_s(share.updated - sums.leaving)
    again_s, comes_s = costs.host_s(by_layer), costs.host_s(share.copied - by_layer)
    waits = LayerWaits(
        max(0.0, seconds.gather_s + again_s - seconds.forward_s()),
        max(0.0, max(seconds.gather_s + again_s, leaves_s) - seconds.backward_s()),
        again_s,
        comes_s + late_s,
    )
    first_s = context.first_share * waits.first_s
    # Of the last microbatch, what is still to be added (meshfold.offload.host_link).
    waiting = sums.leaving if here.strategy.microbatches > 1 else 0
    here_s, update_bytes = 0.0, 0
    if stays.updated and not context.is_all_on_host:
        here_s = optimizer_s(stays.update, costs) - costs.launch_s
        update_bytes = min(here.update_bytes, stays.update.step_bytes)
    return replace(
        here,
        forward_s=here.forward_s + waits.forward_s + first_s,
        backward_s=here.backward_s + waits.backward_s + first_s,
        exposed_s=here.exposed_s + waits.once_s,
        waits=waits,
        optimizer_s=here_s + host_optimizer_s(share.update, costs, on_disk=on_disk > 0),
        parameter_bytes=sums.stored - share.updated + share.copied - by_layer,
        gradient_bytes=sums.gradients - sums.leaving,
        optimizer_bytes=sums.trained.update.state_bytes - share.update.state_bytes,
        update_bytes=update_bytes,
        host=HostUse(2 * share.updated + waiting + share.update.state_bytes - on_disk, on_disk),
        workspace_bytes=here.workspace_bytes + sums.leaving + 2 * by_layer,
    )


def undominated(layer_costs: Sequence[StrategyCosts]) -> list[StrategyCosts]:
    """Without those that another one is no worse than in anything; of equals the first by name."""
    ordered = sorted(layer_costs, key=lambda x: (_criteria(x), x.strategy.label))
    found: list[StrategyCosts] = []
    for x in ordered:
        mine = _criteria(x)
        others = map(_criteria, found)
        if not any(all(a <= b for a, b in zip(o, mine, strict=True)) for o in others):
            found.append(x)
    return found


def _criteria(x: StrategyCosts) -> tuple[float, ...]:
    return (
        x.forward_s,
        x.backward_s,
        x.backward_s - x.weight_s,
        x.sync_s,
        x.state_bytes,
        x.activation_bytes,
        x.update_bytes,
        x.workspace_bytes,
    )


def run_costs(name: str, layer_costs: Sequence[StrategyCosts]) -> LayerCosts:
    """A layer of a chain, under each of these strategies."""
    return LayerCosts.build(
        name,
        tuple(x.strategy.label for x in layer_costs),
        forward_s=[x.forward_s for x in layer_costs],
        backward_s=[x.backward_s for x in layer_costs],
        weight_s=[x.weight_s for x in layer_costs],
        sync_s=[x.sync_s for x in layer_costs],
        state_bytes=[x.state_bytes for x in layer_costs],
        activation_bytes=[x.activation_bytes for x in layer_costs],
        put_off_bytes=[x.put_off_bytes for x in layer_costs],
        transient_bytes=[x.workspace_bytes for x in layer_costs],
        update_bytes=[x.update_bytes for x in layer_costs],
    )
