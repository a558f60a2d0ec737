"""Collectives between the ranks of a mesh, split into start and wait.

RankMesh is what an emitted graph sees of the machine. ProcessMesh realises it on torch.distributed
process groups, SingleMesh on one process; this is the one file that touches
torch.ops._c10d_functional. The raw ops carry an autograd formula that doubles gradients of
Partial -> Invariant, so they are only called from the forward and backward of the functions in
meshfold.sharding.async_autograd, where autograd does not record.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.distributed.waiting import Place, lost, lost_ranks
from meshfold.errors import RankLostError
from meshfold.ir.mesh import Mesh
from meshfold.ir.node_groups import NodeLevels
from meshfold.torch_compat.process_groups import default_timeout
from meshfold.torch_compat.symmetric_memory import enable

Axes = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RankMesh(ABC):
    """The mesh as one rank sees it. Frozen: what ops read and changes within a step is in
    meshfold.distributed.step_context; `place` is for errors.

    Every start returns a tensor in flight at once: its shape and dtype are those of the result, its
    contents are not to be read before wait. The ranks of a group must start the same collectives in
    the same order. `axes` names one axis or several; several act as one group, in mesh order, or a
    level of that group (meshfold.ir.node_groups).
    """

    mesh: Mesh
    rank: int
    device: torch.device
    levels: NodeLevels
    """The ranks of a node within an axis, for collectives in two levels."""

    @cached_property
    def place(self) -> Place:
        """Where this rank is, for errors."""
        return Place()

    def begin_step(self, step: int, timeout_s: float | None) -> None:
        """Step number `step` begins; see set_timeout."""
        self.place.begin(step)
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float | None) -> None:  # noqa: B027  of processes only
        """How long collectives from here on wait for other ranks; None: as the default process
        group."""

    @cached_property
    def coords(self) -> tuple[int, ...]:
        """Coordinates of this rank, in mesh order."""
        return self.mesh.coords(self.rank)

    def size(self, axes: Axes) -> int:
        """Ranks in the group of `axes`."""
        mesh, names = self.levels.resolved(axes)
        return math.prod(mesh.sizes[mesh.index(name)] for name in names)

    def coord(self, axis: str) -> int:
        """Coordinate of this rank on `axis`."""
        return self.coords[self.mesh.index(axis)]

    @abstractmethod
    def start_all_reduce(self, x: Tensor, axes: Axes, reduction: str = "sum") -> Tensor:
        """Sum (or "max") of x over the group; x is left as it is."""

    def start_all_reduce_in_place(self, x: Tensor, axes: Axes) -> Tensor:
        """Sum of x over the group; x is given up, and its memory may be the result's."""
        return self.start_all_reduce(x, axes)

    @abstractmethod
    def start_all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        """Every rank's contiguous x, concatenated on dim 0."""

    @abstractmethod
    def start_reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        """Sum of contiguous x over the group, of which rank i gets shard i of dim 0."""

    @abstractmethod
    def start_all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        """Shard j of dim 0 of contiguous x goes to rank j, what is received is in rank order."""

    @abstractmethod
    def start_exchange(self, x: Tensor, axes: Axes, sent: list[int], received: list[int]) -> Tensor:
        """sent[j] rows of contiguous x go to rank j, one rank after the other; received[j] come
        from there, in rank order. An all-to-all of uneven shards."""

    def shared_group(self, axis: str) -> str:
        """Name of the process group of `axis` if its ranks read each other's memory
        (meshfold.torch_compat.symmetric_memory), else empty."""
        return ""

    def begin_ring(self) -> None:  # noqa: B027  only watched
        """Says that the shifts from here on, up to the next call, are of one ring: for what watches
        collectives."""

    def start_shift(self, x: Tensor, axis: str) -> Tensor:
        """Numbers x [n] go to the next rank of the axis, from the last to the first; those of the
        one before come. An exchange with two neighbours."""
        size, own = self.size((axis,)), self.coord(axis)
        sent, received = [0] * size, [0] * size
        sent[(own + 1) % size] = received[(own - 1) % size] = x.shape[0]
        return self.start_exchange(x, (axis,), sent, received)

    @abstractmethod
    def wait(self, in_flight: Tensor) -> Tensor:
        """The result. Called once per start. Raises RankLostError when other ranks do not come."""


def all_reduced(mesh: RankMesh, x: Tensor, axes: Axes, reduction: str = "sum") -> Tensor:
    """Sum (or "max") of x over the ranks of `axes`, one axis after the other."""
    for axis in axes:
        x = mesh.wait(mesh.start_all_reduce(x, (axis,), reduction))
    return x


@dataclass(frozen=True, eq=False)
class SingleMesh(RankMesh):
    """A RankMesh of one rank. Every group is this rank alone, so a collective is a copy."""

    def start_all_reduce(self, x: Tensor, axes: Axes, reduction: str = "sum") -> Tensor:
        return x.clone()

    def start_all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return x.clone()

    def start_reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        return x.clone()

    def start_all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        return x.clone()

    def start_exchange(self, x: Tensor, axes: Axes, sent: list[int], received: list[int]) -> Tensor:
        return x.clone()

    def wait(self, in_flight: Tensor) -> Tensor:
        return in_flight


