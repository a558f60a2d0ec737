"""Programs beside the best of a search that may win once they are emitted and simulated.

The search ranks meshes by sums, and by steps that are simulated in mode eager as regions are
written. The program that runs may hide more: collective matmuls, and in mode scheduled collectives
inside of regions. However it is ordered, C seconds of kernels and B seconds on a link take at least

    max(B, C) + (k - 1) min(B, C)        with the slowdown k of cost_models/simulation/streams.py

MOST_RIVALS of the programs that are promised less than the step of the best are handed on, those of
the least first; so many meshes are planned for it that the search would leave. Collective matmuls,
buckets and hierarchical all-reduces change B: what is promised is a bound of the program as the
search wrote it.
"""

from collections.abc import Iterable, Mapping

from meshfold.cost_models.simulation.streams import overlapped_s
from meshfold.passes.one_pass.priced import Priced, order_of
from meshfold.passes.one_pass.record import MeshRecord
from meshfold.passes.one_pass.shortlist import Shortlisted, simulated, simulated_step_s

MOST_RIVALS = 2
"""Chosen, not measured: every one is emitted and simulated."""

EMITTED_GAIN = 1.12
"""Meshes with bounds up to this multiple of the best simulated step are planned for it. Chosen:
micro-chunks, buckets and mode scheduled took 2 to 11 % of the steps that were looked at."""

LEAST_GAIN = 5e-3
"""Share of a step that is worth another program than the simpler one."""


def least_step_s(compute_s: float, by_link_s: Mapping[str, float], slowdown: float) -> float:
    """Seconds of a step with so many of kernels and on each link, whatever overlaps."""
    return overlapped_s(compute_s, max(by_link_s.values(), default=0.0), slowdown)


def promised_s(priced: Priced, slowdown: float) -> float:
    """Seconds of a step whose communication hides wherever its link has the time."""
    time, by_link_s = priced.time, dict[str, float]()
    for axis in priced.mesh.axes:
        seconds = time.communication_s.get(axis.name, 0.0)
        by_link_s[axis.link] = by_link_s.get(axis.link, 0.0) + seconds
    compute_s = time.forward_s + time.backward_s
    return least_step_s(compute_s, by_link_s, slowdown) + time.optimizer_s


def rivals(state: MeshRecord, ranked: Iterable[Shortlisted], slowdown: float) -> list[Shortlisted]:
    """Those of the programs that a search has priced, simulated. ranked: simulated ones, the best
    first; slowdown: of what overlaps."""
    best, *known = ranked
    limit_s = (1 - LEAST_GAIN) * simulated_step_s(best)
    by_planner = {f.planner: f for f in known}
    others = [
        by_planner.get(planner, Shortlisted(plan.best, planner))
        for planner, plan in state.plans.items()
        if plan.best is not None and planner is not best.planner
    ]
    promised = [(promised_s(f.priced, slowdown), f) for f in others]
    may_win = [(s, f) for s, f in promised if s < limit_s]
    may_win.sort(key=lambda pair: (pair[0], order_of(pair[1].priced)))
    return [f if f.step is not None else simulated(f) for _, f in may_win[:MOST_RIVALS]]
