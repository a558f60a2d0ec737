"""One profile: what is left of its points is measured in turns of all kinds, the most telling
first, until its minutes are over."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest

import torch
import torch.distributed as dist

from meshfold.cost_models.calibration.points import Machine, Profile
from meshfold.profiling import blocks, collectives, kernels
from meshfold.profiling.kernels import Kernels
from meshfold.profiling.machine import HOST_BYTES, device_memory, this_machine
from meshfold.profiling.timing import SAMPLES, Timer

SHORTEST_S, LONGEST_S = 0.003, 0.1
"""Of a sample."""
OVERHEAD = 3
"""Samples' time that a point takes besides its samples: inputs, a first run, meetings."""

Tell = Callable[[Profile, int], None]
"""Is told on rank 0, after every point, what is known, and how many points there are."""


@dataclass(frozen=True)
class Task:
    """One point. run: the profile with it, of the profile without; None where the device lacks
    what it needs."""

    name: str
    is_known: Callable[[Profile], bool]
    run: Callable[[Timer, Profile], Profile | None]


def profile(
    device: torch.device, per_node: int, minutes: float, known: Profile | None, tell: Tell
) -> Profile:
    """The profile of this machine, on all ranks of the default group, which all call this. The
    group takes tensors of the CPU, too.

    per_node: ranks of a node, which are next to each other. known: on rank 0, what is measured
    already, if it is of such processes on such a machine and not finished. tell: after every point.
    """
    start_s = time.monotonic()
    is_first = dist.get_rank() == 0
    control = dist.new_group()
    assert isinstance(control, dist.ProcessGroup)
    backend = "nccl" if device.type == "cuda" else "gloo"
    machine = this_machine(device, backend, per_node)
    begun = [known if known is not None and goes_on(known, machine) else None]
    dist.broadcast_object_list(begun, group=control)
    groups = collectives.groups(device, per_node)
    now = begun[0] or Profile(
        2, machine, False, device_memory(device, per_node), {}, {}, None, None
    )
    todo = tasks(groups, device.type)
    share_s = 60 * minutes / len(todo) / (SAMPLES + OVERHEAD)
    timer = Timer(device, min(max(share_s, SHORTEST_S), LONGEST_S), control)
    for task in todo:
        is_over = is_first and time.monotonic() - start_s > 60 * minutes
        if timer.agreed([is_over])[0]:
            return replace(now, memory=device_memory(device, per_node))
        if not task.is_known(now):
            now = task.run(timer, now) or now
            if is_first:
                tell(now, len(todo))
    return replace(now, finished=True, memory=device_memory(device, per_node))


def goes_on(known: Profile, machine: Machine) -> bool:
    """Whether a profile may be completed on a machine."""
    return not known.finished and known.machine == machine


def tasks(groups: Sequence[collectives.Group], device_type: str) -> list[Task]:
    """All points, in turns: one of each kind, then the next of each."""
    of_kernels = (
        kernels.products(device_type),
        kernels.movers(device_type),
        kernels.starts(),
        kernels.attention(device_type),
    )
    columns = [[_kernels_task(one.name, partial(_itself, one)) for one in k] for k in of_kernels]
    columns += [
        [_kernels_task(name, build) for name, build in blocks.blocks(device_type)],
        list(_collective_tasks(groups, device_type)),
        list(_single_tasks(groups, device_type)),
    ]
    return [task for task in chain(*zip_longest(*columns)) if task is not None]


def _itself(one: Kernels) -> Kernels:
    return one


def _kernels_task(name: str, build: Callable[[], Kernels]) -> Task:
    def run(timer: Timer, before: Profile) -> Profile | None:
        one = build()
        seconds = timer.seconds(_made_late(lambda: one.make(timer.device)))
        if seconds is None:
            return None
        return replace(before, kernels={**before.kernels, name: one.point(seconds)})

    return Task(name, lambda p: name in p.kernels, run)


def _made_late(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """What `make` gives, made at the first call: an input may be too large, too."""
    made: list[Callable[[], object]] = []

    def run() -> object:
        if not made:
            made.append(make())
        return made[0]()

    return run


def _collective_tasks(groups: Sequence[collectives.Group], device_type: str) -> Iterator[Task]:
    for name, group, kind, num_bytes in collectives.cases(groups, device_type):

        def run(
            timer: Timer,
            before: Profile,
            name: str = name,
            group: collectives.Group = group,
            kind: str = kind,
            num_bytes: int = num_bytes,
        ) -> Profile | None:
            make = lambda: collectives.collective(group, kind, num_bytes)  # noqa: E731
            seconds = collectives.after_work(_made_late(make), timer)
            if seconds is None:
                return None
            point = group.point(kind, num_bytes, seconds)
            return replace(before, collectives={**before.collectives, name: point})

        yield Task(name, lambda p, name=name: name in p.collectives, run)  # type: ignore[misc]


def _single_tasks(groups: Sequence[collectives.Group], device_type: str) -> Iterator[Task]:
    if groups:

        def contend(timer: Timer, before: Profile) -> Profile | None:
            found = collectives.contention(groups[0], timer)
            return replace(before, contention=found) if found else None

        yield Task("contention", lambda p: p.contention is not None, contend)
    if device_type == "cuda":

        def copy(timer: Timer, before: Profile) -> Profile | None:
            rate = _host_bytes_per_s(timer)
            return replace(before, host_bytes_per_s=rate) if rate else None

        yield Task("host", lambda p: p.host_bytes_per_s is not None, copy)


def _host_bytes_per_s(timer: Timer) -> float | None:
    """Of the slower direction."""
    there = torch.zeros(HOST_BYTES, dtype=torch.uint8, device=timer.device)
    here = torch.zeros(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    ways = (
        timer.seconds(lambda: there.copy_(here, non_blocking=True)),
        timer.seconds(lambda: here.copy_(there, non_blocking=True)),
    )
    seconds = [s for s in ways if s is not None]
    return HOST_BYTES / max(seconds) if len(seconds) == len(ways) else None
