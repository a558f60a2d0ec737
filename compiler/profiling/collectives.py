"""The collectives that a profile times: all kinds over sizes, in groups as meshes have them, and a
product beside an all-reduce."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.cost_models.calibration.points import CollectivePoint, ContentionPoint
from meshfold.distributed.rank_mesh import ProcessMesh, process_mesh
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.profiling.kernels import Run
from meshfold.profiling.timing import Timer

OUTER, INNER = "outer", "inner"
"""Axes of the meshes whose groups are timed."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")
SIZES = {
    "cpu": (2**20, 2**12, 2**23, 2**16),
    "cuda": (2**24, 2**12, 2**28, 2**20),
}
"""Bytes, the most telling first."""
CONTENDED = {"cpu": (2**21, 256), "cuda": (2**26, 4096)}
"""Bytes of the all-reduce and width of the products beside it."""
WORK = {"cpu": (256, 3), "cuda": (2048, 4)}
"""Width and number of the products before a collective: about a millisecond."""
LEAST_S = 1e-6


@dataclass(frozen=True)
class Group:
    """The group of this rank on one axis of a mesh; all groups of the axis work at once."""

    mesh: ProcessMesh
    axis: str
    per_node: int

    @property
    def ranks(self) -> tuple[int, ...]:
        groups = self.mesh.levels.groups((self.axis,))
        return next(ranks for ranks in groups if self.mesh.rank in ranks)

    @property
    def name(self) -> str:
        return f"{len(self.ranks)} ranks on {len(self._ranks_on_nodes)} nodes"

    @property
    def _ranks_on_nodes(self) -> list[int]:
        return list(Counter(rank // self.per_node for rank in self.ranks).values())

    def point(self, kind: str, num_bytes: int, seconds: float) -> CollectivePoint:
        """What was measured."""
        on_nodes = self._ranks_on_nodes
        most, least = max(on_nodes), min(on_nodes)
        num_ranks = len(self.ranks)
        return CollectivePoint(
            kind, float(num_bytes), num_ranks, len(on_nodes), most, least, seconds
        )


def meshes(num_ranks: int, per_node: int) -> list[tuple[Mesh, str]]:
    """(mesh, axis): groups of one size as axes of meshes are, all ranks, halves and quarters of
    them in a row; with several nodes also the ranks of each node, and one rank of each."""
    sizes = [num_ranks // k for k in (1, 2, 4) if num_ranks % k == 0 and num_ranks // k > 1]
    several = 1 < per_node < num_ranks
    if several and per_node not in sizes:
        sizes.append(per_node)
    found = [(_mesh(num_ranks // n, n), INNER) for n in sizes]
    if several:
        found.append((_mesh(num_ranks // per_node, per_node), OUTER))
    return found


def _mesh(outer: int, inner: int) -> Mesh:
    return Mesh((MeshAxis(OUTER, outer), MeshAxis(INNER, inner)))


def groups(device: torch.device, per_node: int) -> list[Group]:
    """This rank's groups of each size. Called on all ranks."""
    return [
        Group(process_mesh(mesh, device, [(axis,)]), axis, per_node)
        for mesh, axis in meshes(dist.get_world_size(), per_node)
    ]


def cases(found: Sequence[Group], device_type: str) -> Iterator[tuple[str, Group, str, int]]:
    """(name, group, kind, bytes)."""
    for num_bytes in SIZES[device_type]:
        for kind in KINDS:
            for group in found:
                yield f"{kind}/{num_bytes}/{group.name}", group, kind, num_bytes


def collective(group: Group, kind: str, num_bytes: int) -> Run:
    """What runs a collective once, as programs do. num_bytes: as collective_time has them."""
    mesh, axes, count = group.mesh, (group.axis,), len(group.ranks)
    numel = max(num_bytes // 4 // count, 1) * count
    whole = torch.zeros(numel, device=mesh.device)
    part = torch.zeros(numel // count, device=mesh.device)
    if kind == "shift":
        return _shift(group, whole)
    starts: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: mesh.start_all_reduce_in_place(whole, axes),
        "all_gather": lambda: mesh.start_all_gather(part, axes),
        "reduce_scatter": lambda: mesh.start_reduce_scatter(whole, axes),
        "all_to_all": lambda: mesh.start_all_to_all(whole, axes),
    }
    start = starts[kind]
    return lambda: mesh.wait(start())


def after_work(run: Run, timer: Timer) -> float | None:
    """Seconds of a collective behind products, as programs have it: ranks come to it at their own
    times, and what waits for it was asleep. The products are timed alone and taken off."""
    width, count = WORK[timer.device.type]
    square = torch.zeros(width, width, device=timer.device)

    def work() -> None:
        for _ in range(count):
            torch.mm(square, square)

    def both() -> None:
        work()
        run()

    both_s = timer.seconds(both)
    work_s = timer.seconds(work)
    return None if both_s is None or work_s is None else max(both_s - work_s, LEAST_S)


def _shift(group: Group, sent: Tensor) -> Run:
    """To the next rank, from the one before, as stages of a pipeline send."""
    ranks, received = group.ranks, torch.zeros_like(sent)
    own = ranks.index(group.mesh.rank)
    after, before = ranks[(own + 1) % len(ranks)], ranks[own - 1]
    pg = group.mesh.group((group.axis,))

    def run() -> None:
        ops = dist.P2POp(dist.isend, sent, after, pg), dist.P2POp(dist.irecv, received, before, pg)
        for work in dist.batch_isend_irecv(list(ops)):
            work.wait()

    return run


def contention(group: Group, timer: Timer) -> ContentionPoint | None:
    """Products for about as long as an all-reduce takes, alone and beside it."""
    mesh, axes = group.mesh, (group.axis,)
    num_bytes, width = CONTENDED[mesh.device.type]
    buffer = torch.zeros(num_bytes // 4, device=mesh.device)
    square = torch.zeros(width, width, device=mesh.device)
    collective_s = timer.seconds(lambda: mesh.wait(mesh.start_all_reduce_in_place(buffer, axes)))
    product_s = timer.seconds(lambda: square @ square)
    if collective_s is None or product_s is None:
        return None
    repeats = max(round(collective_s / product_s), 1)

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(square, square)

    def both() -> None:
        in_flight = mesh.start_all_reduce_in_place(buffer, axes)
        compute()
        mesh.wait(in_flight)

    compute_s, both_s = timer.seconds(compute), timer.seconds(both)
    if compute_s is None or both_s is None:
        return None
    return ContentionPoint(compute_s, collective_s, both_s)
