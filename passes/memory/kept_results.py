"""What selective recomputation keeps of a region: the cheapest mix of bytes and seconds, a minimum
cut of the region's local program.

With a price of p seconds per byte, find the steps to compute twice and the storages to keep that
minimise

    sum over recomputed steps of seconds  +  p * sum over kept storages of bytes

so that every storage which the backward reads, or a recomputed step, is kept or made again:

    source -> W s      infinite      autograd keeps storage s of some step
    source -> R k      p * inside    step k keeps bytes of its own unless it is recomputed
    W s    -> R k      p * bytes     s, which step k makes, is wanted: kept, or k is recomputed
    R k    -> W o      infinite      what a recomputed step reads is wanted
    R k    -> sink     seconds       of the forward of step k, collectives included

A node on the source side of the cut is wanted (W) or recomputed (R). Storages that are there in any
case are free: those of slots, and of outputs, which the next region holds. A view lives on the
storage of what it views: it is never kept, and made again (R) where it is wanted.

With the slope of the chord between two points of the trade-off as the price, the cut is the point
that lies furthest below their mix. "selective" is the one below the mix of keeping all and nothing;
"light" the one between keeping all and "selective", "heavy" the one between that and nothing, where
there is one. Layers that take a point mix with layers that take another along a run
(passes/run/hull.py). The formulation of a cut is that
of torch's min-cut partitioner, which counts bytes alone (torch/_functorch/partitioners.py; see also
Jain et al., Checkmate, MLSys 2020, arXiv:1910.02653).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from meshfold.cost_models.memory.live_ranges import LocalProgram
from meshfold.cost_models.memory.op_memory import NEW_STORAGE
from meshfold.cost_models.memory.recomputation import plan_recompute
from meshfold.ir.strategy import SELECTIVE, KeptResults, Recompute
from meshfold.passes.memory.local_program import Origin
from meshfold.passes.price.conversions import steps_cost
from meshfold.passes.price.region import RecomputePrice, RegionPricer

_UNITS_PER_S = 10**16
"""Capacities are whole numbers, so that equal costs are equal."""

_Node = tuple[str, int]
_SOURCE, _SINK = ("source", 0), ("sink", 0)


@dataclass(frozen=True)
class Selective:
    """What a region keeps, and what the rest adds to its backward."""

    kept: KeptResults
    price: RecomputePrice


def selective(
    program: LocalProgram,
    origins: Sequence[Origin],
    pricer: RegionPricer,
    *,
    keeps_all: bool = False,
) -> dict[Recompute, Selective]:
    """The choices for a region. origins: what the steps of its local program are; pricer: of its
    ops under the same rules; keeps_all: whether nothing is to be recomputed."""
    prices = [_step_price(origin, pricer) for origin in origins]
    seconds = [p.compute_s + p.graph_s for p in prices]
    if keeps_all:
        points = dict.fromkeys(SELECTIVE, everything_kept(program))
    else:
        points = cheapest_kept(program, seconds)
    return {
        recompute: _chosen(program, origins, prices, pricer, steps)
        for recompute, steps in points.items()
    }


def _chosen(
    program: LocalProgram,
    origins: Sequence[Origin],
    prices: Sequence[RecomputePrice],
    pricer: RegionPricer,
    steps: frozenset[int],
) -> Selective:
    """Where the results of `steps` are kept."""
    kept = [origins[k] for k in sorted(steps)]
    return Selective(
        KeptResults(
            tuple(o for o in kept if isinstance(o, int)),
            tuple(dict.fromkeys((o[0], o[1].after) for o in kept if not isinstance(o, int))),
        ),
        _sum([prices[k] for k in _recomputed(program, steps)], pricer),
    )


def recompute_price(
    program: LocalProgram, origins: Sequence[Origin], pricer: RegionPricer
) -> RecomputePrice:
    """What the steps that `program` computes twice add to the backward."""
    assert program.kept is not None
    again = _recomputed(program, program.kept)
    return _sum([_step_price(origins[k], pricer) for k in again], pricer)


def everything_kept(program: LocalProgram) -> frozenset[int]:
    """The steps of which the backward needs something."""
    cut = Cut(program, [0.0] * len(program.steps))
    return cut.needed(cut.steps)


def cheapest_kept(
    program: LocalProgram, seconds: Sequence[float]
) -> dict[Recompute, frozenset[int]]:
    """The steps whose results are kept at each point: see the module docstring. seconds: of the
    forward of every step. A point that nothing lies below is "selective", and that is everything
    that autograd keeps where nothing beats the mix of all and nothing."""
    cut = Cut(program, seconds)
    everything = cut.needed(cut.steps)
    # Where nothing is recomputed not even views are made again.
    ends = (0.0, cut.cost(everything)[1]), cut.cost(frozenset())
    middle = cut.below(*ends)
    if middle is None:
        return dict.fromkeys(SELECTIVE, everything)
    light, heavy = cut.below(ends[0], cut.cost(middle)), cut.below(cut.cost(middle), ends[1])
    return {
        "light": middle if light is None else light,
        "selective": middle,
        "heavy": middle if heavy is None else heavy,
    }


def _recomputed(program: LocalProgram, kept: frozenset[int]) -> list[int]:
    plan = plan_recompute(program.steps, program.num_slots, kept)
    return sorted(plan.steps) if plan.waiting else []


class Cut:
    """Choices of kept results of a local program, and what each costs. seconds: of the forward of
    every step."""

    def __init__(self, program: LocalProgram, seconds: Sequence[float]) -> None:
        self.program = program
        self.seconds = seconds
        self.roots = list(range(program.num_slots))
        """By tensor the first one on its storage."""
        self.roots += [-1] * (len(program.specs) - program.num_slots)
        self.sizes: dict[int, int] = {}
        """Bytes by storage."""
        self.makers: dict[int, int] = {}
        """The step that makes each storage."""
        self.viewers: dict[int, int] = {}
        """The step that makes each view, where it makes views alone."""
        for k, step in enumerate(program.steps):
            for t, output in zip(step.outputs, step.probe.outputs, strict=True):
                is_new = output.storage == NEW_STORAGE
                self.roots[t] = t if is_new else self.roots[step.operands[output.storage]]
                if is_new:
                    self.sizes[t], self.makers[t] = output.num_bytes, k
        self.sizes.update({self.roots[t]: 0 for t in program.outputs})
        made = set(self.makers.values())
        self.steps = frozenset(
            k for k, step in enumerate(program.steps) if k in made or step.probe.saved_bytes
        )
        """Those that make something, not views alone."""
        for k, step in enumerate(program.steps):
            if k not in self.steps:
                self.viewers.update(dict.fromkeys(step.outputs, k))

    def cost(self, kept: frozenset[int]) -> tuple[float, int]:
        """Seconds of what is recomputed, and bytes of what is kept."""
        steps = self.program.steps
        plan = plan_recompute(steps, self.program.num_slots, kept)
        seconds = sum(self.seconds[k] for k in sorted(plan.steps))
        inside = sum(steps[k].probe.saved_bytes for k in kept)
        return seconds, inside + sum(self.sizes.get(t, 0) for t in plan.saved)

    def below(self, more: tuple[float, int], fewer: tuple[float, int]) -> frozenset[int] | None:
        """The choice furthest below the mix of two points, each seconds and bytes; None where
        nothing is below it."""
        (least_s, most_bytes), (most_s, least_bytes) = more, fewer
        if most_bytes <= least_bytes:
            return None
        price_s = (most_s - least_s) / (most_bytes - least_bytes)
        found = self.kept(price_s)
        found_s, num_bytes = self.cost(found)
        of_mix_s = most_s + price_s * least_bytes
        return found if found_s + price_s * num_bytes < (1 - 1e-9) * of_mix_s else None

    def kept(self, price: float) -> frozenset[int]:
        """The steps of which something is kept where a byte costs `price` seconds."""
        graph = self._graph(price)
        _, (sources, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
        return self.needed(frozenset(k for k in self.steps if ("R", k) not in sources))

    def needed(self, kept: frozenset[int]) -> frozenset[int]:
        """Of these steps, those of which the backward needs something."""
        steps = self.program.steps
        saved = plan_recompute(steps, self.program.num_slots, kept).saved
        return frozenset(
            k for k in kept if steps[k].probe.saved_bytes or not saved.isdisjoint(steps[k].outputs)
        )

    def _graph(self, price: float) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))

        def add(start: _Node, end: _Node, seconds: float) -> None:
            graph.add_edge(start, end, capacity=round(seconds * _UNITS_PER_S))

        def want(start: _Node, tensor: int) -> None:
            root = self.roots[tensor]
            if tensor in self.viewers:
                graph.add_edge(start, ("R", self.viewers[tensor]))
            elif root in self.makers:
                graph.add_edge(start, ("W", root))

        for k, step in enumerate(self.program.steps):
            for j in step.probe.saved_operands:
                want(_SOURCE, step.operands[j])
            for j in step.probe.saved_outputs:
                want(_SOURCE, step.outputs[j])
            if k in self.steps:
                add(_SOURCE, ("R", k), price * step.probe.saved_bytes)
            add(("R", k), _SINK, self.seconds[k])
            for t in step.operands:
                want(("R", k), t)
        for s, k in self.makers.items():
            add(("W", s), ("R", k), price * self.sizes[s])
        return graph


def _step_price(origin: Origin, pricer: RegionPricer) -> RecomputePrice:
    """What the forward of a step costs when it runs a second time."""
    names = pricer.mesh.names
    if isinstance(origin, int):
        time = pricer.op_times[origin]
        inside = time.recomputed_communication_s
        return RecomputePrice(time.forward_s, sum(inside), dict(zip(names, inside, strict=True)))
    v, step = origin
    cost = steps_cost(pricer.graph.values[v], (step,), pricer.costs)
    by_axis = dict(zip(names, cost.forward_by_axis_s, strict=True))
    return RecomputePrice(0.0, cost.forward_s, by_axis)


def _sum(prices: Sequence[RecomputePrice], pricer: RegionPricer) -> RecomputePrice:
    return RecomputePrice(
        sum(p.compute_s for p in prices),
        sum(p.graph_s for p in prices),
        {a: sum(p.communication_s[a] for p in prices) for a in pricer.mesh.names},
    )
