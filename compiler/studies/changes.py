"""What would have to change for the best plan to keep certain pins: found by planning again.

wins(x)   in the world x the best plan with the pins takes no longer than the best without
knob      one quantity of the world and a factor: memory, the bandwidth of a link, the batch
found     where wins holds at the end of the knob's range: the factor nearest to 1 at which it
          does, by bisection of the logarithm, NUM_HALVINGS times
not found where it does not hold at the end; what lies between is then not tried
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.plan import Plan
from meshfold.report.why_not import Change, StepParts
from meshfold.units import bytes_text, three_digits

MOST_BANDWIDTH = 16.0
MOST_MEMORY = 8.0
MOST_BATCH = 8
"""How far knobs are turned, either way."""

NUM_HALVINGS = 4
EQUAL = 1e-6
"""Relative difference of two step times that is none."""


@dataclass(frozen=True)
class World:
    """Where plans are made."""

    cluster: ClusterSpec
    memory_bytes: int
    """Budget per device."""
    batch: int
    """Global."""


PlanIn = Callable[[World, bool], Plan | None]
"""The best plan in a world, with the pins or without; None where there is none."""


def wins(world: World, plan_in: PlanIn) -> bool:
    """Whether the pins cost nothing there."""
    pinned = plan_in(world, True)
    if pinned is None:
        return False
    free = plan_in(world, False)
    return free is None or pinned.step_s <= (1 + EQUAL) * free.step_s


def changes(
    world: World, parts: tuple[StepParts, StepParts] | None, plan_in: PlanIn, sizes: bool
) -> Iterator[Change]:
    """One per knob. parts: of the plan and of the pinned one, where both exist; a link is made
    faster where the pinned plan uses it longer, else slower. sizes: whether the batch may change.
    """
    yield _of_memory(world, plan_in)
    if parts is not None:
        ours, theirs = ({link: use.seconds for link, use in p.links.items()} for p in parts)
        known = {world.cluster.network.name, *(g.link.name for g in world.cluster.groups)}
        for link in dict.fromkeys((*ours, *theirs)):
            if link not in known:
                continue  # of a plan that was edited
            is_faster = theirs.get(link, 0.0) >= ours.get(link, 0.0)
            yield _of_link(world, link, is_faster, plan_in)
    if sizes:
        yield _of_batch(world, plan_in)


def _of_memory(world: World, plan_in: PlanIn) -> Change:
    """More memory, then less."""

    def scaled(factor: float) -> World:
        return replace(world, memory_bytes=int(world.memory_bytes * factor))

    tried = f"{MOST_MEMORY:g} x and 1/{MOST_MEMORY:g}"
    for most in (MOST_MEMORY, 1 / MOST_MEMORY):
        factor = nearest(scaled, most, plan_in)
        if factor is not None:
            amount = bytes_text(world.memory_bytes * factor)
            return Change("memory per device", f"{amount} {_beyond(factor)}", tried)
    return Change("memory per device", "", tried)


def _beyond(factor: float) -> str:
    return "or more" if factor >= 1 else "or less"


def _of_link(world: World, link: str, is_faster: bool, plan_in: PlanIn) -> Change:
    most = MOST_BANDWIDTH if is_faster else 1 / MOST_BANDWIDTH

    def scaled(factor: float) -> World:
        return replace(world, cluster=with_bandwidth(world.cluster, link, factor))

    factor = nearest(scaled, most, plan_in)
    found = ""
    if factor is not None:
        rate = bytes_text(bandwidth(world.cluster, link) * factor)
        found = f"{three_digits(factor)} x {_beyond(factor)}, {rate}/s"
    tried = f"{most:g} x" if is_faster else f"1/{MOST_BANDWIDTH:g}"
    return Change(f"bandwidth of {link}", found, tried)


def _of_batch(world: World, plan_in: PlanIn) -> Change:
    """Doubled, then halved, as often as it divides."""
    tried = []
    for sign in (1, -1):
        factor = 2
        while factor <= MOST_BATCH:
            batch = world.batch * factor if sign > 0 else world.batch // factor
            if sign < 0 and world.batch % factor:
                break
            tried.append(batch)
            if wins(replace(world, batch=batch), plan_in):
                return Change("batch", str(batch), ", ".join(map(str, tried)))
            factor *= 2
    return Change("batch", "", ", ".join(map(str, tried)))


def nearest(scaled: Callable[[float], World], most: float, plan_in: PlanIn) -> float | None:
    """The factor between 1 and `most` nearest to 1 at which the pins cost nothing, up to the
    precision of NUM_HALVINGS; None where they cost something at `most`."""
    if not wins(scaled(most), plan_in):
        return None
    low, high = 1.0, most
    for _ in range(NUM_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if wins(scaled(middle), plan_in) else (middle, high)
    return high


def bandwidth(cluster: ClusterSpec, link: str) -> float:
    """Bytes per second of a link of the cluster."""
    links = (cluster.network, *(group.link for group in cluster.groups))
    return next(x.bytes_per_s for x in links if x.name == link)


def with_bandwidth(cluster: ClusterSpec, link: str, factor: float) -> ClusterSpec:
    """The cluster with a link, inside nodes or between them, of `factor` times the bandwidth."""
    network = cluster.network
    groups = cluster.groups
    if network.name == link:
        network = replace(network, bytes_per_s=network.bytes_per_s * factor)
    else:
        groups = tuple(
            replace(
                group,
                link=replace(
                    group.link,
                    bytes_per_s=group.link.bytes_per_s * factor,
                    reduce_bytes_per_s=group.link.reduce_bytes_per_s * factor,
                    bytes_per_s_by_ranks=tuple(
                        rate._replace(bytes_per_s=rate.bytes_per_s * factor)
                        for rate in group.link.bytes_per_s_by_ranks
                    ),
                ),
            )
            if group.link.name == link
            else group
            for group in groups
        )
    return replace(cluster, groups=groups, network=network)
