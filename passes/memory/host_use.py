"""What one device has stored on its host."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostUse:
    """memory_bytes: in the host's memory; disk_bytes: optimizer states on its disk."""

    memory_bytes: int = 0
    disk_bytes: int = 0

    def __add__(self, other: "HostUse") -> "HostUse":
        return HostUse(self.memory_bytes + other.memory_bytes, self.disk_bytes + other.disk_bytes)
