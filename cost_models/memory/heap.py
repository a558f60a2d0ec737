"""Storages that are allocated and freed by their owners, and the most that was alive."""


class Heap:
    """Storages by number, counted references, bytes alive now and at the worst moment."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.owners: list[int] = []
        self.current_bytes = 0
        self.peak_bytes = 0

    def allocate(self, num_bytes: int) -> int:
        """A new storage with one owner."""
        self.sizes.append(num_bytes)
        self.owners.append(1)
        self.current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return len(self.sizes) - 1

    def retain(self, storage: int) -> None:
        self.owners[storage] += 1

    def release(self, storage: int) -> None:
        self.owners[storage] -= 1
        if self.owners[storage] == 0:
            self.current_bytes -= self.sizes[storage]

    def resize(self, storage: int, num_bytes: int) -> None:
        self.current_bytes += num_bytes - self.sizes[storage]
        self.sizes[storage] = num_bytes

    def touch(self, scratch_bytes: int) -> None:
        """Note a moment with `scratch_bytes` more than what is counted."""
        self.peak_bytes = max(self.peak_bytes, self.current_bytes + scratch_bytes)

    def take_peak(self) -> int:
        """The worst moment since this was asked before, that of now included."""
        peak_bytes, self.peak_bytes = self.peak_bytes, self.current_bytes
        return peak_bytes
