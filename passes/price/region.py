"""The price of a typed region, from the conversions that will be emitted.

    forward_s, backward_s   sum over ops of the roofline time on local sizes, launches included, and
                            copies of parameters and gradients (passes/parameter_prices.py)
    graph_forward_s,        in-graph conversions (passes.conversions.plan_conversions per value, one
    graph_backward_s        per demanded layout), local ones too, and collectives inside rules
    communication_s[axis]   the same by axis, both directions
    gather_s, reduce_s      parameter gathers and gradient reductions: one collective per region,
                            axis and kind, since the runtime sends them in buckets
    regathered_s            of backward_s, copies around a second gather, or cast

Recomputation adds to the backward what runs again (passes/again.py), ops and conversions; no
gather, since the backward gathers a region's parameters for itself in any case.

All per instance and rank, in seconds, before any overlap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ir.plan import ConversionRecord
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import Recompute, RegionTyping
from meshfold.passes.price.conversions import (
    ConversionCost,
    conversion_cost,
    conversion_steps,
    plan_conversions,
    steps_cost,
)
from meshfold.passes.price.op_time import OpTime, OpTimer
from meshfold.passes.price.parameter_groups import (
    bucket_key,
    has_own_bucket,
    parameter_copies,
    used_layout,
)
from meshfold.passes.price.recompute import full_again, selective_again
from meshfold.passes.price.sums import PriceSums
from meshfold.passes.region.parameter_tables import (
    is_bucketed,
    local_bytes,
    stored_bytes,
)
from meshfold.passes.rules.table import AxisRule


@dataclass(frozen=True)
class AgainPrice:
    """What runs again under recomputation: compute, in-graph communication, and that by axis
    name."""

    compute_s: float = 0.0
    graph_s: float = 0.0
    communication_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HostTraffic:
    """Seconds on the link to the host, either way alone. kept_s: what is kept, out in forward and
    back in backward; gradients_s: gradients, out in backward."""

    kept_s: float = 0.0
    gradients_s: float = 0.0


_NOTHING_AGAIN, _NO_TRAFFIC = AgainPrice(), HostTraffic()


@dataclass(frozen=True)
class RegionPrice:
    """Module docstring says what each time is. gather_s and reduce_s map an axis name to one pass:
    a gather is done num_gathers times, in forward and again in backward or not: backward_s is then
    without regathered_s. again: what recomputation costs, included in the other times or not:
    selective where the region recomputes so, else full. host: set by who knows what is offloaded
    (passes/residence.py)."""

    forward_s: float
    backward_s: float
    graph_forward_s: float
    graph_backward_s: float
    communication_s: Mapping[str, float]
    gather_s: Mapping[str, float]
    reduce_s: Mapping[str, float]
    conversions: tuple[ConversionRecord, ...]
    again: AgainPrice = _NOTHING_AGAIN
    host: HostTraffic = _NO_TRAFFIC
    num_gathers: int = 2
    regathered_s: float = 0.0

    def under(self, recomputes: bool, num_gathers: int, host: HostTraffic) -> "RegionPrice":
        """This price, which is of two gathers and without recomputation: with what runs again added
        to the backward, or not, so many gathers, and what goes to the host."""
        # Every leaf of every region asks: dataclasses.replace takes several times as long.
        again = self.again if recomputes else _NOTHING_AGAIN
        added = again.communication_s
        backward_s = self.backward_s + again.compute_s
        if num_gathers == 1:
            backward_s -= self.regathered_s
        return RegionPrice(
            self.forward_s,
            backward_s,
            self.graph_forward_s,
            self.graph_backward_s + again.graph_s,
            {a: s + added[a] for a, s in self.communication_s.items()}
            if added
            else self.communication_s,
            self.gather_s,
            self.reduce_s,
            self.conversions,
            self.again,
            host,
            num_gathers,
            self.regathered_s,
        )

    @property
    def ops_s(self) -> float:
        """Ops and what is communicated between them, both directions: all but parameters."""
        return self.forward_s + self.graph_forward_s + self.backward_s + self.graph_backward_s

    @property
    def total_communication_s(self) -> dict[str, float]:
        """Per axis, everything, both directions."""
        return {
            name: seconds + self.num_gathers * self.gather_s[name] + self.reduce_s[name]
            for name, seconds in self.communication_s.items()
        }


class RegionPricer:
    """Prices of one region whose ops are typed, for any stored layouts of its parameters.

    rules[o]: the axis rules of op o. Ops and values are priced once, a parameter once per stored
    layout: what differs between the leaves of a region costs microseconds. recompute: what
    `RegionPrice.again` is about. timers: of the ops, if at hand.
    """

    def __init__(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        rules: Sequence[Sequence[AxisRule]],
        mesh: Mesh,
        costs: CostModel,
        recompute: Recompute = "full",
        timers: Sequence[OpTimer] | None = None,
    ) -> None:
        self.graph = graph
        self.mesh = mesh
        self.costs = costs
        self.typing = typing
        self.rules = rules
        layouts = layouts_of_values(graph, typing)
        if recompute == "selective":
            self._again = selective_again(graph, typing, layouts, mesh, costs)
        else:
            self._again = full_again(graph, typing)
        self._recompute = recompute
        self._demands = [demands for _, demands in layouts]
        self._parameters = [
            i for i, slot in enumerate(graph.slots) if slot.kind is SlotKind.PARAMETER
        ]
        self._known: dict[tuple[int, Layout], PriceSums] = {}
        self._prices: dict[tuple[Layout, ...], RegionPrice] = {}
        self._inside = PriceSums(mesh)
        self._forward_s = self._backward_s = 0.0
        self.op_times: list[OpTime] = []
        """Of every op, without recomputation."""
        timers = timers or [OpTimer(graph, op, mesh, costs) for op in graph.ops]
        for k, (timer, of_axes) in enumerate(zip(timers, rules, strict=True)):
            time = timer.time(of_axes)
            self.op_times.append(time)
            self._forward_s += time.forward_s
            self._backward_s += time.backward_s
            self._inside.add_op(time, k in self._again.ops)
        parameters = set(self._parameters)
        for v, (native, _) in enumerate(layouts):
            if v not in parameters and any(d != native for d in self._demands[v]):
                self._inside.merge(self._value(v, native))

    def price(
        self,
        slots: Sequence[Layout],
        recompute: Recompute = "none",
        *,
        keeps_gathered: bool = False,
        host: HostTraffic = _NO_TRAFFIC,
    ) -> RegionPrice:
        """The price of one instance whose slots are stored, or arrive, as `slots`; those that are
        no parameters as the typing has them. host: what goes there."""
        if recompute == "selective" and self._recompute != "selective":
            return self._selective.price(slots, recompute, keeps_gathered=keeps_gathered, host=host)
        stored = tuple([slots[i] for i in self._parameters])
        price = self._prices.get(stored)
        if price is None:
            price = self._prices[stored] = self._price(slots)
        return price.under(recompute != "none", 1 if keeps_gathered else 2, host)

    def _price(self, slots: Sequence[Layout]) -> RegionPrice:
        """The price without recomputation."""
        sums = PriceSums(self.mesh)
        sums.merge(self._inside)
        for i in self._parameters:
            known = self._known.get((i, slots[i]))
            if known is None:
                known = self._known[i, slots[i]] = self._value(i, slots[i])
            sums.merge(known)
        return _finish(self._forward_s, self._backward_s, sums, self.costs)

    @cached_property
    def _selective(self) -> "RegionPricer":
        """The same, made when somebody first asks: it cannot run yet, so few do."""
        return RegionPricer(self.graph, self.typing, self.rules, self.mesh, self.costs, "selective")

    def _value(self, v: int, native: Layout) -> PriceSums:
        """The conversions of one value."""
        sums = PriceSums(self.mesh)
        graph, value = self.graph, self.graph.values[v]
        is_parameter = v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
        edges = plan_conversions(value, native, self._demands[v], self.mesh, self.costs)
        again = self._again.starts(v, value, edges, self.mesh, self.costs)
        for edge in edges:
            start = again.get(edge[1])
            if is_parameter and edge[0] == native:
                _price_parameter(graph, v, edge, sums, self.costs, start is not None)
                continue
            cost = _price_conversion(graph, v, edge, sums, self.costs)
            if start == edge[0]:
                sums.add_again(cost)
            elif start is not None:
                sums.add_again(conversion_cost(value, start, edge[1], self.mesh, self.costs))
        if is_parameter:
            self._add_copies(v, native, sums)
        return sums

    def _add_copies(self, v: int, native: Layout, sums: PriceSums) -> None:
        """Of every bucket that a parameter is in."""
        value, mesh, costs = self.graph.values[v], self.mesh, self.costs
        for used in dict.fromkeys(used_layout(native, d, mesh) for d in self._demands[v]):
            key = bucket_key(v, value, native, used, mesh, costs)
            if key is not None:
                sums.add_copies(parameter_copies(value, native, key[0], mesh, costs))


def price_region(
    graph: OpGraph,
    typing: RegionTyping,
    rules: Sequence[Sequence[AxisRule]],
    mesh: Mesh,
    costs: CostModel,
) -> RegionPrice:
    """Price one instance of a region as it will be emitted. rules[o]: the axis rules of op o."""
    pricer = RegionPricer(graph, typing, rules, mesh, costs)
    return pricer.price(typing.slots, typing.recompute, keeps_gathered=typing.keeps_gathered)


def layouts_of_values(
    graph: OpGraph, typing: RegionTyping
) -> list[tuple[Layout, tuple[Layout, ...]]]:
    """Per value its native layout and the distinct layouts that ops and outputs demand of it, in
    order of first use."""
    native = [*typing.slots, *([()] * (len(graph.values) - len(graph.slots)))]
    demands: list[dict[Layout, None]] = [{} for _ in graph.values]
    for op, chosen in zip(graph.ops, typing.ops, strict=True):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            demands[v][layout] = None
        for v, layout in zip(op.outputs, chosen.outputs, strict=True):
            native[v] = layout
    for v, layout in zip(graph.outputs, typing.outputs, strict=True):
        demands[v][layout] = None
    for slot, v in graph.mutations:
        demands[v][typing.slots[slot]] = None
    return [(n, tuple(d)) for n, d in zip(native, demands, strict=True)]


def value_name(graph: OpGraph, v: int) -> str:
    """How people read a value: the slot's name, else the op that made it."""
    if v < len(graph.slots):
        return graph.slots[v].name or f"slot {v}"
    op = graph.ops[graph.producers[v]]
    target = op.target.removeprefix("aten.").removesuffix(".default")
    return f"{op.scope}.{target}" if op.scope else target


