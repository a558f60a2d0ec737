"""What a plan does for the sake of its memory budget, and the price of each of these mechanisms.

A plan has a state per mechanism: how many layers recompute what, their ZeRO levels, how many have
optimizer states on the host, in what precision they are kept, and the layout (degrees, stages,
microbatches). The best plans at the budget B and with unlimited memory differ in the mechanisms
that are traded. Budgets between them are searched, too, so that

    B = b_0 < b_1 < ... < unlimited        t_k  step time of the best plan in b_k
    price of what differs between the plans of b_k and b_k+1 = (t_k - t_k+1) / t of unlimited

An interval in which several mechanisms differ is halved, the dearest first, MOST_SEARCHES times in
all, unless it costs less than LEAST_SHARE; what still differs together has one price. Prices add up
to that of the budget: every one is a difference of two searches.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

from meshfold.ir.plan import Plan, RegionPlan
from meshfold.ir.strategy import UniformStrategy
from meshfold.units import bytes_text

UNLIMITED_BYTES = 1 << 60
"""More than any device has."""

MOST_SEARCHES = 8
"""Between the budget and unlimited memory."""

LEAST_SHARE = 0.01
"""Of a step: what costs less is not told apart."""

LEAST_BYTES = 1 << 20
"""Budgets that are nearer are not told apart."""

OFFLOAD, RECOMPUTE, ZERO, LAYOUT = "offload", "recompute", "zero", "layout"
CHUNKS, STATES = "chunks", "states"
OTHER = "other"
MECHANISMS = (CHUNKS, STATES, OFFLOAD, RECOMPUTE, ZERO, LAYOUT)

PlanIn = Callable[[int], Plan]
"""The best plan in a budget of so many bytes."""


@dataclass(frozen=True)
class MemoryPrice:
    """Mechanisms that are traded together, and what that adds to a step, relative to the step with
    unlimited memory."""

    mechanisms: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class _Point:
    """The best plan in a budget."""

    num_bytes: int
    plan: Plan

    @property
    def needed_bytes(self) -> int:
        """The least budget with this plan."""
        return min(self.num_bytes, self.plan.memory.peak)

    @cached_property
    def states(self) -> dict[str, Counter[object]]:
        """How many layers do what, by mechanism."""
        regions = regions_of(self.plan)
        found: dict[str, Counter[object]] = {
            name: Counter(_done(name, region.strategy) for region in regions)
            for name in (OFFLOAD, RECOMPUTE)
        }
        # A level may hold for some parameters of a layer.
        found[ZERO] = Counter(
            (region.strategy.zero, tuple(p.stored for p in region.parameters)) for region in regions
        )
        found[CHUNKS] = Counter([self.plan.chunked_loss])
        found[STATES] = Counter([self.plan.optimizer])
        found[LAYOUT] = Counter([(_layout(self.plan), self.plan.schedule)])
        return found


def memory_prices(
    plan: Plan, plan_in: PlanIn, most_searches: int = MOST_SEARCHES
) -> tuple[Plan, tuple[MemoryPrice, ...]]:
    """(the best plan with unlimited memory, prices of what `plan` does instead). plan: the best one
    in its own budget. most_searches: of budgets in between."""
    free = _Point(UNLIMITED_BYTES, _no_slower(plan_in(UNLIMITED_BYTES), plan))
    points = [_Point(plan.memory.capacity, plan), free]
    for _ in range(most_searches):
        tangled = [pair for pair in pairwise(points) if _can_be_halved(*pair, points)]
        if not tangled:
            break
        low, high = max(tangled, key=lambda pair: _added_s(pair[0], pair[1], points))
        middle_bytes = (low.num_bytes + high.needed_bytes) // 2
        middle = _Point(middle_bytes, _no_slower(plan_in(middle_bytes), low.plan))
        points.insert(points.index(high), middle)
    added_s: dict[tuple[str, ...], float] = {}
    for low, high in pairwise(points):
        names, more_s = _different(low, high), _added_s(low, high, points)
        if names or more_s:
            names = names or (OTHER,)
            added_s[names] = added_s.get(names, 0.0) + more_s
    free_s = _step_s(free, points)
    return free.plan, tuple(MemoryPrice(names, s / free_s) for names, s in added_s.items())


def why_it_fits(plan: Plan, plan_in: PlanIn, most_searches: int = MOST_SEARCHES) -> str:
    """What a plan does for memory's sake, and what each of it costs, as one note."""
    free, prices = memory_prices(plan, plan_in, most_searches)
    best = "the best plan on devices of any memory"
    needs = bytes_text(free.memory.peak)
    if not prices:
        return f"the budget costs nothing: {best} needs {needs}"
    words = _Words(plan, free)
    # What stands alone is said first, so that what is traded together is short.
    ordered = sorted(prices, key=lambda price: (len(price.mechanisms) > 1, -price.share))
    found = "; ".join(f"{words.of(price.mechanisms)} ({price.share:+.1%})" for price in ordered)
    total = sum(price.share for price in prices)
    return (
        f"fits because: {found}; in all {total:+.1%} on the step of {free.strategy.label}, {best}, "
        f"which needs {needs}"
    )


