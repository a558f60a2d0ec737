"""A strategy: what one region does on every axis of the mesh, op by op.

The typing says everything: types of operands and results per op and axis, and the stored layout of
each parameter. The search computes it, the plan stores it, the emitter obeys it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, get_args

from meshfold.ir.limits import Limits, Positive
from meshfold.ir.spmd import Layout

Recompute = Literal["none", "light", "selective", "heavy", "full"]
"""Which activations inside a region are recomputed in the backward: "none"; those that are cheap to
compute for their bytes (all but RegionTyping.kept), of which "light" has fewer and "heavy" more
than "selective"; or "full", so that only the region's inputs are saved."""

SELECTIVE: tuple[Recompute, ...] = ("light", "selective", "heavy")
"""The words under which some results are kept and others recomputed."""

BESIDE_SELECTIVE: tuple[Recompute, ...] = ("light", "heavy")
"""Those on either side of the point furthest below the mix of none and full."""

Offload = Literal["none", "optimizer", "parameters", "disk", "activations"]
"""What of a region is in the host's memory: nothing; its parameters, gradients and optimizer
states, which the host updates; the same, and the device has the parameters only while the region
runs; the same but for the states, which are on the host's disk; or the activations that the region
saves for its backward."""

UPDATED_BY_HOST: frozenset[Offload] = frozenset({"optimizer", "parameters", "disk"})
"""Where the host stores the parameters."""

TpMode = Literal["tensor", "sequence", "data"]
"""What a tp axis shards in a region: "tensor", the weights; "sequence", also the activations
between them; "data", the batch (after dp), with whole weights, over which ZeRO then shards as over
dp, while other regions shard theirs."""

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
    dp_shard: int = 0
    """Of dp, the ranks that ZeRO shards over; 0: all."""

    @property
    def replicas(self) -> int:
        """Runs of dp ranks each of which holds all states that ZeRO shards: HSDP if more than 1."""
        return self.dp // self.dp_shard if self.dp_shard else 1

    @property
    def of_mesh(self) -> dict[str, int]:
        """As build_mesh takes them."""
        axes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        return {**axes, "replicas": self.replicas}

    @property
    def batch_ranks(self) -> int:
        """Ranks that the batch is sharded over."""
        return self.dp * self.ep

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO shards over, where tp does not shard the batch."""
        return self.batch_ranks * self.cp // self.replicas


@dataclass(frozen=True, slots=True)
class OpTyping:
    """The rules chosen for one op, and the layouts that follow from them."""

    rules: tuple[str, ...]
    """One name per axis."""
    inputs: tuple[Layout, ...]
    """One layout per entry of `op.operands`."""
    outputs: tuple[Layout, ...]
    """One layout per entry of `op.outputs`."""


@dataclass(frozen=True, slots=True)
class KeptResults:
    """What the forward of a region with selective recomputation keeps for the backward, beside what
    arrives: results that are saved where the backward needs them, and not computed twice. Found by
    meshfold.passes.memory.kept_results."""

    ops: tuple[int, ...] = ()
    """Numbers of ops, all results of each."""
    conversions: tuple[tuple[int, Layout], ...] = ()
    """(number of a value, layout that a step of its conversion gave)."""


@dataclass(frozen=True)
class RegionTyping:
    """The layouts of one region. ValueError where `recompute` is no word of Recompute, or something
    is kept though recomputation is not selective.

    Wherever a value's layout (slot or producer) differs from what an op or an output demands, the
    emitter inserts the conversion that `passes.price.conversion_trees.plan_conversions` gives, one
    per (value, target layout).
    """

    slots: tuple[Layout, ...]
    """The layout in which each slot's value arrives; for a parameter the stored layout."""
    ops: tuple[OpTyping, ...]
    outputs: tuple[Layout, ...]
    """The layout in which each region output leaves."""
    recompute: Recompute = "none"
    reshard_after_forward: bool = True
    """Whether parameters that were gathered for the forward are freed and gathered again for the
    backward (ZeRO 3); else they stay gathered for all microbatches of a step (ZeRO 1 and 2)."""
    accumulate_unsharded: bool = False
    """Whether gradients of gathered parameters are accumulated unsharded over the microbatches and
    reduced once (ZeRO 1), instead of reduced with every microbatch."""
    kept: KeptResults = KeptResults()
    """What selective recomputation does not compute twice."""

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            raise ValueError(
                f"recompute is {' or '.join(get_args(Recompute))}, not {self.recompute!r}"
            )
        if self.recompute not in SELECTIVE and self.kept != KeptResults():
            raise ValueError(
                f"recompute {self.recompute} keeps no results; {' or '.join(SELECTIVE)} does"
            )


