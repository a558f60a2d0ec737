"""The plan that the search chooses, against plans under random pins and against published ones.

Every plan is refined as users' plans are, and compared by the step that it states (simulated where
it can be). What is planned is appended to a file of JSON lines and not planned again, so that a run
that is stopped goes on where it was.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import click
from published.predict import captured_shape
from published.runs import DEFAULT, Run, read_runs
from published.setup import NotExpressible, setup_of

from meshfold.errors import MeshfoldError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.pins import pinned_values
from meshfold.passes.planner.find import find_plan_for
from meshfold.refine.pipeline import refined
from meshfold.units import seconds_text
from pinning.draws import drawn_pins, neighbour_pins
from pinning.setups import SETUPS, PinSetup

NEIGHBOURS = 100_000
"""Numbers of draws near the plan that is chosen begin here."""
MOST_DRAWS = 4
"""Draws per plan that is wanted: many pins are refused."""
LEAST_GAIN = 5e-3
"""By how much a pin must be faster to be told: the search stops at 0.1 %, simulated steps are
ranked by four digits, and a pipeline must gain as much to replace a plan in one pass."""


@dataclass(frozen=True)
class Planned:
    """A plan, or why there is none. number: of the draw, -1: nothing is pinned. step_s: as stated;
    sum_s: as added up."""

    setup: str
    number: int
    pins: dict[str, PinValue]
    label: str = ""
    step_s: float | None = None
    sum_s: float | None = None
    bound_s: float | None = None
    cpu_s: float = 0.0
    why_not: str = ""
    point: dict[str, PinValue] = field(default_factory=dict)
    """Its degrees, as pins."""


class Results:
    """Planned by (setup, number), in a file of JSON lines; None: in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[tuple[str, int], Planned] = {}
        if path is not None and path.exists():
            for line in path.read_text("utf-8").splitlines():
                self._keep(Planned(**json.loads(line)))

    def get(self, setup: str, number: int, make: Callable[[], Planned]) -> Planned:
        """What is known; made and written down where nothing is."""
        if (setup, number) not in self.found:
            self._keep(made := make())
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(made)) + "\n")
        return self.found[setup, number]

    def _keep(self, planned: Planned) -> None:
        self.found[planned.setup, planned.number] = planned


Case = tuple[FoldedGraph, ClusterSpec, CompileOptions]
"""The folded graph, the cluster, and the options without pins."""


def planned(name: str, number: int, batch: int, case: Case, pins: dict[str, PinValue]) -> Planned:
    """The plan under pins."""
    start = time.process_time()
    try:
        plan = _plan(name, batch, case, pins)
    except MeshfoldError as error:
        why = f"{type(error).__name__}: {error}"[:160]
        return Planned(name, number, pins, cpu_s=time.process_time() - start, why_not=why)
    return Planned(
        name,
        number,
        pins,
        label_of(plan),
        plan.step_s,
        plan.time.step_s,
        plan.search.lower_bound_s,
        time.process_time() - start,
        point=pinned_values(plan.strategy),
    )


def _plan(name: str, batch: int, case: Case, pins: dict[str, PinValue]) -> Plan:
    graph, cluster, options = case
    options = replace(options, pins=pins)
    plan = find_plan_for(
        graph, cluster, options, model_name=name, batch_size=batch, probe=OpProber()
    )
    return refined(plan, graph, options)


def label_of(plan: Plan) -> str:
    """Its strategy and schedule."""
    return f"{plan.strategy.label}{f' {plan.schedule}' if plan.schedule else ''}"


def race_pins(setup: PinSetup, num_pins: int, results: Results) -> list[Planned]:
    """The free plan first, then num_pins plans under pins that can be kept,
    half of them near the free plan."""
    case = lru_cache(maxsize=1)(setup.captured)

    def planned_under(number: int, pins: dict[str, PinValue]) -> Planned:
        known = setup.name, number
        return results.get(*known, lambda: planned(*known, setup.batch, case(), pins))

    found = [planned_under(-1, {})]
    drawn: list[dict[str, PinValue]] = []
    for number in range(MOST_DRAWS * num_pins):
        if sum(p.step_s is not None for p in found[1:]) >= num_pins:
            break
        for known, pins in _drawn(setup, number, found[0].point):
            if pins not in drawn:
                drawn.append(pins)
                found.append(planned_under(known, pins))
    return found


def _drawn(
    setup: PinSetup, number: int, chosen: Mapping[str, PinValue]
) -> Iterator[tuple[int, dict[str, PinValue]]]:
    """A random set of pins, and a neighbour of the plan that is chosen; with their numbers."""
    sizes = setup.num_devices, setup.batch
    kinds = {"is_moe": setup.is_moe, "is_tight": setup.memory_bytes is not None}
    yield number, drawn_pins(number, *sizes, mode=setup.mode, **kinds)
    if chosen:
        pins = neighbour_pins(number, chosen, batch=setup.batch, is_moe=setup.is_moe)
        yield NEIGHBOURS + number, pins


def race_published(run: Run, results: Results) -> list[Planned]:
    """The free plan, then the published one; nothing where the run cannot be asked for."""
    try:
        setup = setup_of(run)
    except NotExpressible:
        return []
    options = replace(setup.options, pins={})

    def planned_under(number: int, pins: dict[str, PinValue]) -> Planned:
        def make() -> Planned:
            case = captured_shape(setup.shape).graph, setup.cluster, options
            return planned(run.id, number, setup.shape.batch, case, pins)

        return results.get(run.id, number, make)

    return [planned_under(-1, {}), planned_under(0, dict(setup.options.pins))]


def faster_pins(found: Sequence[Planned]) -> Iterator[tuple[float, Planned]]:
    """(share of the free plan's step that a pin saves, the pin), where it is worth telling."""
    free, *pinned = found
    for p in pinned:
        if p.step_s is not None and (free.step_s is None or p.step_s < free.step_s):
            gain = 1 - p.step_s / free.step_s if free.step_s else 1.0
            if gain > LEAST_GAIN:
                yield gain, p


def tell(name: str, found: Sequence[Planned]) -> int:
    """Prints one setup; how many pins are faster."""
    free, *pinned = found
    kept = [p for p in pinned if p.step_s is not None]
    faster = sorted(faster_pins(found), key=lambda x: -x[0])
    step = seconds_text(free.step_s) if free.step_s else "none"
    cpu_s = sum(p.cpu_s for p in found)
    click.echo(
        f"{name:<44}{step:>9}{len(kept):>6} pins{len(faster):>4} faster{cpu_s:>8.0f} CPU s  "
        f"{free.label or free.why_not}"
    )
    for gain, p in faster:
        pins = " ".join(f"{k}={v}" for k, v in p.pins.items())
        click.echo(f"    {100 * gain:5.1f} % faster, draw {p.number}: {p.label}  [{pins}]")
    return len(faster)


def race(num_pins: int, path: Path | None, wanted: str) -> int:
    """Every setup whose name has `wanted`; how many pins are faster."""
    results = Results(path)
    names = [s for s in SETUPS if wanted in s.name]
    return sum(tell(s.name, race_pins(s, num_pins, results)) for s in names)


def race_all_published(num_runs: int, path: Path | None) -> int:
    """Runs spread evenly over the published ones; how many published plans are faster."""
    results = Results(path)
    runs = read_runs(DEFAULT).runs
    found = [race_published(run, results) for run in runs[:: max(1, len(runs) // num_runs)]]
    both = [f for f in found if f and all(p.step_s is not None for p in f)]
    click.echo(f"{len(found)} published runs, {len(both)} planned with and without their pins")
    return sum(tell(f[0].setup, f) for f in both)