_Edge = tuple[Layout, Layout]


def _price_conversion(
    graph: OpGraph, v: int, edge: _Edge, sums: PriceSums, costs: CostModel
) -> ConversionCost:
    cost = conversion_cost(graph.values[v], *edge, sums.mesh, costs)
    sums.add(cost)
    _record(graph, v, "activation", edge, cost, sums)
    return cost


def _price_parameter(
    graph: OpGraph, v: int, edge: _Edge, sums: PriceSums, costs: CostModel, is_again: bool
) -> None:
    """Bucketed steps are added up by bytes and priced per bucket; the record shows them alone. What
    is stored as shards on several axes is gathered over them as one group, what is whole on several
    reduced over them so. What comes out of a bucket is gathered for the backward in any case, also
    where the rest runs again."""
    mesh, value = sums.mesh, graph.values[v]
    gathered: list[int] = []
    reduced: list[int] = []
    steps = conversion_steps(value, *edge, mesh, costs)
    for step in steps:
        if is_bucketed(step.source, step.target):
            (gathered if step.source.is_shard else reduced).append(step.axis)
            continue
        cost = steps_cost(value, (step,), mesh, costs)
        sums.add(cost)
        if is_again:
            sums.add_again(cost)
    here, kept = (size(value, edge[0], mesh.sizes) for size in (local_bytes, stored_bytes))
    if gathered:
        axes = tuple(sorted(gathered))
        shards = math.prod(mesh.sizes[k] for k in axes)
        is_alone = has_own_bucket(value, edge[0], axes, mesh, costs)
        alone = (v, used_layout(*edge, mesh)) if is_alone else None
        sums.bucket(axes, "all_gather", alone, shards * here)
        if value.requires_grad:
            sums.bucket(axes, "reduce_scatter", alone, shards * kept)
    if reduced and value.requires_grad:
        sums.bucket(tuple(sorted(reduced)), "all_reduce", None, kept)
    _record(graph, v, "parameter", edge, steps_cost(value, steps, mesh, costs), sums)


