"""A serial link between processes on one machine that needs no core while it moves bytes.

gloo moves bytes with the cores that compute, which no link between GPUs does. Here a rank puts what
it sends into memory that all processes share when it starts a collective, and takes what it gets
from there when it waits: two copies. In between the link is busy for as long as one of the given
bandwidth would be, one collective after the other, and nobody computes for it.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh

BUFFER_BYTES = 1 << 27
ALIGNMENT = 64
NUM_ROWS = 1 << 14
"""Of collectives that are not over, at most, per rank."""
SENT, STARTED, BYTES, BEGINS = range(4)
"""Columns of a rank's table: how many collectives it has started up to this one, when (ns), bytes
on the link, and from BEGINS on where the part for each rank begins in its buffer."""
POLL_S = 2e-5
PATIENCE_S = 60.0
TRIALS = 41

SliceOf = Callable[[int], Tensor]
"""What a rank sent here."""


class EmulatedLink:
    """Between all processes of the job. bytes_per_s: what leaves a rank; start_s: of a collective
    of one number."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        with tempfile.TemporaryDirectory() as own:
            paths: list[Any] = [own]
            dist.broadcast_object_list(paths, 0)
            folder, ranks = Path(paths[0]), range(self._size)
            self._buffers = [_shared(folder / f"{r}", BUFFER_BYTES, torch.uint8) for r in ranks]
            columns = BEGINS + self._size
            self._tables = [
                _shared(folder / f"{r}.rows", NUM_ROWS * columns, torch.int64)
                .view(NUM_ROWS, columns)
                .numpy()
                for r in ranks
            ]
            self._over = [_shared(folder / f"{r}.over", 1, torch.int64).numpy() for r in ranks]
            dist.barrier()
        # Memory is mapped where it is first written, and again where it is first read.
        self._buffers[self._rank].zero_()
        dist.barrier()
        for buffer in self._buffers:
            buffer.max()
        self._started = self._seen = 0
        self._free_ns = 0
        self._done_ns: dict[int, int] = {}
        self._in_flight: dict[int, tuple[int, Callable[[SliceOf], None]]] = {}
        self._waited: set[int] = set()
        self._held: deque[tuple[int, int, int]] = deque()
        """(collective, begin, end) in the own buffer, oldest first."""
        self.start_s = self._measured_start_s()

    def connect(self, mesh: RankMesh) -> None:
        """Let collectives of a mesh of one axis, of all processes, use the link."""
        methods = {"wait": self._wait, "start_all_reduce_in_place": self._all_reduce}
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"):
            methods[f"start_{name}"] = getattr(self, f"_{name}")
        vars(mesh).update(methods)

    def _all_reduce(self, x: Tensor, axes: Axes, reduction: str = "sum") -> Tensor:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)

        def fill(part: SliceOf) -> None:
            _combine(result.view(-1), part, self._size, reduction)

        share = 2 * (self._size - 1) / self._size
        return self._start(x, [0] * self._size, share * _bytes(x), result, fill)

    def _all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        result = x.new_empty((self._size * x.shape[0], *x.shape[1:]))

        def fill(part: SliceOf) -> None:
            for rank, target in enumerate(result.view(self._size, -1)):
                target.copy_(part(rank)[: target.numel()])

        return self._start(x, [0] * self._size, (self._size - 1) * _bytes(x), result, fill)

    def _reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        result = x.new_empty((x.shape[0] // self._size, *x.shape[1:]))
        begins = [rank * _bytes(result) for rank in range(self._size)]

        def fill(part: SliceOf) -> None:
            _combine(result.view(-1), part, self._size, "sum")

        return self._start(x, begins, (self._size - 1) * _bytes(result), result, fill)

    def _all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        rows = [x.shape[0] // self._size] * self._size
        return self._exchange(x, axes, rows, rows)

    def _exchange(
        self, x: Tensor, axes: Axes, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        result = x.new_empty((sum(received), *x.shape[1:]))
        row_bytes = x[:1].numel() * x.element_size() if len(x) else 0
        begins = [sum(sent[:rank]) * row_bytes for rank in range(self._size)]

        def fill(part: SliceOf) -> None:
            for rank, target in enumerate(result.split(list(received))):
                target.view(-1).copy_(part(rank)[: target.numel()])

        num_bytes = row_bytes * (sum(sent) - sent[self._rank])
        return self._start(x, begins, num_bytes, result, fill)

    def _start(
        self,
        x: Tensor,
        begins: Sequence[int],
        link_bytes: float,
        result: Tensor,
        fill: Callable[[SliceOf], None],
    ) -> Tensor:
        number, num_bytes = self._started, _bytes(x)
        begin = self._room(num_bytes)
        self._buffers[self._rank][begin : begin + num_bytes].view(x.dtype).copy_(x.reshape(-1))
        row = self._tables[self._rank][number % NUM_ROWS]
        row[BEGINS:] = [begin + of_rank for of_rank in begins]
        row[STARTED], row[BYTES] = time.monotonic_ns(), int(link_bytes)
        self._started = number + 1
        # Last: the others look at it.
        row[SENT] = self._started
        self._held.append((number, begin, begin + num_bytes))
        if result.numel():
            self._in_flight[result.data_ptr()] = number, fill
        else:
            self._end(number)
        return result

    def _room(self, num_bytes: int) -> int:
        """Where so many bytes go in the own buffer, which is used round and round. Raises
        ValueError for more than it has room for beside what is in flight."""
        begin = -(-(self._held[-1][2] if self._held else 0) // ALIGNMENT) * ALIGNMENT
        if begin + num_bytes > BUFFER_BYTES:
            # What lies behind is older than what lies at the buffer's start.
            while self._held and self._held[0][1] > self._held[-1][1]:
                self._let_go()
            begin = 0
        while self._held and (
            len(self._held) == NUM_ROWS or begin <= self._held[0][1] < begin + num_bytes
        ):
            self._let_go()
        if begin + num_bytes > BUFFER_BYTES:
            raise ValueError(f"a collective of {num_bytes} bytes, the buffer has {BUFFER_BYTES}")
        return begin

    def _let_go(self) -> None:
        """Of the oldest in the own buffer, once all ranks have read it."""
        number = self._held.popleft()[0]
        if number >= self._over[self._rank][0]:
            raise ValueError(f"more in flight than the {BUFFER_BYTES} bytes of the buffer")
        _until(lambda: all(over[0] > number for over in self._over))

    def _wait(self, in_flight: Tensor) -> Tensor:
        found = self._in_flight.pop(in_flight.data_ptr(), None) if in_flight.numel() else None
        if found is None:
            return in_flight
        number, fill = found
        self._see(number)
        time.sleep(max(0.0, 1e-9 * (self._done_ns.pop(number) - time.monotonic_ns())))

        def part(rank: int) -> Tensor:
            begin = int(self._tables[rank][number % NUM_ROWS][BEGINS + self._rank])
            return self._buffers[rank][begin:].view(in_flight.dtype)

        fill(part)
        self._end(number)
        return in_flight

    def _end(self, number: int) -> None:
        """This rank has read a collective; the others see up to which one it has."""
        self._waited.add(number)
        over = self._over[self._rank]
        while over[0] in self._waited:
            self._waited.remove(int(over[0]))
            over[0] += 1

    def _see(self, number: int) -> None:
        """Follow the link until the end of a collective is known: it begins when the last rank has
        started it and the one before is over."""
        while self._seen <= number:
            rows = [table[self._seen % NUM_ROWS] for table in self._tables]
            _until(lambda rows=rows: all(row[SENT] == self._seen + 1 for row in rows))
            start_ns = max(int(row[STARTED]) for row in rows)
            busy_s = max(int(row[BYTES]) for row in rows) / self.bytes_per_s
            self._free_ns = max(self._free_ns, start_ns) + int(1e9 * busy_s)
            self._done_ns[self._seen] = self._free_ns
            self._seen += 1

    def _measured_start_s(self) -> float:
        """The same on all ranks."""
        seconds = []
        for _ in range(TRIALS):
            dist.barrier()
            start_s = time.perf_counter()
            self._wait(self._all_reduce(torch.zeros(1), ()))
            seconds.append(time.perf_counter() - start_s)
        measured = torch.tensor(median(seconds), dtype=torch.float64)
        dist.broadcast(measured, 0)
        return measured.item()


def _shared(path: Path, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)  # type: ignore[no-any-return]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _combine(result: Tensor, part: SliceOf, size: int, reduction: str) -> None:
    """In the order of ranks, the same everywhere."""
    together = torch.maximum if reduction == "max" else torch.add
    first, *others = (part(rank)[: result.numel()] for rank in range(size))
    result.copy_(first)
    for other in others:
        together(result, other, out=result)


def _until(holds: Callable[[], bool]) -> None:
    """Raises TimeoutError when it takes a minute."""
    start_s = time.monotonic()
    while not holds():
        time.sleep(POLL_S)
        if time.monotonic() - start_s > PATIENCE_S:
            raise TimeoutError("another process has not started what this one waits for")
