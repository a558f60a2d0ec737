"""The device mesh: named axes over the ranks of a cluster. Pure data, no process groups.

Under HSDP (ZeRO inside a part of the data parallel ranks) states lie on a finer mesh, the storage
mesh, whose dp axis is two: dp_replicate outside, dp_shard inside. What ops compute knows dp alone.

    mesh            dp32 (4 replicas) x tp2
    storage mesh    dp_replicate4 x dp_shard8 x tp2
    types on dp     S0*4 -> I, S0     S0 -> S0, S0/4     I -> I, I     R -> R, R
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from meshfold.ir.limits import MOST_DEVICES, Positive
from meshfold.ir.spmd import INVARIANT, Layout, SpmdType

PIPELINE_AXIS = "pp"
"""The axis whose ranks run different stages."""
DATA_AXIS = "dp"
"""The axis whose ranks may each bring their own slice of the batch."""
REPLICATE_AXIS, SHARD_AXIS = "dp_replicate", "dp_shard"
"""What dp is on the storage mesh: ranks with the same shards of states, and ranks that share them
(the names of torchtitan's mesh)."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis."""

    name: str
    """What it serves ("dp", "tp", ...)."""
    size: Positive
    """Its ranks."""
    link: str = ""
    """Name of the slowest link of the cluster that a group of this axis crosses."""
    replicas: Positive = 1
    """Runs of ranks each of which holds all states that ZeRO shards over this axis; 1 but on dp
    under HSDP."""

    def __str__(self) -> str:
        part = f" ({SHARD_AXIS}{self.size // self.replicas})" if self.replicas > 1 else ""
        return f"{self.name}{self.size}{part}"


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
        if any(a.size % a.replicas or (a.replicas > 1 and a.name != DATA_AXIS) for a in self.axes):
            raise ValueError(f"replicas are of {DATA_AXIS}, and divide its ranks")
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

    @property
    def replicas(self) -> int:
        """Runs of dp ranks that each hold all states that ZeRO shards: more than 1 under HSDP."""
        return max((a.replicas for a in self.axes), default=1)

    def with_replicas(self, replicas: int) -> "Mesh":
        """The same mesh with so many replicas on dp."""
        return Mesh(
            tuple(replace(a, replicas=replicas) if a.name == DATA_AXIS else a for a in self.axes)
        )

    @property
    def storage(self) -> "Mesh":
        """The mesh that states lie on: this one but under HSDP."""
        if self.replicas == 1:
            return self
        axes: list[MeshAxis] = []
        for axis in self.axes:
            if axis.replicas > 1:
                axes.append(MeshAxis(REPLICATE_AXIS, axis.replicas, axis.link))
                axes.append(MeshAxis(SHARD_AXIS, axis.size // axis.replicas, axis.link))
            else:
                axes.append(axis)
        return Mesh(tuple(axes))

    def on_storage(self, layout: Layout) -> Layout:
        """A layout on this mesh as one on the storage mesh."""
        if self.replicas == 1:
            return layout
        types: list[SpmdType] = []
        for axis, t in zip(self.axes, layout, strict=True):
            if axis.replicas == 1:
                types.append(t)
            elif t.copies > 1:
                types += INVARIANT, replace(t, copies=1)
            elif t.is_shard:
                inside = replace(t, blocks=t.blocks * axis.replicas)
                types += t, inside
            else:
                types += t, t
        return tuple(types)

    def __str__(self) -> str:
        return " x ".join(map(str, self.axes)) or "one rank"
