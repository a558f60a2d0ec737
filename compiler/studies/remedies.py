"""Nothing fits: what would, found by planning again.

pins      without those that forbid microbatches and stages, where there are such
devices   twice, 4 and 8 times as many nodes, the first that has a plan
memory    between what there is and what the best candidate needs, by NUM_HALVINGS halvings of
          the difference
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType

from meshfold.errors import InfeasibleError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.stage_pins import excludes_pipelines
from meshfold.units import bytes_text

PlanIn = Callable[[ClusterSpec, CompileOptions], Plan | None]
"""The best plan; None where there is none."""

TIMES = (2, 4, 8)
"""As many nodes."""

ONE_PASS = MappingProxyType({"pp": 1, "microbatches": 1})
"""Pins that forbid microbatches and stages."""


def with_remedies(
    error: InfeasibleError, cluster: ClusterSpec, options: CompileOptions, plan_in: PlanIn
) -> InfeasibleError:
    """The same error, saying also what would fit. options: with which nothing does."""
    forbidding = _forbidding(options)
    tried = "microbatches and stages were tried, too; " if not forbidding else ""
    found = [
        *_without_pins(cluster, options, forbidding, plan_in),
        *_more_devices(cluster, options, plan_in),
        *_more_memory(error, cluster, options, plan_in),
    ]
    if found:
        words = f"planned again, these would fit: {'; '.join(found)}"
    else:
        most = TIMES[-1] * cluster.num_devices
        words = f"planned again, nothing fits in one pass on {most} devices either"
    return InfeasibleError(
        f"{error}; {tried}{words}",
        binding_constraint=error.binding_constraint,
        best_candidate=error.best_candidate,
        required_bytes=error.required_bytes,
        available_bytes=error.available_bytes,
    )


def _forbidding(options: CompileOptions) -> tuple[str, ...]:
    """Names of the pins without which microbatches and stages would have been tried."""
    layouts = tuple(pin for pin in options.pins if pin not in options.strategy_pins)
    if options.layout_pins:
        return tuple(name for name in layouts if name.startswith("layout:"))
    return tuple(ONE_PASS) if excludes_pipelines(options.pins) else ()


def _without_pins(
    cluster: ClusterSpec, options: CompileOptions, names: tuple[str, ...], plan_in: PlanIn
) -> Iterator[str]:
    if not names:
        return
    pins = {name: value for name, value in options.pins.items() if name not in names}
    plan = plan_in(cluster, replace(options, pins=pins))
    if plan is not None:
        dropped = ", ".join(f"{name}={options.pins[name]}" for name in names)
        yield f"without pin {dropped} ({plan.strategy.label})"


def _more_devices(cluster: ClusterSpec, options: CompileOptions, plan_in: PlanIn) -> Iterator[str]:
    whole = replace(options, pins={**options.pins, **ONE_PASS})
    for times in TIMES:
        plan = plan_in(larger(cluster, times), whole)
        if plan is not None:
            yield f"{plan.world_size} devices ({plan.strategy.label})"
            return


def larger(cluster: ClusterSpec, times: int) -> ClusterSpec:
    """The cluster with so many times the nodes."""
    groups = tuple(replace(g, num_nodes=g.num_nodes * times) for g in cluster.groups)
    return replace(cluster, groups=groups)


def _more_memory(
    error: InfeasibleError, cluster: ClusterSpec, options: CompileOptions, plan_in: PlanIn
) -> Iterator[str]:
    low, high = error.available_bytes, error.required_bytes
    if low >= high:
        return
    whole = {**options.pins, **ONE_PASS}
    for num_bytes, pins in (((low + high) // 2, options.pins), (high, whole)):
        plan = plan_in(cluster, replace(options, pins=pins, memory_bytes=num_bytes))
        if plan is not None:
            yield f"{bytes_text(num_bytes)} per device ({plan.strategy.label})"
            return
