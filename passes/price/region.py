"""The price of a typed region, from the conversions that will be emitted.

    forward_s, backward_s   sum over ops of their kernels on local sizes, launches included, what
                            the host needs longer (host_issue.py), and copies of parameters and
                            gradients (parameters.py)
    graph_forward_s,        in-graph conversions (conversion_trees.plan_conversions per value, one
    graph_backward_s        per demanded layout), copies and local ones too, and collectives inside
                            rules
    communication_s[axis]   the same by axis, both directions
    gather_s, reduce_s      parameter gathers and gradient reductions: one collective per region,
                            axis and kind, since the runtime sends them in groups
    regathered_s            of backward_s, copies around a second gather, or cast
    ops_forward_s,          ops and what is communicated between them, without recomputation and
    ops_backward_s          without anything of parameters: the same however they are stored

Recomputation adds ops and conversions to the backward (recompute.py, for selective recomputation
passes/memory/kept_results.py); no gather, since the backward gathers a region's parameters for
itself in any case.

All per instance and rank, in seconds, before any overlap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import DATA_AXIS, REPLICATE_AXIS, SHARD_AXIS
from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ir.plan import ConversionKind, ConversionRecord
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import SELECTIVE, Recompute, RegionTyping
from meshfold.passes.graph.typed import layouts_of_values, value_name
from meshfold.passes.price.conversion_trees import plan_conversions
from meshfold.passes.price.conversions import (
    ConversionCost,
    conversion_cost,
    conversion_steps,
    steps_cost,
)
from meshfold.passes.price.host_issue import issued_by_host
from meshfold.passes.price.op_time import OpTime, OpTimer
from meshfold.passes.price.parameter_groups import (
    is_unbucketed,
    parameter_copies,
    parameter_group_key,
    stored_use,
    used_layout,
)
from meshfold.passes.price.parameters import (
    is_grouped,
    local_bytes,
    stored_bytes,
)
from meshfold.passes.price.recompute import full_recompute
from meshfold.passes.price.sums import PriceSums
from meshfold.passes.rules.table import AxisRule


@dataclass(frozen=True)
class RecomputePrice:
    """What recomputation adds."""

    compute_s: float = 0.0
    graph_s: float = 0.0
    """Seconds of in-graph communication."""
    communication_s: Mapping[str, float] = field(default_factory=dict)
    """The same by axis name."""


@dataclass(frozen=True)
class HostTraffic:
    """Seconds on the link to the host, one way."""

    saved_s: float = 0.0
    """What is saved for the backward, out in forward and back in backward."""
    gradients_s: float = 0.0
    """Gradients, out in backward."""
    parameters_s: float = 0.0
    """Parameters that the host has updated, back in forward."""
    by_layer_s: float = 0.0
    """Those of them that come again in backward; gathers wait for them."""


_NOT_RECOMPUTED, _NO_TRAFFIC = RecomputePrice(), HostTraffic()


@dataclass(frozen=True)
class RegionPrice:
    """Module docstring says what each time is."""

    forward_s: float
    backward_s: float
    graph_forward_s: float
    graph_backward_s: float
    communication_s: Mapping[str, float]
    gather_s: Mapping[str, float]
    """Seconds of one gather, by axis name."""
    reduce_s: Mapping[str, float]
    conversions: tuple[ConversionRecord, ...]
    recomputed: RecomputePrice = _NOT_RECOMPUTED
    """What recomputation costs: full, unless under() was told of another; included in the other
    times or not."""
    host: HostTraffic = _NO_TRAFFIC
    """Set by who knows what is offloaded (memory/zero.py)."""
    num_gathers: int = 2
    """2: forward and backward; 1: forward only, and backward_s is without regathered_s."""
    regathered_s: float = 0.0
    ops_forward_s: float = 0.0
    """Ops and what is communicated between them, without copies of parameters."""
    ops_backward_s: float = 0.0

    def under(
        self,
        recomputes: bool,
        num_gathers: int,
        host: HostTraffic,
        selective: RecomputePrice | None = None,
    ) -> "RegionPrice":
        """This price, which is of two gathers and without recomputation, with or without that, so
        many gathers, and what goes to the host. selective: what recomputation adds if it is not
        full."""
        # Every strategy candidate of every region asks: dataclasses.replace takes several times as
        # long.
        recomputed = self.recomputed if selective is None else selective
        added = recomputed if recomputes else _NOT_RECOMPUTED
        by_axis = added.communication_s
        backward_s = self.backward_s + added.compute_s
        if num_gathers == 1:
            backward_s -= self.regathered_s
        return RegionPrice(
            forward_s=self.forward_s,
            backward_s=backward_s,
            graph_forward_s=self.graph_forward_s,
            graph_backward_s=self.graph_backward_s + added.graph_s,
            communication_s={a: s + by_axis[a] for a, s in self.communication_s.items()}
            if by_axis
            else self.communication_s,
            gather_s=self.gather_s,
            reduce_s=self.reduce_s,
            conversions=self.conversions,
            recomputed=recomputed,
            host=host,
            num_gathers=num_gathers,
            regathered_s=self.regathered_s,
            ops_forward_s=self.ops_forward_s,
            ops_backward_s=self.ops_backward_s,
        )

    @property
    def ops_s(self) -> float:
        """Both directions. No choice of stored parameters, recomputation and offload takes less."""
        return self.ops_forward_s + self.ops_backward_s

    @property
    def total_communication_s(self) -> dict[str, float]:
        """Seconds by axis of everything, both directions."""
        return {
            name: seconds + self.num_gathers * self.gather_s[name] + self.reduce_s[name]
            for name, seconds in self.communication_s.items()
        }


class RegionPricer:
    """Prices of one region whose ops are typed, for any stored layouts of its parameters.

    rules[o]: the axis rules of op o. Ops and values are priced once, a parameter once per stored
    layout: what differs between the candidates of a region costs microseconds. timers: of the ops,
    if at hand.
    """

    def __init__(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        rules: Sequence[Sequence[AxisRule]],
        costs: CostModel,
        timers: Sequence[OpTimer] | None = None,
    ) -> None:
        self.graph = graph
        self.mesh = costs.mesh
        self.costs = costs
        self.typing = typing
        self.rules = rules
        layouts = layouts_of_values(graph, typing)
        self._recomputed = full_recompute(graph, typing)
        self._demands = [demands for _, demands in layouts]
        self._parameters = [
            i for i, slot in enumerate(graph.slots) if slot.kind is SlotKind.PARAMETER
        ]
        self._known: dict[tuple[int, Layout], PriceSums] = {}
        self._prices: dict[tuple[Layout, ...], RegionPrice] = {}
        self._inside = PriceSums(costs.mesh)
        self._forward_s = self._backward_s = 0.0
        self.op_times: list[OpTime] = []
        """Times of every op, without recomputation."""
        timers = timers or [OpTimer(graph, op, costs) for op in graph.ops]
        for k, (timer, of_axes) in enumerate(zip(timers, rules, strict=True)):
            time = timer.time(of_axes)
            self.op_times.append(time)
            self._forward_s += time.forward_s
            self._backward_s += time.backward_s
            self._inside.add_op(time, k in self._recomputed.ops)
        parameters = set(self._parameters)
        for v, (native, _) in enumerate(layouts):
            if v not in parameters and any(d != native for d in self._demands[v]):
                self._inside.merge(self._value(v, native))
        self._wait_for_host()

    def _wait_for_host(self) -> None:
        """Adds what the host needs longer than the device (host_issue.py)."""
        issued = issued_by_host(self.op_times, self.graph, self.costs.device.host_op_s)
        for k, (time, before) in enumerate(zip(issued, self.op_times, strict=True)):
            added_s = time.forward_s - before.forward_s
            self._forward_s += added_s
            self._backward_s += time.backward_s - before.backward_s
            if k in self._recomputed.ops:
                self._inside.recomputed_ops_s += added_s
        self.op_times = issued

    def price(
        self,
        slots: Sequence[Layout],
        recompute: Recompute = "none",
        *,
        reshard_after_forward: bool = True,
        host: HostTraffic = _NO_TRAFFIC,
        selective: RecomputePrice | None = None,
    ) -> RegionPrice:
        """The price of one instance whose slots are stored, or arrive, as `slots`; those that are
        no parameters as the typing has them. host: what goes there. selective: what selective
        recomputation adds."""
        assert (recompute in SELECTIVE) == (selective is not None)
        stored = tuple([slots[i] for i in self._parameters])
        price = self._prices.get(stored)
        if price is None:
            price = self._prices[stored] = self._price(slots)
        num_gathers = 2 if reshard_after_forward else 1
        return price.under(recompute != "none", num_gathers, host, selective)

    def _price(self, slots: Sequence[Layout]) -> RegionPrice:
        """The price without recomputation."""
        sums = PriceSums(self.mesh)
        sums.merge(self._inside)
        for i in self._parameters:
            known = self._known.get((i, slots[i]))
            if known is None:
                known = self._known[i, slots[i]] = self._value(i, slots[i])
            sums.merge(known)
        forward_s, backward_s = self._forward_s, self._backward_s
        inside = forward_s + self._inside.forward_s, backward_s + self._inside.backward_s
        return _finish(forward_s, backward_s, inside, sums, self.costs)

    def _value(self, v: int, native: Layout) -> PriceSums:
        """The conversions of one value."""
        sums = PriceSums(self.mesh)
        graph, value = self.graph, self.graph.values[v]
        is_parameter = v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
        edges = plan_conversions(value, native, self._demands[v], self.costs)
        again = self._recomputed.targets(v, edges)
        for edge in edges:
            is_recomputed = edge[1] in again
            if is_parameter and edge[0] == native:
                _price_parameter(graph, v, edge, sums, self.costs, is_recomputed)
                continue
            cost = _price_conversion(graph, v, edge, sums, self.costs)
            if is_recomputed:
                sums.add_recomputed(cost)
        if is_parameter:
            self._add_copies(v, native, sums)
        return sums

    def _add_copies(self, v: int, native: Layout, sums: PriceSums) -> None:
        """Copies of every group that a parameter is in."""
        value, mesh, costs = self.graph.values[v], self.mesh, self.costs
        for used in dict.fromkeys(used_layout(native, d, mesh) for d in self._demands[v]):
            stored, read, of = stored_use(native, used, costs)
            key = parameter_group_key(v, value, stored, read, of)
            if key is not None:
                sums.add_copies(parameter_copies(value, stored, key.gather, of))


_Edge = tuple[Layout, Layout]


def _price_conversion(
    graph: OpGraph, v: int, edge: _Edge, sums: PriceSums, costs: CostModel
) -> ConversionCost:
    cost = conversion_cost(graph.values[v], *edge, costs)
    sums.add(cost)
    _record(graph, v, "activation", edge, cost, sums)
    return cost


def _price_parameter(
    graph: OpGraph, v: int, edge: _Edge, sums: PriceSums, costs: CostModel, is_recomputed: bool
) -> None:
    """Steps of a parameter group are added up by bytes and priced per group; the record shows each.
    What is stored as shards on several axes is gathered over them as one process group, what is
    unsharded on several is reduced over them so. What is gathered is gathered for the backward in
    any case, also where the rest is recomputed."""
    value = graph.values[v]
    steps = conversion_steps(value, *edge, costs)
    for step in steps:
        if is_grouped(step.source, step.target):
            continue
        cost = steps_cost(value, (step,), costs)
        sums.add(cost)
        if is_recomputed:
            sums.add_recomputed(cost)
    stored, read, of = stored_use(*edge, costs)
    pairs = list(enumerate(zip(stored, read, strict=True)))
    gathered = tuple(k for k, (s, u) in pairs if is_grouped(s, u) and s.is_shard)
    reduced = tuple(k for k, (s, u) in pairs if is_grouped(s, u) and not s.is_shard)
    here, stored_here = (size(value, stored, of.mesh.sizes) for size in (local_bytes, stored_bytes))
    replicas = max(t.copies for t in edge[0]) if edge[0] else 1
    if gathered:
        shards = math.prod(of.mesh.sizes[k] for k in gathered)
        has_own = is_unbucketed(value, stored, gathered, of)
        own = (v, used_layout(*edge, costs.mesh)) if has_own else None
        sums.add_bytes(gathered, "all_gather", own, replicas, shards * here)
        if value.requires_grad:
            sums.add_bytes(gathered, "reduce_scatter", own, replicas, shards * stored_here)
    if reduced and value.requires_grad:
        sums.add_bytes(reduced, "all_reduce", None, replicas, stored_here)
    if of.mesh != costs.mesh:
        steps = conversion_steps(value, stored, read, of)
    _record(graph, v, "parameter", edge, steps_cost(value, steps, of), sums)


def _record(
    graph: OpGraph, v: int, kind: ConversionKind, edge: _Edge, cost: ConversionCost, sums: PriceSums
) -> None:
    """Note a conversion that communicates."""
    if not (cost.forward or cost.backward):
        return
    record = ConversionRecord(
        value_name(graph, v),
        kind,
        *edge,
        cost.forward,
        cost.backward,
        cost.num_bytes,
        cost.forward_s,
        cost.backward_s,
    )
    sums.records.append((v, record))


def _finish(
    forward_s: float,
    backward_s: float,
    ops_s: tuple[float, float],
    sums: PriceSums,
    costs: CostModel,
) -> RegionPrice:
    """forward_s, backward_s: kernels of ops. ops_s: those and what is communicated between them."""
    names = sums.mesh.names
    gather_s, reduce_s = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    groups = [(axes, kind, n, size) for (axes, kind, _, n), size in sums.group_bytes.items()]
    for axes, kind, replicas, num_bytes in sorted(groups):
        # The outermost axis has the slowest links of the group.
        seconds = gather_s if kind == "all_gather" else reduce_s
        of = costs.with_replicas(replicas).storage if replicas > 1 else costs.storage
        name = of.mesh.names[axes[0]]
        name = DATA_AXIS if name in (REPLICATE_AXIS, SHARD_AXIS) else name
        seconds[name] += of.collective_s(kind, num_bytes, axes)
    return RegionPrice(
        forward_s=forward_s + sums.gathered_s,
        backward_s=backward_s + sums.gathered_s + sums.reduced_s,
        graph_forward_s=sums.forward_s,
        graph_backward_s=sums.backward_s,
        communication_s=dict(zip(names, sums.communication_s, strict=True)),
        gather_s=gather_s,
        reduce_s=reduce_s,
        conversions=tuple([r for _, r in sorted(sums.records, key=itemgetter(0))]),
        recomputed=RecomputePrice(
            sums.recomputed_ops_s,
            sums.recomputed_s,
            dict(zip(names, sums.recomputed_by_axis_s, strict=True)),
        ),
        regathered_s=sums.gathered_s,
        ops_forward_s=ops_s[0],
        ops_backward_s=ops_s[1],
    )
