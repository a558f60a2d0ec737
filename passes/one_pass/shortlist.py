"""The last choice of a search: the best programs of its meshes, ranked by a simulated step.

The search adds up costs, each instance's own communication hidden behind its own compute. That is
what its bounds need. The simulator puts collectives where the runtime issues them, on links that
they share, beside compute that they slow down; meshes that are close by the sum may change places.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.step_events import SimulatedStep, StepEvents
from meshfold.passes.events.program import program_events
from meshfold.passes.one_pass.priced import MeshPlan, Priced, order_of
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.price.step import host_waits_s

CONTENTION_RATIO = 1.1
"""Programs up to this multiple of the best additive step time are simulated. Chosen: contention
may take a tenth of a step."""

SHORTLIST_SIZE = 3
"""Programs that are simulated, the best by the sum first. Chosen, not measured."""


ListedT = TypeVar("ListedT")

MOST_BEYOND = 3
"""Meshes that are planned because their bound is below the best simulated step, though not below
the best sum. Chosen, not measured."""


@dataclass(frozen=True, eq=False)
class Shortlisted:
    """The best program of a mesh. events, step: once it is simulated, its events and the step that
    they make."""

    priced: Priced
    planner: MeshPlanner
    events: StepEvents | None = None
    step: SimulatedStep | None = None


def rank_shortlist(plans: Mapping[MeshPlanner, MeshPlan]) -> list[Shortlisted]:
    """The best first; not empty if a plan has a best program. By simulated time to four digits,
    then as by the sum."""
    found = [
        Shortlisted(plan.best, planner) for planner, plan in plans.items() if plan.best is not None
    ]
    found.sort(key=lambda f: order_of(f.priced))
    close = close_to_best(found, lambda f: f.priced.time.step_s)
    return by_simulation([simulated(f) for f in close])


def close_to_best(by_sum: Sequence[ListedT], step_s: Callable[[ListedT], float]) -> list[ListedT]:
    """Those of programs, the best sum first, that are simulated."""
    limit_s = CONTENTION_RATIO * min(map(step_s, by_sum), default=0.0)
    return [x for x in by_sum if step_s(x) <= limit_s][:SHORTLIST_SIZE]


def by_simulation(shortlist: Sequence[Shortlisted]) -> list[Shortlisted]:
    """Simulated programs, the best first: by simulated time to four digits, then as by the sum."""
    return sorted(
        shortlist, key=lambda f: (float(f"{simulated_step_s(f):.3e}"), order_of(f.priced))
    )


def simulated(listed: Shortlisted) -> Shortlisted:
    """The candidate with its events and its step."""
    priced, planner = listed.priced, listed.planner
    origin = {
        new.region: old.region
        for new, old in zip(priced.split.instances, planner.folded.instances, strict=True)
    }
    pricers = [
        planner.search.solutions(candidate.strategy.tp_mode)[origin[r]].pricer
        for r, candidate in enumerate(priced.candidates)
    ]
    events = program_events(
        priced.split,
        priced.typings,
        pricers,
        planner.costs,
        planner.probe,
        optimizer=planner.options.optimizer,
        optimizer_s=priced.time.optimizer_s
        + host_waits_s(priced.split, priced.prices, planner.costs.cluster.overlap_slowdown),
        offloads=[candidate.strategy.offload for candidate in priced.candidates],
        memory_model=planner.memory_model,
        reads=planner.reads,
    )
    return Shortlisted(priced, planner, events, simulate(events).step)


def simulated_step_s(listed: Shortlisted) -> float:
    """Seconds of a program that was simulated."""
    assert listed.step is not None
    return listed.step.step_s


def simulated_times(shortlist: Sequence[Shortlisted]) -> dict[MeshPlanner, float]:
    """Seconds by mesh, of those that were simulated."""
    return {f.planner: f.step.step_s for f in shortlist if f.step is not None}
