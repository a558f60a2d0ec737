"""Copies between the memory of a device and that of its host.

On CUDA they run on a stream of their own, from and to pinned memory, beside what the device
computes. Where device and host are one, the same calls copy at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostLink:
    """The link of one device. num_bytes_to_host, num_bytes_to_device: that went over it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes_to_host = 0
        self.num_bytes_to_device = 0
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._sums: dict[int, tuple[Tensor, Tensor, torch.cuda.Event]] = {}
        """By address of what is there: itself, what is to be added, and when that has arrived."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._stream is not None)

    def on_host(self, source: Tensor) -> Tensor:
        """A copy in the host's memory of what the device has so far computed. To be read after
        settle()."""
        target = self.empty(source.shape, source.dtype)
        self.num_bytes_to_host += source.nbytes
        if self._stream is None:
            return target.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)
        return target

    def add_on_host(self, target: Tensor, source: Tensor) -> None:
        """Add a tensor of the device to one of the host; done after settle(). One tensor waits for
        each target, so that the host needs no more memory for more microbatches."""
        self._add(target.data_ptr())
        arriving = self.on_host(source)
        arrival = self.arrival()
        if arrival is None:
            target.add_(arriving)
        else:
            self._sums[target.data_ptr()] = target, arriving, arrival

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor of the host over one of the device, in its dtype. What reads it waits for
        arrival() first."""
        self.num_bytes_to_device += target.nbytes
        if self._stream is None:
            target.copy_(source)
            return
        narrow = self.empty(source.shape, target.dtype).copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(narrow, non_blocking=True)
        # Pinned memory is used again only after the copies from it: torch's allocator sees to it.

    def back(self, source: Tensor) -> Tensor:
        """A copy on the device of what on_host gave. What reads it waits for arrival() first."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        self.num_bytes_to_device += target.nbytes
        if self._stream is None:
            return target.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        target.record_stream(self._stream)
        return target

    def arrival(self) -> "torch.cuda.Event | None":
        """When all copies so far have arrived; None: they have."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: "torch.cuda.Event | None") -> None:
        """Let the device go on when copies have arrived."""
        if event is not None:
            event.wait(torch.cuda.current_stream(self.device))

    def settle(self) -> None:
        """Wait for all copies, and add what is to be added."""
        if self._stream is not None:
            self._stream.synchronize()
        for address in tuple(self._sums):
            self._add(address)

    def _add(self, address: int) -> None:
        """Add what is to be added to this tensor, if anything; it and what was copied before it
        have arrived then."""
        if address in self._sums:
            target, arriving, arrival = self._sums.pop(address)
            arrival.synchronize()
            target.add_(arriving)