def _record(
    graph: OpGraph, v: int, kind: str, edge: _Edge, cost: ConversionCost, sums: PriceSums
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


def _finish(forward_s: float, backward_s: float, sums: PriceSums, costs: CostModel) -> RegionPrice:
    names = sums.mesh.names
    gather_s, reduce_s = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    buckets = [(axes, kind, size) for (axes, kind, _), size in sums.bucket_bytes.items()]
    for axes, kind, num_bytes in sorted(buckets):
        # The outermost axis has the slowest links of the group.
        seconds = gather_s if kind == "all_gather" else reduce_s
        seconds[names[axes[0]]] += costs.collective_s(kind, num_bytes, axes)
    return RegionPrice(
        forward_s=forward_s + sums.gathered_s,
        backward_s=backward_s + sums.gathered_s + sums.reduced_s,
        graph_forward_s=sums.forward_s,
        graph_backward_s=sums.backward_s,
        communication_s=dict(zip(names, sums.communication_s, strict=True)),
        gather_s=gather_s,
        reduce_s=reduce_s,
        conversions=tuple([r for _, r in sorted(sums.records, key=itemgetter(0))]),
        again=AgainPrice(
            sums.again_compute_s,
            sums.again_s,
            dict(zip(names, sums.again_by_axis_s, strict=True)),
        ),
        regathered_s=sums.gathered_s,
    )
