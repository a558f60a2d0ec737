"""What a plan says of the layers whose parameters the host stores and updates."""

from collections.abc import Sequence

from meshfold.ir.strategy import UPDATED_BY_HOST, Offload
from meshfold.units import bytes_text


def stored_notes(offloads: Sequence[Offload], num_bytes: int) -> list[str]:
    """The notes, none where there are no such layers. offloads: of all layers; num_bytes: that they
    take of the host's memory for one device, the one with most."""
    of = f"of {len(offloads)} layers"
    stored = sum(offload in UPDATED_BY_HOST for offload in offloads)
    by_layer = offloads.count("parameters")
    notes = []
    if stored:
        notes.append(
            f"parameters and optimizer states of {stored} {of} are in the host's memory: "
            f"{bytes_text(num_bytes)} of it per device"
        )
    if by_layer:
        notes.append(
            f"parameters of {by_layer} {of} are on the device only while their layer or the one "
            "before it runs; they come twice, for its forward and its backward"
        )
    return notes
