"""What a plan says of the layers whose parameters the host stores and updates, and whether it has
room for them."""

from collections.abc import Sequence

from meshfold.errors import InfeasibleError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.strategy import UPDATED_BY_HOST, Offload
from meshfold.passes.memory.host_use import HostUse
from meshfold.units import bytes_text

LATE = (
    "the host's step overlaps nothing; under meshfold.LateUpdates it runs beside the next step, "
    "which then trains on parameters that are one update old"
)


def check_host_memory(use: HostUse, cluster: ClusterSpec) -> None:
    """Raises InfeasibleError where a device's share of the host's memory is known and smaller than
    what it stores there."""
    share, needed = cluster.host_memory_bytes, use.memory_bytes
    if share and needed > share:
        raise InfeasibleError(
            f"what leaves the devices takes {bytes_text(needed)} of the host's memory per device, "
            f"and there are {bytes_text(share)}; pin offload=disk, or use more devices",
            binding_constraint="host memory",
            required_bytes=needed,
            available_bytes=share,
        )


def stored_notes(offloads: Sequence[Offload], use: HostUse) -> list[str]:
    """The notes, none where there are no such layers. offloads: of all layers; use: of the host by
    one device, the one with most."""
    of = f"of {len(offloads)} layers"
    stored = sum(offload in UPDATED_BY_HOST for offload in offloads)
    by_layer, on_disk = offloads.count("parameters"), offloads.count("disk")
    notes = []
    if stored:
        what = "gradients" if on_disk else "optimizer states"
        notes.append(
            f"parameters and {what} of {stored} {of} are in the host's memory: "
            f"{bytes_text(use.memory_bytes)} of it per device"
        )
        notes.append(LATE)
    if on_disk:
        notes.append(
            f"optimizer states of {on_disk} {of} are on the host's disk: "
            f"{bytes_text(use.disk_bytes)} per device; call "
            "meshfold.keep_states_on_disk(optimizer, folder)"
        )
    if by_layer:
        notes.append(
            f"parameters of {by_layer} {of} are on the device only while their layer or the one "
            "before it runs; they come twice, for its forward and its backward"
        )
    return notes
