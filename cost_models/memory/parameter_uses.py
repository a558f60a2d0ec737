"""Parameters of an instance: their bytes as stored, as ops read them, and of their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshfold.cost_models.memory.live_ranges import RegionMemory

How = Literal["direct", "reduced", "cast", "gathered"]


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """One parameter slot of an instance, in bytes of one rank."""

    slot: int
    """The tensor of the local program that stands for it."""
    stored_bytes: int
    """Bytes between steps."""
    used_bytes: int
    """Bytes as the ops read it."""
    flat_bytes: int
    """Bytes of its gradient in a buffer that is reduced."""
    gradient_bytes: int
    """Bytes of its gradient that stay on this rank."""
    how: How
    """ "direct": its gradient goes straight to .grad; "cast": read in another dtype than it is
    stored in; "reduced": gradient all-reduced in a group, perhaps cast; "gathered": all-gathered,
    perhaps cast, gradient reduce-scattered."""
    name: str = ""
    """Name of a parameter that has other uses, too."""
    copy_bytes: int = 0
    """Bytes of a copy in the dtype that ops read, where nothing is gathered."""
    is_unbucketed: bool = False
    """Whether it has its own collective, whose buffer is the gradient itself."""
    adds_in_place: bool = False
    """Whether autograd adds another gradient of the parameter to this one, not into a third buffer:
    it is a tensor that its op made, no view."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of the gradient, after its reduction."""
        return min(self.stored_bytes, self.gradient_bytes)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the gradient that leave for the host, one region later."""
        return self.stored_bytes - self.resident_bytes

    @property
    def in_flight_bytes(self) -> int:
        """What is alive one region longer: a gradient that leaves, the buffer of a
        reduce-scatter."""
        return self.leaving_bytes + (self.flat_bytes if self.how == "gathered" else 0)


class ParameterSums:
    """Bytes of the parameters of one instance. gathered, copied: as they are used; flat, result: of
    the buckets that are reduced, and of what is scattered from them. Of uses that share no
    parameter: gradients that stay, what is in flight one region longer, and gradients among that
    which leave for the host; shared: the other uses."""

    def __init__(self, memory: RegionMemory, uses: Sequence[ParameterUse]) -> None:
        trained = [u for u in uses if memory.slot_gradient_bytes[u.slot]]
        bucketed = [u for u in trained if u.how != "direct"]
        untied = [u for u in trained if not u.name]
        self.gathered = sum(u.used_bytes for u in uses if u.how == "gathered")
        self.copied = sum(u.copy_bytes for u in uses)
        self.flat = sum(u.flat_bytes for u in bucketed if not u.is_unbucketed)
        self.result = sum(u.stored_bytes for u in bucketed if u.how == "gathered")
        self.resident = sum(u.resident_bytes for u in untied)
        self.in_flight = sum(u.in_flight_bytes for u in untied)
        self.leaving = sum(u.leaving_bytes for u in untied)
        self.shared = [u for u in trained if u.name]
