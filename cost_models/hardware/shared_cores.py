"""Processes of the preset local-cpu on the machine that they are planned on: where there are more
of them than cores, they take turns."""

import os
from dataclasses import replace

from meshfold.cost_models.hardware.devices import presets, resolve_cluster
from meshfold.ir.cluster import ClusterSpec

LOCAL = "local-cpu"


def usable_cores() -> int:
    """That this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_here(text: str, num_devices: int | None) -> tuple[ClusterSpec, tuple[str, ...]]:
    """resolve_cluster, with_turns on this machine, and notes for the plan. Errors as of
    resolve_cluster."""
    found = resolve_cluster(text, num_devices)
    cores = usable_cores()
    here = with_turns(found, cores)
    if here is found:
        return found, ()
    note = (
        f"{found.num_devices} processes share {cores} cores of this machine, so that each computes "
        f"at {cores / found.num_devices:.0%} of the rate of {LOCAL}; 'meshfold profile' measures it"
    )
    return here, (note,)


def with_turns(spec: ClusterSpec, cores: int) -> ClusterSpec:
    """local-cpu with the rates that its processes have where they take turns on `cores`; `spec`
    where each has a core of its own, or it is another cluster. The link stays: the preset's was
    measured with four processes on two cores."""
    (group, *others) = spec.groups
    if others or group.device != presets()[LOCAL].group.device or spec.num_devices <= cores:
        return spec
    share = cores / spec.num_devices
    device = replace(
        group.device,
        memory_bytes_per_s=group.device.memory_bytes_per_s * share,
        peak_flops_per_s={d: x * share for d, x in group.device.peak_flops_per_s.items()},
        launch_s=group.device.launch_s / share,
        source=f"{group.device.source}; {spec.num_devices} processes on {cores} cores",
    )
    return replace(spec, groups=(replace(group, device=device),))
