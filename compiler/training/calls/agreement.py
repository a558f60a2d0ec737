"""What the ranks of a job must agree on, compared before it matters.

    compared            when the model is compiled (meshfold.distributed.agreement)
    agreed_states       when the model is bound: initial values are those of rank 0
    StepAgreement       every step: mode, shapes, dtypes; in the first ones contents of batches, in
                        steps 1, 2, 3, 5, 9 and so on the parameters that ranks hold alike

Ranks that differ all raise the same line; without it they would wait for each other, or train on
with other numbers. Comparisons are over a gloo group of all ranks, beside the program's own groups,
so nothing waits for a device.
"""

import hashlib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfold.distributed.agreement import extremes, waits_for_all
from meshfold.distributed.rank_mesh import ProcessMesh
from meshfold.distributed.waiting import lost_ranks
from meshfold.errors import RanksDifferError
from meshfold.ir.mesh import DATA_AXIS
from meshfold.torch_compat.dtypes import dtype_name
from meshfold.torch_compat.process_groups import default_timeout, host_backend
from meshfold.torch_compat.pytree import named_leaves
from meshfold.training.calls.replicas import first_different, names_alike
from meshfold.training.shards.gradient_norm import ShardedAxes

NUM_COMPARED = 10
"""Steps whose batches are compared by their contents, unless the user says otherwise."""


def states_text(model: nn.Module) -> str:
    """Names, shapes and dtypes of parameters and buffers."""
    lines = (f"{n} {list(x.shape)} {x.dtype} {x.is_meta}" for n, x in _states(model))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def agreed_states(model: nn.Module, *, sync: bool) -> None:
    """Makes the initial values of parameters and buffers those of rank 0, in place, as
    DistributedDataParallel does, and says so; tensors on the meta device are left.

    Called on all ranks together. Raises RanksDifferError unless `sync`, where they differ.
    """
    states = [(name, x) for name, x in _states(model) if not x.is_meta]
    own = torch.tensor([checksum(x) for _, x in states], dtype=torch.int64)
    with waits_for_all("comparison of initial values"):
        group = dist.new_group(backend=host_backend(), timeout=default_timeout())
    try:
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        with waits_for_all("comparison of initial values"):
            dist.all_gather(everyone, own, group=group)
        table = torch.stack(everyone)
        different = (table != table[0]).any(0).nonzero().flatten().tolist()
        if not different:
            return
        name = states[different[0]][0]
        rank = int((table[:, different[0]] != table[0, different[0]]).nonzero()[0])
        what = f"the initial values of {name} on rank {rank} are not those on rank 0"
        if not sync:
            raise RanksDifferError(
                f"{what} (and {len(different) - 1} more); build the model with the same seed on "
                "every rank, or compile with sync_module_states=True"
            )
        with waits_for_all("initial values of rank 0"):
            for k in different:
                _take_from_first_rank(states[k][1], group)
    finally:
        dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        warnings.warn(
            f"{what} (of {len(different)} tensors): all ranks have taken rank 0's; seed every rank "
            "alike to build equal models",
            stacklevel=2,
        )


