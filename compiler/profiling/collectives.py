"""The collectives that a profile times: all kinds over sizes, in groups as meshes have them, and a
product beside an all-reduce."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshfold.cost_models.calibration.points import CollectivePoint, ContentionPoint
from meshfold.profiling.kernels import Run
from meshfold.profiling.timing import Timer

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")
SIZES = {
    "cpu": (2**20, 2**12, 2**23, 2**16),
    "cuda": (2**24, 2**12, 2**28, 2**20),
}
"""Bytes, the most telling first."""
CONTENDED = {"cpu": (2**21, 256), "cuda": (2**26, 4096)}
"""Bytes of the all-reduce and width of the products beside it."""


@dataclass(frozen=True)
class Group:
    """Ranks of this rank's group; all groups of its size work at once."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    per_node: int

    @property
    def name(self) -> str:
        return f"{len(self.ranks)} ranks on {len(self._on_nodes)} nodes"

    @property
    def _on_nodes(self) -> dict[int, int]:
        """Ranks by node."""
        nodes = [rank // self.per_node for rank in self.ranks]
        return {node: nodes.count(node) for node in nodes}

    def point(self, kind: str, num_bytes: int, seconds: float) -> CollectivePoint:
        counts = self._on_nodes.values()
        return CollectivePoint(
            kind,
            float(num_bytes),
            len(self.ranks),
            len(counts),
            max(counts),
            min(counts),
            seconds,
        )


def partitions(num_ranks: int, per_node: int) -> list[list[tuple[int, ...]]]:
    """Ways to divide all ranks into groups of one size, as axes of meshes do: all, a half, a
    quarter in a row; with several nodes also a rank of each."""
    sizes = [num_ranks // k for k in (1, 2, 4, 8) if num_ranks % k == 0 and num_ranks // k > 1]
    if 1 < per_node < num_ranks and per_node not in sizes:
        sizes.append(per_node)
    found = [[tuple(range(at, at + n)) for at in range(0, num_ranks, n)] for n in sizes]
    if 1 < per_node < num_ranks:
        found.append([tuple(range(k, num_ranks, per_node)) for k in range(per_node)])
    return found


def groups(per_node: int, backend: str | None) -> list[Group]:
    """This rank's groups of each partition. Called on all ranks."""
    rank, found = dist.get_rank(), []
    for partition in partitions(dist.get_world_size(), per_node):
        for ranks in partition:
            group = dist.new_group(list(ranks), backend=backend)
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                found.append(Group(group, ranks, per_node))
    return found


def cases(found: Sequence[Group], device_type: str) -> Iterator[tuple[str, Group, str, int]]:
    """(name, group, kind, bytes)."""
    for num_bytes in SIZES[device_type]:
        for kind in KINDS:
            for group in found:
                yield f"{kind}/{num_bytes}/{group.name}", group, kind, num_bytes


def collective(group: Group, kind: str, num_bytes: int, device: torch.device) -> Run:
    """What runs a collective once. num_bytes: as collective_time has them."""
    count = len(group.ranks)
    numel = max(num_bytes // 4 // count, 1) * count
    whole = torch.zeros(numel, device=device)
    part = torch.zeros(numel // count, device=device)
    pg = group.group
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=pg)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=pg)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=pg)
    other = torch.zeros_like(whole)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=pg)
    assert kind == "shift", kind
    own = group.ranks.index(dist.get_rank())
    after, before = group.ranks[(own + 1) % count], group.ranks[own - 1]

    def shift() -> None:
        sends = dist.P2POp(dist.isend, whole, after, pg), dist.P2POp(dist.irecv, other, before, pg)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()

    return shift


def contention(group: Group, timer: Timer) -> ContentionPoint | None:
    """Products for about as long as an all-reduce takes, alone and beside it."""
    device = timer.device
    num_bytes, width = CONTENDED[device.type]
    buffer = torch.zeros(num_bytes // 4, device=device)
    square = torch.zeros(width, width, device=device)
    collective_s = timer.seconds(lambda: dist.all_reduce(buffer, group=group.group))
    product_s = timer.seconds(lambda: square @ square)
    if collective_s is None or product_s is None:
        return None
    repeats = max(round(collective_s / product_s), 1)

    def compute() -> None:
        for _ in range(repeats):
            square @ square

    def both() -> None:
        work = dist.all_reduce(buffer, group=group.group, async_op=True)
        compute()
        assert work is not None
        work.wait()

    compute_s, both_s = timer.seconds(compute), timer.seconds(both)
    if compute_s is None or both_s is None:
        return None
    return ContentionPoint(compute_s, collective_s, both_s)
