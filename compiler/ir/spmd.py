"""SPMD types: what a value is on one mesh axis, and layouts, one type per axis.

    Invariant   same on every rank of the axis, gradient same on every rank
    Replicate   same on every rank of the axis, gradient is a pending sum
    Shard(d,g)  dim d is g equal blocks, each block sharded evenly over the axis; gradient alike
    Partial     a pending sum over the axis; gradient same on every rank
    Experts(g)  rows of Shard(0,g), each on the rank that holds the weights of its expert: as many
                as the routing says, on average as many as Shard(0,g); gradient alike. Only between
                dispatch and combine (meshfold.ops.expert_dispatch): no conversion leads to it or
                from

A *padded* Shard(d,g) has a granularity of `unit` rows: 1 for a vocabulary, the size of a head for
attention. Every block is padded to the next multiple of the axis, in units, before it is sharded,
and no other axis shards dim d. Every rank has as many rows; on the last ranks some, or all, are
padding rows: zeros in a stored parameter and in its gradient, anything finite in what ops compute
from it. No conversion leads from it, and to it only one from the unsharded value; parameters are
read as they are stored, or gathered unsharded (ZeRO).

A Shard of several *copies* is how HSDP stores what ZeRO shards: the ranks of the axis are as many
runs of consecutive ranks, each of which holds the whole tensor, sharded over its own ranks alone.
Only parameters are stored so, and they are gathered before use. Everything below then says of a
run what it says of the axis.

(The types of JAX shard_map's varying axes and of torch spmd_types; blocks are ours.)

Sizes and blocks are those of the *global* tensor. With an axis of n ranks, rank r of Shard(d, g)
holds the indices i = (b * n + r) * m + o of dim d, for b < g, o < m = size / (g * n): one digit of
i in a mixed radix. Two axes may shard one dim when their digits do not overlap, that is when one
axis's g is a multiple of the other's g * n (Shard(0,1) over 4 ranks and Shard(0,4) nest). Local
tensors then do not depend on the order of the axes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

_TEXT = re.compile(
    r"^(?:[IRP]|([SE])([0-9]{1,9})(?:/([0-9]{1,9}))?(?:(\+)([0-9]{0,9}))?(?:\*([0-9]{1,9}))?)$"
)


@dataclass(frozen=True, slots=True, order=True)
class SpmdType:
    """Type of a value on one mesh axis. `dim` and `blocks` belong to kinds "S" and "E" only,
    `unit` to an "S" that is padded, and is 0 elsewhere; an "E" divides its rows evenly for all that
    is counted. `copies`: runs of ranks that each hold the tensor, of an "S"."""

    kind: Literal["I", "R", "P", "S", "E"]
    dim: int = -1
    blocks: int = 1
    unit: int = 0
    copies: int = 1
    padded: bool = field(init=False, compare=False, repr=False)
    is_shard: bool = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Layouts are keys in every inner loop of the search. The hash is of numbers alone, so that
        # it is right in whatever process the type is unpickled.
        object.__setattr__(self, "is_shard", self.kind in ("S", "E"))
        object.__setattr__(self, "padded", self.unit > 0)
        object.__setattr__(self, "_hash", hash(self._numbers))
        if self.is_shard != (self.dim >= 0):
            raise ValueError(f"dim is for Shard only, got kind {self.kind} and dim {self.dim}")
        if self.blocks < 1 or (not self.is_shard and self.blocks != 1):
            raise ValueError(f"blocks must be 1 or more, on Shard only, got {self.blocks}")
        if self.unit < 0 or (self.padded and self.kind != "S"):
            raise ValueError(f"unit must be 0 or more, 0 but on Shard, got {self.unit}")
        if self.copies < 1 or (self.copies > 1 and self.kind != "S"):
            raise ValueError(f"copies must be 1 or more, 1 but on Shard, got {self.copies}")

    @property
    def _numbers(self) -> tuple[int, int, int, int, int]:
        return ord(self.kind[:1] or " "), self.dim, self.blocks, self.unit, self.copies

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if not self.is_shard:
            return self.kind
        blocks = f"/{self.blocks}" if self.blocks > 1 else ""
        unit = "" if not self.padded else f"+{self.unit}" if self.unit > 1 else "+"
        copies = f"*{self.copies}" if self.copies > 1 else ""
        return f"{self.kind}{self.dim}{blocks}{unit}{copies}"

    def num_shards(self, num_ranks: int) -> int:
        """Shards of a Shard on an axis of `num_ranks` ranks: these, or the ranks of a copy."""
        return num_ranks // self.copies

    @staticmethod
    def parse(text: str) -> "SpmdType":
        """Inverse of str(): "I", "R", "P", "S0", "S1/3", "S0+", "S0/3+64", "S0*4", "E0".
        Raises ValueError."""
        match = _TEXT.match(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no SPMD type; write I, R, P or S<dim>, with /<blocks>, +<unit> and "
                "*<copies>"
            )
        if match[1]:
            kind: Literal["S", "E"] = "S" if match[1] == "S" else "E"
            unit = int(match[5] or 1) if match[4] else 0
            return SpmdType(kind, int(match[2]), int(match[3] or 1), unit, int(match[6] or 1))
        return SpmdType(text)  # type: ignore[arg-type]


INVARIANT = SpmdType("I")
REPLICATE = SpmdType("R")
PARTIAL = SpmdType("P")

Layout = tuple[SpmdType, ...]
"""One type per mesh axis, in the order of the mesh's axes."""


