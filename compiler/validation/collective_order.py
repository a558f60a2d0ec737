"""Do all ranks of a group start the same collectives in the same order?

They must, or they wait for ever, or add up what does not belong together. The program of a rank
names axes only and is the same on all ranks, so this holds by construction; here it is observed
while the program runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.ir.node_groups import NodeLevels
from meshfold.torch_compat.dtypes import dtype_name

STARTS = (
    "all_reduce",
    "all_reduce_in_place",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "exchange",
)
"""What RankMesh can start, without `start_`."""


@dataclass(frozen=True, slots=True)
class StartedCollective:
    """A collective that was started. shape: of what this rank gives; () for an exchange, whose
    splits are as large as the routing says."""

    kind: str
    axes: Axes
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {self.dtype}{list(self.shape)} over {' x '.join(self.axes)}"


@contextmanager
def collectives_of(mesh: RankMesh) -> Iterator[list[StartedCollective]]:
    """A context in which the list grows by every collective that this rank starts."""
    calls: list[StartedCollective] = []

    def logged(kind: str, start: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, axes: Axes, *rest: Any) -> Tensor:
            shape = () if kind == "exchange" else tuple(x.shape)
            calls.append(StartedCollective(kind, axes, dtype_name(x.dtype), shape))
            return start(x, axes, *rest)

        return call

    with replaced_methods(mesh, {f"start_{kind}": partial(logged, kind) for kind in STARTS}):
        yield calls


@contextmanager
def replaced_methods(
    mesh: RankMesh, wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
) -> Iterator[None]:
    """A context in which what each wrapper makes of the method of its name is called instead."""
    vars(mesh).update({name: wrap(getattr(mesh, name)) for name, wrap in wrappers.items()})
    try:
        yield
    finally:
        for name in wrappers:
            del vars(mesh)[name]


def collective_mismatch(levels: NodeLevels, logs: Sequence[Sequence[StartedCollective]]) -> str:
    """What two ranks of a group do differently first, in one line; empty if nothing. logs: by
    rank."""
    for axes in dict.fromkeys(call.axes for log in logs for call in log):
        own = [[call for call in log if call.axes == axes] for log in logs]
        for first, *others in levels.groups(axes):
            for rank in others:
                found = _difference(first, own[first], rank, own[rank])
                if found:
                    return found
    return ""


def _difference(
    first: int, left: Sequence[StartedCollective], second: int, right: Sequence[StartedCollective]
) -> str:
    for k, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            axes = " x ".join(a.axes)
            return f"as number {k} over {axes}, rank {first} starts {a}, rank {second} {b}"
    if len(left) == len(right):
        return ""
    more, fewer = (first, second) if len(left) > len(right) else (second, first)
    missing = max(left, right, key=len)[min(len(left), len(right))]
    return f"rank {more} starts {missing}, rank {fewer} does not"