def _take_from_first_rank(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    with torch.no_grad():
        value = tensor.detach().contiguous().reshape(-1)
        data = value.view(torch.uint8)
        dist.broadcast(data, src=0, group=None if tensor.is_cuda else group)
        tensor.copy_(value.view(tensor.shape))


def _states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


_CHUNK = 1 << 20
"""Words that a checksum weights at once."""
_SPREAD, _PRIME = 0x9E3779B97F4A7C1, 0x100000001B3


def checksum(tensor: Tensor) -> int:
    """A number of 64 bits of the bytes of a tensor and of where they are."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    total = data.numel()
    for chunk in torch.split(words, _CHUNK) if total else ():
        # Odd weights: a change of one word changes the sum, wherever it is.
        weights = torch.arange(1, chunk.numel() + 1, device=words.device) * _SPREAD | 1
        total = total * _PRIME + int((chunk * weights).sum())
    return (total + 2**63) % 2**64 - 2**63


@dataclass(eq=False)
class StepAgreement:
    """The comparison of one step.

    num_compared: forward passes whose batches are compared by their contents; None: all of them.
    compared: how many were. sharded: the axes over which parameters are, by name.
    """

    mesh: ProcessMesh
    group: dist.ProcessGroup
    num_compared: int | None
    sharded: ShardedAxes = field(default_factory=dict)
    compared: int = 0

    @staticmethod
    def of(mesh: ProcessMesh, num_compared: int | None, sharded: ShardedAxes) -> "StepAgreement":
        """That of the ranks of `mesh`. Called on all ranks together."""
        group = mesh.new_group(range(mesh.mesh.num_ranks), backend=host_backend())
        assert group is not None, "every rank is in it"
        return StepAgreement(mesh, group, num_compared, sharded)

    def check_call(self, call: str, batch: Mapping[str, Any], number: int, training: bool) -> None:
        """Compares what is called and the shapes and dtypes of forward number `number`. Raises
        RanksDifferError on all ranks."""
        text = text_of_call(call, batch, training)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        own = torch.tensor([digest, number])
        with self._waits():
            least, most = extremes(own, self.group, self.mesh.place.timeout_s)
        if torch.equal(least, most):
            return
        texts: list[Any] = [None] * self.mesh.mesh.num_ranks
        with self._waits():
            dist.all_gather_object(texts, f"call number {number + 1}, {text}", group=self.group)
        rank = next(r for r, other in enumerate(texts) if other != texts[0])
        raise RanksDifferError(
            f"rank {rank} makes another step than rank 0: {texts[rank]}; rank 0: {texts[0]}; call "
            "it on all ranks together, with the global batch or with the slice of data_rank"
        )

    def are_alike(self, batch: Mapping[str, Any]) -> bool:
        """Whether all ranks have the same contents. Called on all ranks together."""
        leaves = sorted(named_leaves(dict(batch)))
        sums = self._gathered([checksum(x) for _, x in leaves if isinstance(x, Tensor)])
        return len(set(sums)) == 1

    def check_contents(self, batch: Mapping[str, Any], slices: Collection[str]) -> None:
        """Compares the rows of ranks that must hold the same. slices: the inputs of which every
        rank passes its slice. Raises RanksDifferError on all ranks."""
        if self.num_compared is not None and self.compared >= self.num_compared:
            return
        self.compared += 1
        leaves = sorted(named_leaves(dict(batch)))
        tensors = {n: x for n, x in leaves if isinstance(x, Tensor)}
        sums = self._gathered([checksum(x) for x in tensors.values()])
        mesh = self.mesh.mesh
        axis = mesh.names.index(DATA_AXIS) if DATA_AXIS in mesh.names else None
        first: dict[tuple[str, int], tuple[int, int]] = {}
        for rank, found in enumerate(sums):
            for name, value in zip(tensors, found, strict=True):
                is_slice = name in slices and axis is not None
                share = mesh.coords(rank)[axis or 0] if is_slice else 0
                other, expected = first.setdefault((name, share), (rank, value))
                if value != expected:
                    data_rank = share if is_slice else None
                    raise RanksDifferError(_other_rows(name, rank, other, data_rank))

    def check_parameters(self, parameters: Mapping[str, Tensor], number: int) -> None:
        """Compares what ranks hold alike, before forward number `number`, if it is due. parameters:
        this rank's, by canonical name. Raises RanksDifferError on all ranks."""
        if self.num_compared == 0 or number & (number - 1):
            return
        names = sorted(self.sharded)
        alike = names_alike(self.mesh, self.sharded)
        with self._waits():
            name = first_different(self.mesh, alike, parameters)
            own = torch.tensor([names.index(name) if name else -1])
            _, most = extremes(own, self.group, self.mesh.place.timeout_s)
        if int(most) >= 0:
            raise RanksDifferError(
                f"ranks hold other numbers of {names[int(most)]}, of which they are to hold the "
                "same: what changes parameters and gradients does so alike on all ranks, with the "
                "same rates, the same steps and, for noise, the same seed"
            )

    def _waits(self) -> AbstractContextManager[None]:
        mesh = self.mesh
        ranks, what = range(mesh.mesh.num_ranks), "comparison of what the ranks call"
        return lost_ranks(mesh.rank, ranks, what, mesh.place.timeout_s, mesh.place)

    def _gathered(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The numbers of every rank. Raises RankLostError."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        everyone = [torch.empty_like(own) for _ in range(self.mesh.mesh.num_ranks)]
        with self._waits():
            dist.all_gather(everyone, own, group=self.group)
        return [tuple(other.tolist()) for other in everyone]


def _other_rows(name: str, rank: int, other: int, data_rank: int | None) -> str:
    if data_rank is None:
        return (
            f"{name} on rank {rank} has other contents than on rank {other}, and both are of the "
            "global batch; seed the loaders alike, or let every rank pass the slice of its "
            "data_rank"
        )
    return (
        f"{name} on rank {rank} has other rows than on rank {other}, and both have data_rank "
        f"{data_rank}; sample with num_replicas=model.num_data_ranks, rank=model.data_rank"
    )


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of an object that says no more of itself: each process has it somewhere else."""


def text_of_call(call: str, batch: Mapping[str, Any], training: bool) -> str:
    """What a rank does next, the same text on ranks that do the same."""
    arguments = (
        f"{name} {dtype_name(x.dtype)}{list(x.shape)}"
        if isinstance(x, Tensor)
        else f"{name}={_ADDRESS.sub('', repr(x))}"
        for name, x in sorted(named_leaves(dict(batch)))
    )
    grad = "" if torch.is_grad_enabled() else " without gradients"
    mode = "train" if training else "eval"
    return f"{call}{grad} in {mode} mode of {', '.join(arguments)}"