def with_prices(plan: Plan, plan_in: PlanIn, most_searches: int) -> Plan:
    """The plan with that note."""
    return replace(plan, notes=(*plan.notes, why_it_fits(plan, plan_in, most_searches)))


def _no_slower(found: Plan, known: Plan) -> Plan:
    """`found`, or a plan that is known to fit as well and is faster."""
    return known if _seconds(known, found) < _seconds(found, known) else found


def _seconds(plan: Plan, other: Plan) -> float:
    """Of a step, to be compared with another."""
    is_simulated = plan.simulated is not None and other.simulated is not None
    return plan.step_s if is_simulated else plan.time.step_s


def regions_of(plan: Plan) -> list[RegionPlan]:
    """The region of every layer."""
    regions = {region.name: region for region in plan.regions}
    runs = [run for stage in plan.stages for run in stage.runs]
    return [regions[run.region] for run in runs for _ in range(run.count)]


def _can_be_halved(low: _Point, high: _Point, points: Sequence[_Point]) -> bool:
    if _added_s(low, high, points) < LEAST_SHARE * _step_s(low, points):
        return False
    several = len(_different(low, high)) > 1
    return several and high.needed_bytes - low.num_bytes > LEAST_BYTES


def _different(low: _Point, high: _Point) -> tuple[str, ...]:
    """Mechanisms of whose states two plans differ."""
    return tuple(name for name in MECHANISMS if low.states[name] != high.states[name])


def _step_s(point: _Point, points: Sequence[_Point]) -> float:
    """Simulated where all are, else as added up."""
    is_simulated = all(p.plan.simulated is not None for p in points)
    return point.plan.step_s if is_simulated else point.plan.time.step_s


def _added_s(low: _Point, high: _Point, points: Sequence[_Point]) -> float:
    """What the smaller of two budgets costs."""
    return _step_s(low, points) - _step_s(high, points)


class _Words:
    """What a plan does, beside the plan without a limit; in short from the second time on."""

    def __init__(self, plan: Plan, free: Plan) -> None:
        self._plan, self._free = plan, free
        self._said: set[str] = set()

    def of(self, mechanisms: Sequence[str]) -> str:
        """Mechanisms that have one price."""
        found = " and ".join(map(self._of, mechanisms))
        return f"{found} together" if len(mechanisms) > 1 else found

    def _of(self, name: str) -> str:
        if name in self._said or name == OTHER:
            return _SHORT[name]
        self._said.add(name)
        if name == CHUNKS:
            return "logits in chunks" if self._plan.chunked_loss else "logits as a whole"
        if name == STATES:
            return _STATES.get(self._plan.optimizer, "optimizer states as parameters are")
        if name == LAYOUT:
            layout, free = _layout(self._plan), _layout(self._free)
            # Only plans of budgets in between have others.
            return f"{layout} instead of {free}" if layout != free else _SHORT[name]
        of_layers = [_done(name, region.strategy) for region in regions_of(self._plan)]
        others = Counter(_done(name, region.strategy) for region in regions_of(self._free))
        more = [
            words.format(f"{count} of {len(of_layers)} layers")
            for done, words in _DONE[name].items()
            if (count := of_layers.count(done)) > others[done]
        ]
        return ", ".join(more) or f"other uses of {_SHORT[name]}"


def _done(name: str, strategy: UniformStrategy) -> object:
    """What a layer does of a mechanism."""
    return {
        OFFLOAD: strategy.offload,
        RECOMPUTE: strategy.recompute,
        ZERO: strategy.zero,
    }[name]


_SHORT = MappingProxyType(
    {
        OFFLOAD: "offload",
        RECOMPUTE: "recomputation",
        ZERO: "ZeRO",
        LAYOUT: "degrees",
        CHUNKS: "logits in chunks",
        STATES: "precision of states",
        OTHER: "the like in other layers",
    }
)
_STATES: Mapping[str, str] = MappingProxyType(
    {"adamw_bf16": "optimizer states in bfloat16", "adamw_8bit": "optimizer states in 8 bits"}
)
_DONE: Mapping[str, Mapping[object, str]] = MappingProxyType(
    {
        OFFLOAD: {
            "optimizer": "optimizer states of {} on the host",
            "parameters": "parameters of {} on the host until their layer runs",
            "disk": "optimizer states of {} on the host's disk",
            "activations": "saved activations of {} on the host",
        },
        RECOMPUTE: {
            "full": "full recomputation in {}",
            "heavy": "heavy selective recomputation in {}",
            "selective": "selective recomputation in {}",
            "light": "light selective recomputation in {}",
        },
        ZERO: {3: "ZeRO 3 in {}", 2: "ZeRO 2 in {}", 1: "ZeRO 1 in {}", 0: "no ZeRO in {}"},
    }
)


def _layout(plan: Plan) -> str:
    return _bare(plan.strategy).label


def _bare(strategy: UniformStrategy) -> UniformStrategy:
    """Degrees, stages and microbatches alone."""
    return replace(strategy, zero=0, recompute="none", offload="none")
