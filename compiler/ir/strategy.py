"""A strategy: what one region does on every axis of the mesh, op by op.

The typing is the whole truth: types of operands and results per op and axis, and the stored layout
of each parameter. The search makes it, the plan stores it, the emitter obeys it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from meshfold.ir.spmd import Layout

Recompute = Literal["none", "selective", "full"]
"""What of a region's inside the backward finds: all that autograd keeps; what products, attention
and collectives other than gathers made; or nothing. Under "full" only the values that arrive are
held, and the forward of the region runs again in the backward. "selective" can be priced and
planned, not run yet."""

Offload = Literal["none", "optimizer", "activations"]
"""What lives in the host's memory between uses: nothing; gradients and optimizer states, which the
host updates; or what a region keeps inside for its backward. Can be planned, not run yet."""


TpMode = Literal["tensor", "sequence", "data"]
"""What a tp axis does in a region: shards its weights; and the sequence between them; or shards the
batch inside of what dp leaves, with whole weights, beside regions that shard theirs."""

TP_MODES: tuple[TpMode, ...] = get_args(TpMode)

_TP_SUFFIX: Mapping[TpMode, str] = MappingProxyType(
    {"tensor": "", "sequence": "+sp", "data": " as dp"}
)


class Degrees(NamedTuple):
    """Ranks on each axis of the mesh of one stage; on the mesh ep is next to dp, outside of cp."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def batch_ranks(self) -> int:
        """Ranks that the batch is cut over."""
        return self.dp * self.ep

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO shards over."""
        return self.batch_ranks * self.cp


@dataclass(frozen=True, slots=True)
class OpTyping:
    """Rules chosen for one op, one name per axis, and the layouts they mean.

    inputs: one layout per entry of `op.operands`; outputs: one per entry of `op.outputs`.
    """

    rules: tuple[str, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True)
class RegionTyping:
    """slots: layout in which each slot's value arrives (for a parameter: its stored layout);
    ops: one typing per op; outputs: layout in which each region output leaves; recompute: see
    Recompute; ValueError for another word. keeps_gathered: parameters that are gathered for the
    forward stay for the backward, of all microbatches of a step (ZeRO 1 and 2), instead of being
    gathered again. whole_gradients: gradients of gathered parameters are added up whole over the
    microbatches and reduced once (ZeRO 1), instead of with every microbatch.

    Wherever a value's layout (slot or producer) differs from what an op or an output demands, the
    emitter inserts the conversion that `passes.conversions.plan_conversions` gives, one per
    (value, target layout).
    """

    slots: tuple[Layout, ...]
    ops: tuple[OpTyping, ...]
    outputs: tuple[Layout, ...]
    recompute: Recompute = "none"
    keeps_gathered: bool = False
    whole_gradients: bool = False

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            raise ValueError(
                f"recompute is {' or '.join(get_args(Recompute))}, not {self.recompute!r}"
            )


PartsOf = Literal["samples", "sequence"]


@dataclass(frozen=True, slots=True)
class Parts:
    """In how many parts of what a region runs, where a schedule has it (passes.region_parts)."""

    count: int = 1
    of: PartsOf = "samples"

    def __str__(self) -> str:
        return f"{self.count} parts of its {self.of}" if self.count > 1 else "one part"


@dataclass(frozen=True, slots=True)
class UniformStrategy:
    """One leaf of the decision tree, for a region or for a whole model: degrees, sequence parallel
    on tp, ZeRO level on dp (0: nothing sharded, 1: optimizer states, 2: and gradients, 3: and
    parameters; in one pass 1 is run as 2: no gradient is whole for longer than its region), what is
    recomputed, what is offloaded; pipeline stages, and parts that a rank's share of the batch is
    run in; cp: ranks that share the sequence, with whole weights; ep: ranks that cut the batch as
    dp does and share the experts.

    `label` is how people read it: "pp8 x dp2 x tp4+sp, zero1, recompute full, 64 microbatches".
    """

    dp: int = 1
    tp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    offload: Offload = "none"
    batch_on_tp: bool = False
    pp: int = 1
    microbatches: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def label(self) -> str:
        sizes = (("pp", self.pp), ("dp", self.dp), ("ep", self.ep), ("cp", self.cp))
        parts = [f"{name}{size}" for name, size in sizes if size > 1]
        if self.tp > 1:
            parts.append(f"tp{self.tp}" + _TP_SUFFIX[self.tp_mode])
        words = [" x ".join(parts) or "one device"]
        if self.zero and self.degrees.zero_ranks > 1:
            words.append(f"zero{self.zero}")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.offload != "none":
            words.append(f"offload {self.offload}")
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        return ", ".join(words)

    @property
    def degrees(self) -> Degrees:
        """The axes of its mesh."""
        return Degrees(self.dp, self.cp, self.tp, self.ep)

    @property
    def tp_mode(self) -> TpMode:
        """What the tp axis does."""
        if self.batch_on_tp:
            return "data"
        return "sequence" if self.sequence_parallel else "tensor"

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters are whole between the forward and the backward of a region."""
        return self.zero in (1, 2)

    @property
    def whole_gradients(self) -> bool:
        """Whether gradients of sharded parameters are whole between the microbatches of a step."""
        return self.zero == 1 and self.microbatches > 1

    @property
    def runs(self) -> bool:
        """Whether the emitter can run it; else it can only be planned."""
        return self.recompute != "selective" and self.offload == "none"
