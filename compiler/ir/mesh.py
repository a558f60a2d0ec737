"""The device mesh: named axes over the ranks of a cluster. Pure data, no process groups."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshfold.ir.limits import MOST_DEVICES, Positive

PIPELINE_AXIS = "pp"
"""The axis whose ranks run different stages."""
DATA_AXIS = "dp"
"""The axis whose ranks may each bring their own slice of the batch."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis."""

    name: str
    """What it serves ("dp", "tp", ...)."""
    size: Positive
    """Its ranks."""
    link: str = ""
    """Name of the slowest link of the cluster that a group of this axis crosses."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes from the slowest-varying rank digit (crosses nodes first) to the fastest."""

    axes: tuple[MeshAxis, ...]
    names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Read in every inner loop of the search.
        object.__setattr__(self, "names", tuple(a.name for a in self.axes))
        object.__setattr__(self, "sizes", tuple(a.size for a in self.axes))
        if len(set(self.names)) != len(self.axes):
            raise ValueError(f"axis names must differ, got {', '.join(self.names)}")
        if any(a.size < 1 for a in self.axes):
            raise ValueError("every axis needs at least one rank")
        if self.num_ranks > MOST_DEVICES:
            raise ValueError(f"{self.num_ranks} ranks are more than {MOST_DEVICES}")

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def index(self, name: str) -> int:
        return self.names.index(name)

    def coords(self, rank: int) -> tuple[int, ...]:
        """Coordinates of `rank`, one per axis."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not on a mesh of {self.num_ranks} ranks")
        out = []
        for size in reversed(self.sizes):
            rank, c = divmod(rank, size)
            out.append(c)
        return tuple(reversed(out))

    def rank(self, coords: tuple[int, ...]) -> int:
        r = 0
        for c, size in zip(coords, self.sizes, strict=True):
            r = r * size + c
        return r

    def groups(self, names: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """The rank groups of the axes `names` together, each in mesh order, in a fixed order."""
        keep = [self.index(n) for n in names]
        members: dict[tuple[int, ...], list[int]] = {}
        for r in range(self.num_ranks):
            c = self.coords(r)
            members.setdefault(tuple(x for k, x in enumerate(c) if k not in keep), []).append(r)
        yield from (tuple(ranks) for _, ranks in sorted(members.items()))

    def __str__(self) -> str:
        return " x ".join(f"{a.name}{a.size}" for a in self.axes) or "one rank"
