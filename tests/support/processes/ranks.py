"""Simulated ranks: one thread per rank, collectives by meeting at a barrier.

A tensor in flight holds NaN (or the smallest integer) until it is waited for, so reading it early
shows. Ranks that start different collectives in a group, wait twice, or leave something in flight
raise; one rank's exception ends all.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.ir.mesh import Mesh
from meshfold.ir.node_groups import NodeLevels

T = TypeVar("T")
Combine = Callable[[list[Tensor], int], Tensor]

TIMEOUT_S = 20.0


class CollectiveMismatchError(Exception):
    """Ranks of one group did not start the same collective."""


class _Group:
    """Ranks that meet. Everybody posts, everybody reads, then the next collective may begin."""

    def __init__(self, size: int) -> None:
        self.posts: list[tuple[Any, Tensor] | None] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, position: int, signature: Any, x: Tensor) -> list[Tensor]:
        self.posts[position] = (signature, x.detach().clone())
        self.barrier.wait(TIMEOUT_S)
        posts = [p for p in self.posts if p is not None]
        self.barrier.wait(TIMEOUT_S)
        if len({p[0] for p in posts}) > 1:
            raise CollectiveMismatchError(f"ranks started {sorted({str(p[0]) for p in posts})}")
        return [p[1] for p in posts]


class _World:
    def __init__(self, mesh: Mesh, node_ranks: int) -> None:
        self.mesh = mesh
        self.levels = NodeLevels(mesh, node_ranks)
        self.lock = threading.Lock()
        self.groups: dict[tuple[int, ...], _Group] = {}
        self.aborted = False

    def group(self, ranks: tuple[int, ...]) -> _Group:
        with self.lock:
            if self.aborted:
                raise threading.BrokenBarrierError
            return self.groups.setdefault(ranks, _Group(len(ranks)))

    def abort(self) -> None:
        with self.lock:
            self.aborted = True
            for group in self.groups.values():
                group.barrier.abort()


class ThreadMesh(RankMesh):
    """A rank of a simulated mesh. `log` lists (kind, axes) of the collectives it started."""

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(world.mesh, rank, torch.device("cpu"), world.levels)
        self.log: list[tuple[str, Axes]] = []
        self._world = world
        self._in_flight: dict[int, tuple[Tensor, Tensor]] = {}

    def start_all_reduce(self, x: Tensor, axes: Axes, reduction: str = "sum") -> Tensor:
        reduce = {"sum": torch.sum, "max": torch.amax}[reduction]
        return self._start("all_reduce", x, axes, lambda parts, _: reduce(torch.stack(parts), 0))

    def start_all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        assert x.is_contiguous()
        return self._start("all_gather", x, axes, lambda parts, _: torch.cat(parts))

    def start_reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        assert x.is_contiguous()
        return self._start(
            "reduce_scatter", x, axes, lambda p, i: torch.stack(p).sum(0).chunk(len(p))[i].clone()
        )

    def start_all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        assert x.is_contiguous()
        return self._start(
            "all_to_all",
            x,
            axes,
            lambda parts, i: torch.cat([p.chunk(len(parts))[i] for p in parts]),
        )

    def start_exchange(self, x: Tensor, axes: Axes, sent: list[int], received: list[int]) -> Tensor:
        assert x.is_contiguous() and sum(sent) == len(x)
        all_sent = self._meet("counts of exchange", torch.tensor(sent), axes)

        def combine(parts: list[Tensor], i: int) -> Tensor:
            mine = [p.split(n.tolist())[i] for p, n in zip(parts, all_sent, strict=True)]
            if list(map(len, mine)) != received:
                raise CollectiveMismatchError(f"expected {received} rows, {mine} came")
            return torch.cat(mine)

        return self._start("exchange", x, axes, combine, tuple(x.shape[1:]))

    def wait(self, in_flight: Tensor) -> Tensor:
        pointer = in_flight.untyped_storage().data_ptr()
        if pointer not in self._in_flight:
            raise AssertionError("waited for a tensor that is not in flight")
        empty, result = self._in_flight.pop(pointer)
        empty.copy_(result)
        return in_flight

    def close(self) -> None:
        if self._in_flight:
            raise AssertionError(f"{len(self._in_flight)} collectives were never waited for")

    def _start(
        self,
        kind: str,
        x: Tensor,
        axes: Axes,
        combine: Combine,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """shape: what ranks must agree on, if not all of x's."""
        self.log.append((kind, axes))
        signature = (kind, axes, tuple(x.shape) if shape is None else shape, x.dtype)
        result = combine(self._meet(signature, x, axes), self._position(axes)[1])
        # No rows have an address of their own, too.
        room = torch.full((max(result.numel(), 1),), _unread(result.dtype), dtype=result.dtype)
        empty = room[: result.numel()].view(result.shape)
        self._in_flight[empty.untyped_storage().data_ptr()] = (empty, result)
        return empty

    def _meet(self, signature: Any, x: Tensor, axes: Axes) -> list[Tensor]:
        ranks, position = self._position(axes)
        return self._world.group(ranks).exchange(position, signature, x)

    def _position(self, axes: Axes) -> tuple[tuple[int, ...], int]:
        """The group of this rank on `axes`, and its place there."""
        ranks = next(g for g in self.levels.groups(axes) if self.rank in g)
        return tuple(ranks), ranks.index(self.rank)


def _unread(dtype: torch.dtype) -> float:
    """What a tensor in flight holds."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def run_on_simulated_ranks(mesh: Mesh, fn: Callable[[RankMesh], T], node_ranks: int = 0) -> list[T]:
    """fn on every rank at once; the results in rank order. node_ranks: as of NodeLevels. Raises the
    first rank's exception."""
    world = _World(mesh, node_ranks)
    results: list[Any] = [None] * mesh.num_ranks
    failures: list[BaseException | None] = [None] * mesh.num_ranks

    def body(rank: int) -> None:
        rank_mesh = ThreadMesh(world, rank)
        try:
            results[rank] = fn(rank_mesh)
            rank_mesh.close()
        except BaseException as error:
            failures[rank] = error
            world.abort()

    threads = [threading.Thread(target=body, args=(r,)) for r in range(mesh.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in failures if e and not isinstance(e, threading.BrokenBarrierError)]
    for error in (*real, *failures):
        if error is not None:
            raise error
    return results