@dataclass(frozen=True, eq=False)
class ProcessMesh(RankMesh):
    """A RankMesh over the default process group, see process_mesh."""

    _groups: dict[Axes, dist.ProcessGroup] = field(default_factory=dict)
    """This rank's group on each set of axes."""
    _created: list[dist.ProcessGroup] = field(default_factory=list)
    """All groups, to destroy at the end."""
    _shared: set[str] = field(default_factory=set)
    """Axes whose ranks read each other's memory."""

    @cached_property
    def default_timeout_s(self) -> float:
        """That of the default process group."""
        return default_timeout().total_seconds()

    def set_timeout(self, timeout_s: float | None) -> None:
        timeout_s = self.default_timeout_s if timeout_s is None else timeout_s
        if timeout_s != self.place.timeout_s:
            self.place.timeout_s = timeout_s
            for group in self._created:
                group.set_timeout(timedelta(seconds=timeout_s))

    def new_group(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """A process group of these ranks until `close`; None on the others. Called on all ranks, in
        one order. backend: "gloo" for tensors of the CPU; None: that of the default group. Raises
        RankLostError."""
        timeout_s = self.place.timeout_s
        everyone = range(dist.get_world_size())
        with lost_ranks(self.rank, everyone, f"new group of {list(ranks)}", timeout_s):
            timeout = timedelta(seconds=timeout_s)
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if self.rank not in ranks:
            return None
        assert isinstance(group, dist.ProcessGroup)
        self._created.append(group)
        return group

    def share_memory(self, axes: Sequence[str]) -> None:
        """Let the ranks of each of these axes read each other's memory. Called on all ranks."""
        for axis in axes:
            enable(self._groups[axis,].group_name)
            self._shared.add(axis)

    def shared_group(self, axis: str) -> str:
        return self._groups[axis,].group_name if axis in self._shared else ""

    def close(self) -> None:
        """End all groups, and their threads. Called on all ranks; nothing may be in flight."""
        self._groups.clear()
        while self._created:
            dist.destroy_process_group(self._created.pop())

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """The process group of this rank on `axes`. Raises KeyError if none was created."""
        return self._groups[axes]

    def start_all_reduce(self, x: Tensor, axes: Axes, reduction: str = "sum") -> Tensor:
        group = self._groups[axes]
        return self._started(
            "all_reduce", axes, _functional.all_reduce(x, reduction, group.group_name)
        )

    def start_all_reduce_in_place(self, x: Tensor, axes: Axes) -> Tensor:
        group = self._groups[axes]
        return self._started(
            "all_reduce", axes, _functional.all_reduce_(x, "sum", group.group_name)
        )

    def start_all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        group = self._groups[axes]
        rows = torch.view_as_real(x) if x.is_complex() else x
        whole = rows.new_empty((group.size() * rows.shape[0], *rows.shape[1:]))
        # Without `out` several of them in flight corrupt the heap under gloo (torch 2.13). This one
        # takes no complex numbers.
        in_flight = _functional.all_gather_into_tensor_out(
            rows, group.size(), group.group_name, out=whole
        )
        in_flight = torch.view_as_complex(in_flight) if x.is_complex() else in_flight
        return self._started("all_gather", axes, in_flight)

    def start_reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        group = self._groups[axes]
        in_flight = _functional.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)
        return self._started("reduce_scatter", axes, in_flight)

    def start_all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        rows = [x.shape[0] // self._groups[axes].size()] * self._groups[axes].size()
        return self.start_exchange(x, axes, rows, rows)

    def start_exchange(self, x: Tensor, axes: Axes, sent: list[int], received: list[int]) -> Tensor:
        name = self._groups[axes].group_name
        # Nor does this one.
        rows = torch.view_as_real(x) if x.is_complex() else x
        in_flight = _functional.all_to_all_single(rows, received, sent, name)
        in_flight = torch.view_as_complex(in_flight) if x.is_complex() else in_flight
        return self._started("all_to_all", axes, in_flight)

    def _started(self, kind: str, axes: Axes, in_flight: Tensor) -> Tensor:
        self.place.in_flight[in_flight.data_ptr()] = kind, axes
        return in_flight

    def wait(self, in_flight: Tensor) -> Tensor:
        kind, axes = self.place.in_flight.pop(in_flight.data_ptr(), ("collective", ()))
        try:
            return _functional.wait_tensor(in_flight)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise self._lost(kind, axes, error) from error

    def _lost(self, kind: str, axes: Axes, error: RuntimeError) -> RankLostError:
        ranks = (
            dist.get_process_group_ranks(self._groups[axes]) if axes else range(self.mesh.num_ranks)
        )
        what = f"{kind} over {' x '.join(axes)}" if axes else kind
        return lost(self.rank, ranks, what, self.place.timeout_s, error, self.place)


def single_mesh(mesh: Mesh, device: torch.device) -> SingleMesh:
    """The mesh of one rank."""
    assert mesh.num_ranks == 1
    return SingleMesh(mesh, 0, device, NodeLevels(mesh, 0))


def process_mesh(
    mesh: Mesh,
    device: torch.device,
    axis_sets: Sequence[Axes] | None = None,
    levels: NodeLevels | None = None,
) -> ProcessMesh:
    """The mesh over the default process group: rank and device are those of this process.

    Creates one process group per group of ranks that `axis_sets` describes (default: every axis
    alone), in the same order on all ranks. They have the timeout of the default group.

    Raises ValueError if the mesh and the default process group differ in size.
    """
    if dist.get_world_size() != mesh.num_ranks:
        raise ValueError(
            f"the mesh {mesh} has {mesh.num_ranks} ranks, the job {dist.get_world_size()}"
        )
    made = ProcessMesh(mesh, dist.get_rank(), device, levels or NodeLevels(mesh, 0))
    made.set_timeout(None)
    for axes in axis_sets if axis_sets is not None else [(name,) for name in mesh.names]:
        for ranks in made.levels.groups(axes):
            if (group := made.new_group(ranks)) is not None:
                made._groups[axes] = group
    return made


_functional = torch.ops._c10d_functional