ChunkDim = Literal["samples", "sequence"]


@dataclass(frozen=True, slots=True)
class Chunking:
    """The micro-chunks that a region runs its batch in, so that collectives of one overlap compute
    of another (Domino, Wang et al. 2024; passes.split.micro_chunks)."""

    count: Positive = 1
    dim: ChunkDim = "samples"
    """What is divided into micro-chunks."""

    def __str__(self) -> str:
        return f"{self.count} micro-chunks of its {self.dim}" if self.count > 1 else "not chunked"


@dataclass(frozen=True, slots=True)
class UniformStrategy:
    """The strategy of a region or of a whole model, in the terms of the decision tree."""

    dp: Positive = 1
    tp: Positive = 1
    zero: Annotated[int, Limits(0, 3)] = 0
    """ZeRO level on dp, ep and cp, and on tp where that shards the batch. 0: nothing is sharded, 1:
    optimizer states, 2: also gradients, 3: also parameters. A step without microbatches runs 1 as
    2: no gradient is unsharded for longer than its region."""
    sequence_parallel: bool = False
    """Whether tp shards the sequence of activations between tensor-parallel ops."""
    recompute: Recompute = "none"
    offload: Offload = "none"
    batch_on_tp: bool = False
    """Whether tp shards the batch (after dp) instead of the weights."""
    pp: Positive = 1
    """Devices that the pipeline goes over."""
    microbatches: Positive = 1
    cp: Positive = 1
    """Ranks that share the sequence, with unsharded weights."""
    ep: Positive = 1
    """Ranks that shard the batch as dp does and share the experts."""
    dp_shard: Annotated[int, Limits(0)] = 0
    """Of dp, the neighbours that ZeRO shards over, replicated over the rest (HSDP); 0: all of dp.
    Without ZeRO it says nothing, and is 0."""

    @property
    def label(self) -> str:
        """How people read it: "pp8 x dp2 x tp4+sp, zero1, recompute full, 64 microbatches", or
        "dp32 (dp_shard8), zero3"."""
        sizes = (("pp", self.pp), ("dp", self.dp), ("ep", self.ep), ("cp", self.cp))
        degrees = [f"{name}{size}" for name, size in sizes if size > 1]
        if self.dp_shard:
            dp = f"dp{self.dp}"
            degrees = [f"{d} (dp_shard{self.dp_shard})" if d == dp else d for d in degrees]
        if self.tp > 1:
            degrees.append(f"tp{self.tp}" + _TP_SUFFIX[self.tp_mode])
        words = [" x ".join(degrees) or "one device"]
        if self.zero and self.zero_ranks > 1:
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
        """The axes of the mesh of one stage."""
        return Degrees(self.dp, self.cp, self.tp, self.ep, self.dp_shard)

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO shards over: with those of tp where it shards the batch."""
        return self.degrees.zero_ranks * (self.tp if self.batch_on_tp else 1)

    @property
    def tp_mode(self) -> TpMode:
        """What the tp axis does."""
        if self.batch_on_tp:
            return "data"
        return "sequence" if self.sequence_parallel else "tensor"

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are freed between the forward and the backward of a region;
        without ZeRO none are gathered."""
        return self.zero not in (1, 2)

    @property
    def accumulate_unsharded(self) -> bool:
        """Whether gradients of sharded parameters are unsharded between microbatches."""
        return self.zero == 1 and self.microbatches > 1