def Shard(dim: int, blocks: int = 1) -> SpmdType:  # noqa: N802  reads as a type
    """Shard(dim, blocks) on one axis."""
    return SpmdType("S", dim, blocks)


def PaddedShard(dim: int, blocks: int = 1, unit: int = 1) -> SpmdType:  # noqa: N802  as above
    """Shard(dim, blocks) with blocks of granules that need not divide."""
    return SpmdType("S", dim, blocks, unit)


def Experts(blocks: int = 1) -> SpmdType:  # noqa: N802  reads as a type
    """Experts(blocks) on one axis."""
    return SpmdType("E", 0, blocks)


def layout_text(layout: Layout) -> str:
    """ "S0,I" for a two-axis layout."""
    return ",".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    """Inverse of layout_text."""
    return tuple(SpmdType.parse(part) for part in text.split(",")) if text else ()


def is_legal(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a tensor of `shape` can have `layout` on axes of `sizes` ranks.

    Every sharded dim must divide, and digits of axes on one dim must not overlap; a padded dim is
    sharded by one axis, and divides into its blocks of granules. Copies divide the ranks.
    """
    for d, size in enumerate(shape):
        steps = [t.blocks * t.unit for t in layout if t.padded and t.dim == d]
        if steps:
            if sum(t.dim == d for t in layout) > 1 or size % steps[0]:
                return False
            continue
        digits = sorted(
            (t.blocks, n // t.copies) for t, n in zip(layout, sizes, strict=True) if t.dim == d
        )
        end = 1
        for blocks, n in digits:
            if blocks % end or size % (blocks * n):
                return False
            end = blocks * n
    return all(t.dim < len(shape) and n % t.copies == 0 for t, n in zip(layout, sizes, strict=True))


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape on one rank. The layout must be legal."""
    local = list(shape)
    for t, n in zip(layout, sizes, strict=True):
        if t.padded:
            local[t.dim] = _filled_up(local[t.dim], t, n) // t.num_shards(n)
        elif t.is_shard:
            local[t.dim] = -(-local[t.dim] // t.num_shards(n))
    return tuple(local)


def padded_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """`shape` with padded dims filled up; itself where no type is padded."""
    full = list(shape)
    for t, n in zip(layout, sizes, strict=True):
        if t.padded:
            full[t.dim] = _filled_up(full[t.dim], t, n)
    return tuple(full)


def _filled_up(size: int, padded: SpmdType, num_ranks: int) -> int:
    """A dim of `size` with every block filled up."""
    step = padded.blocks * padded.unit * padded.num_shards(num_ranks)
    return -(-size // step) * step


def local_blocks(layout: Layout, sizes: Sequence[int], axis: int) -> int:
    """Blocks of `layout[axis]` as seen in the local tensor of the *other* axes.

    Axes whose digit lies above this one have already split the blocks: Shard(0,4) under a
    Shard(0,1) over 4 ranks is one local block.
    """
    mine = layout[axis]
    above = 1
    for k, (t, n) in enumerate(zip(layout, sizes, strict=True)):
        if k != axis and t.dim == mine.dim and t.is_shard and t.blocks < mine.blocks:
            above *= t.num_shards(n)
    return mine.blocks // above
