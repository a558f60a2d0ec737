"""Options of a compilation. One frozen record; a test freezes its fields."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from meshfold.errors import OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.custom_ops import CustomRule
from meshfold.ir.optimizers import (
    OF_STATES,
    STATES,
    WHOLE_PARAMETERS,
    StatesPrecision,
    check_optimizer,
)
from meshfold.ir.returns import ALL, Path, Returns, paths_of, summands_of
from meshfold.ir.strategy import Offload, Recompute
from meshfold.units import is_bytes, parse_bytes

PinValue = int | str

Precision = Literal["model", "bf16", "fp16"]
"""What ops compute in: what the model's own dtypes say; or 16 bits, with parameters, reductions of
gradients and optimizer states in float32."""

PrecisionChoice = Literal["auto", Precision]
"""What a user asks for. "auto" is bf16 where every device has a bfloat16 peak far above float32's
(CompileOptions.precision_on), else what the model's own dtypes say."""

LEAST_ADVANTAGE = 2.0
"""Of a bfloat16 peak over float32's, from which on people train in bf16."""

COMPUTE_DTYPES: Mapping[Precision, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "float16"})
"""Names of the narrow dtypes."""

Mode = Literal["eager", "scheduled"]
"""How a rank's program runs: region graphs as written, with autograd's backward; or their segments
in an order found with the cost model, in which compute overlaps collectives."""

ModeChoice = Literal["auto", Mode]
"""What a user asks for. "auto" is the mode in which the emitted program simulates to the shorter
step, eager where both are as fast (meshfold.refine.finalists)."""

ValueChecks = Literal["drop", "run"]
"""What becomes of the model's assertions on values of tensors: they are left out of the program, as
they hold for every batch that trains and the host would wait for the device at each; or run in
every step, on the whole condition."""

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev"
]
"""The order in which the stages of a pipeline run their microbatches;
meshfold.cost_models.pipeline.schedules says what each is."""

MICRO_CHUNKS = "micro_chunks"
CHAINED_CHUNKS = "chained_chunks"
COLLECTIVE_MATMUL = "collective_matmul"
CHUNKED_LOSS = "chunked_loss"
SLICES = "slices"
REDUCE_BUCKET, ALLGATHER_BUCKET = "reduce_bucket_bytes", "allgather_bucket_bytes"
HIERARCHICAL_ALL_REDUCE = "hierarchical_all_reduce"
VIRTUAL_STAGES = "virtual_stages"
BATCH_NORM = "batch_norm"
PER_MICROBATCH = "microbatch"
LAYOUT = "layout:"
"""What the name of a pin starts with that is about a parameter's layout."""

PINS: Mapping[str, str] = MappingProxyType(
    {
        "dp": "data parallel degree",
        "ep": "expert parallel degree",
        "cp": "context parallel degree",
        "tp": "tensor parallel degree",
        "zero": "ZeRO level",
        "dp_shard": "data parallel ranks that ZeRO shards over, replicated over the rest (HSDP)",
        "sp": "whether tp shards the sequence of activations between its ops (0 or 1)",
        "recompute": "which activations are recomputed in the backward",
        "offload": "what lives in the host's memory",
        "pp": "devices that a pipeline goes over",
        "microbatches": "in which a rank runs its share of the batch",
        "schedule": "the order in which stages run microbatches",
        VIRTUAL_STAGES: "stages per device; more than one under interleaved schedules, zbv and "
        "dualpipev only",
        BATCH_NORM: "whose samples batch norms take statistics of, and after whose forward buffers "
        "are updated: each microbatch's",
        MICRO_CHUNKS: "in which a region runs its batch, in mode scheduled",
        CHAINED_CHUNKS: "whether micro-chunks cross the boundaries of layers (0 or 1)",
        COLLECTIVE_MATMUL: "whether matrix products overlap with their own collective (0 or 1)",
        CHUNKED_LOSS: "whether losses over classes make their logits in chunks (0 or 1)",
        STATES: "in what AdamW's states are kept: as parameters are (full), bf16 or int8",
        SLICES: "slices of the parameter of the largest operator, others by size (4; 1: none)",
        REDUCE_BUCKET: "the largest bucket of reductions of gradients (25MB; 0: none)",
        ALLGATHER_BUCKET: "the largest bucket of gathers of parameters (25MB; 0: none)",
        HIERARCHICAL_ALL_REDUCE: "size of the pieces in which all-reduces of gradients run "
        "hierarchically, by node (25MB; 0: none do)",
    }
)
"""What can be pinned, and what it is. Besides these a parameter's layout, `layout:NAME`."""

_FORMER_PINS = MappingProxyType(
    {
        "parts": MICRO_CHUNKS,
        "ring": COLLECTIVE_MATMUL,
        "merge": REDUCE_BUCKET,
        "merge_gathers": ALLGATHER_BUCKET,
        "hierarchy": HIERARCHICAL_ALL_REDUCE,
        "chunks": VIRTUAL_STAGES,
    }
)
"""Names of pins up to version 1 of the plan file, and those of today."""

_DEGREES = ("dp", "ep", "cp", "tp", "pp", "dp_shard", "microbatches")

_SIZES = (REDUCE_BUCKET, ALLGATHER_BUCKET, HIERARCHICAL_ALL_REDUCE)
"""Pins that are sizes."""

_WORDS = {
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "schedule": get_args(ScheduleName),
    BATCH_NORM: (PER_MICROBATCH,),
    STATES: ("full", "bf16", "int8"),
}
"""Pins that are words, and what they can be."""


@dataclass(frozen=True, slots=True)
class LayoutPin:
    """A parameter's stored layout, fixed. OptionError for a value that is no layout."""

    pattern: str
    """The parameter's name, with * for any text."""
    value: str
    """As the user wrote it (meshfold.passes.region.pins says what it can be)."""

    def __post_init__(self) -> None:
        if self.value not in ("replicate", "dp") and not _TP_LAYOUT.fullmatch(self.value):
            raise OptionError(
                f"pin {self}: no layout; write replicate, dp, tp:DIM, tp:DIM+ or either with ,dp"
            )

    def __str__(self) -> str:
        return f"{LAYOUT}{self.pattern}={self.value}"

    @property
    def tp_dim(self) -> int | None:
        """The dim that tp shards."""
        found = _TP_LAYOUT.fullmatch(self.value)
        return int(found[1]) if found else None

    @property
    def is_padded(self) -> bool:
        """Whether tp must pad that dim."""
        found = _TP_LAYOUT.fullmatch(self.value)
        return found is not None and bool(found[2])

    @property
    def on_dp(self) -> bool:
        """Whether it is sharded on dp."""
        return self.value.split(",")[-1] == "dp"


_TP_LAYOUT = re.compile(r"tp:([0-9]{1,4})(\+)?(,dp)?")


@dataclass(frozen=True)
class CompileOptions:
    """What a user asks of a compilation. OptionError for a value that cannot be."""

    memory_bytes: int | None = None
    """Budget per device, reserve included; None: the device's memory without a margin
    (ClusterSpec.budget_bytes)."""
    pins: Mapping[str, PinValue] = field(default_factory=dict)
    """Choices that the search must keep, by the names of PINS."""
    optimizer: str = "adamw"
    """What a plan charges for, in memory and time: of OPTIMIZERS. adamw_fused is
    torch.optim.AdamW(fused=True), which makes no tensors in a step; adafactor and muon look at
    whole parameters, and so get plans in which every rank has them (WHOLE_PARAMETERS). The pin
    `states` turns adamw into adamw_bf16 or adamw_8bit."""
    full_capture: bool = False
    """Trace every layer instead of proving equal ones equal."""
    seed: int = 0
    """Of the counter-based generator behind dropout."""
    precision: PrecisionChoice = "auto"
    value_checks: ValueChecks = "drop"
    fixed_inputs: tuple[str, ...] = ()
    """Names of integer inputs ("image_grid_thw") whose values are those of the example in every
    batch: Python may branch on them, and shapes may depend on them. A batch with other values is
    refused."""
    mode: ModeChoice = "auto"
    allow_offload: bool = False
    """Let offload of optimizer states, of parameters and of activations compete; else it is tried
    where nothing else fits, or what fits is slow for lack of memory."""
    allow_low_precision_states: bool = False
    """Let AdamW's states in bfloat16 and in 8 bits compete, which changes what is trained; else
    they are as the optimizer says."""
    custom_rules: tuple[CustomRule, ...] = ()
    """Rules of custom ops and autograd.Functions of the model's own (meshfold.register_rule)."""
    keep_checkpointing: bool = False
    """Recompute everything where the model asks for recomputation of some (torch.utils.checkpoint),
    as the pin recompute=full does; else the search chooses."""
    without_rules: tuple[str, ...] = ()
    """Pruning rules of the search (passes.one_pass.tree.PRUNING_RULES) to do without, for those who
    doubt one."""
    loss: Path | tuple[Path, ...] | None = None
    """The path of the loss in what the model returns ("loss", 1, "losses.box"); of several, joined
    by " + " or in a tuple, the sum is the loss. None: the one scalar that it can be."""
    outputs: str | tuple[Path, ...] = ()
    """Paths of tensors that steps return besides the loss, in the model's own structure; "all" for
    every one. Without any, steps return the loss alone."""
    sharded_outputs: bool = False
    """Leave outputs on the ranks that compute them, as DTensors, instead of gathering them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pins", MappingProxyType(dict(self.pins)))
        for name, value in self.pins.items():
            _check_pin(name, value)
        check_optimizer(self.optimizer, self.pins)
        states = self.states_pin
        if states and self.optimizer not in OF_STATES[states]:
            object.__setattr__(self, "optimizer", OF_STATES[states][0])
        object.__setattr__(self, "custom_rules", tuple(self.custom_rules))
        if isinstance(self.fixed_inputs, str):
            raise OptionError(
                f"fixed_inputs: {self.fixed_inputs!r} is a text; write a tuple of names"
            )
        object.__setattr__(self, "fixed_inputs", tuple(self.fixed_inputs))
        others = [rule for rule in self.custom_rules if not isinstance(rule, CustomRule)]
        if others:
            raise OptionError(
                f"custom_rules: {others[0]!r} is no rule; pass what meshfold.register_rule returns"
            )
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise OptionError(f"memory: {self.memory_bytes} bytes; write more than 0")
        if self.mode not in get_args(ModeChoice):
            raise OptionError(f"mode {self.mode!r} is unknown; write auto, eager or scheduled")
        if self.value_checks not in get_args(ValueChecks):
            raise OptionError(f"value_checks {self.value_checks!r} is unknown; write drop or run")
        if self.mode == "eager" and self.pins.get(MICRO_CHUNKS, 1) != 1:
            raise OptionError(
                f"pin {MICRO_CHUNKS}={self.pins[MICRO_CHUNKS]}: regions run in micro-chunks in "
                "mode scheduled alone; leave --mode eager out"
            )
        if self.precision not in get_args(PrecisionChoice):
            raise OptionError(
                f"precision {self.precision!r} is unknown; write auto, model, bf16 or fp16"
            )
        if self.sharded_outputs and not self.outputs:
            raise OptionError("sharded_outputs: there are no outputs; name some in outputs")

    @property
    def returns(self) -> Returns:
        """What of the model's return value steps compute."""
        wanted = self.outputs
        if wanted != ALL:
            wanted = paths_of((wanted,) if isinstance(wanted, str) else wanted)
        return Returns(summands_of(self.loss), wanted, sharded=self.sharded_outputs)

    def precision_on(self, cluster: ClusterSpec) -> Precision:
        """The precision on a cluster: "auto" resolved by its devices."""
        if self.precision != "auto":
            return self.precision
        narrow = COMPUTE_DTYPES["bf16"]
        peaks = [group.device.peak_flops_per_s for group in cluster.groups]
        is_faster = all(p.get(narrow, 0.0) >= LEAST_ADVANTAGE * p["float32"] for p in peaks)
        return "bf16" if is_faster else "model"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """In which the program may run, the simpler first; the search writes plans in the first."""
        if self.mode != "auto":
            return (self.mode,)
        return ("scheduled",) if self.pins.get(MICRO_CHUNKS, 1) != 1 else get_args(Mode)

    @property
    def captured_precision(self) -> Precision:
        """That a graph was captured in which these options came with: an "auto" that nobody
        resolved left it as it was."""
        return "model" if self.precision == "auto" else self.precision

    @property
    def strategy_pins(self) -> dict[str, PinValue]:
        """Pins about strategies, those that the optimizer needs among them."""
        matmuls = (MICRO_CHUNKS, CHAINED_CHUNKS, COLLECTIVE_MATMUL)
        others = (LAYOUT, BATCH_NORM, CHUNKED_LOSS, STATES, SLICES, *matmuls, *_SIZES)
        asked = {k: v for k, v in self.pins.items() if not k.startswith(others)}
        return {**asked, **WHOLE_PARAMETERS.get(self.optimizer, {})}

    @property
    def states_pin(self) -> StatesPrecision | None:
        """In what AdamW's states are to be kept."""
        return self.pins.get(STATES)  # type: ignore[return-value]

    @property
    def micro_chunks_pin(self) -> int | None:
        """Micro-chunks that regions are to run in."""
        value = self.pins.get(MICRO_CHUNKS)
        return None if value is None else int(value)

    @property
    def collective_matmul_pin(self) -> bool | None:
        """Whether matrix products are to overlap with their own collective."""
        value = self.pins.get(COLLECTIVE_MATMUL)
        return None if value is None else bool(value)

    @property
    def chunked_loss_pin(self) -> bool | None:
        """Whether losses are to make their logits in chunks."""
        value = self.pins.get(CHUNKED_LOSS)
        return None if value is None else bool(value)

    @property
    def slices_pin(self) -> int | None:
        """Slices of the parameter of the largest operator."""
        value = self.pins.get(SLICES)
        return None if value is None else int(value)

    @property
    def reduce_bucket_pin(self) -> int | None:
        """Bytes of the largest bucket of reductions of gradients."""
        return self._bytes_pin(REDUCE_BUCKET)

    @property
    def allgather_bucket_pin(self) -> int | None:
        """Bytes of the largest bucket of gathers of parameters."""
        return self._bytes_pin(ALLGATHER_BUCKET)

    @property
    def hierarchical_all_reduce_pin(self) -> int | None:
        """Bytes of the pieces in which all-reduces of gradients are to run hierarchically."""
        return self._bytes_pin(HIERARCHICAL_ALL_REDUCE)

    def _bytes_pin(self, name: str) -> int | None:
        value = self.pins.get(name)
        return value if value is None or isinstance(value, int) else parse_bytes(value)

    @property
    def layout_pins(self) -> tuple[LayoutPin, ...]:
        """Pins about parameters."""
        return tuple(
            LayoutPin(k.removeprefix(LAYOUT), str(v))
            for k, v in self.pins.items()
            if k.startswith(LAYOUT)
        )


def _check_pin(name: str, value: PinValue) -> None:
    if name.startswith(LAYOUT):
        LayoutPin(name.removeprefix(LAYOUT), str(value))
        return
    if name in _FORMER_PINS:
        raise OptionError(
            f"pin {name!r} is now {_FORMER_PINS[name]!r}; write --pin {_FORMER_PINS[name]}={value}"
        )
    if name not in PINS:
        raise OptionError(
            f"pin {name!r} is unknown; pins are {', '.join(PINS)} and {LAYOUT}PARAMETER"
        )
    if name in _SIZES:
        if value != 0 and not (isinstance(value, str) and is_bytes(value)):
            raise OptionError(
                f"pin {name}={value}: no size; write one, as 25MB, or 0 for none at all"
            )
        return
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise OptionError(f"pin {name}={value}: unknown; write {' or '.join(_WORDS[name])}")
        return
    if not isinstance(value, int):
        raise OptionError(f"pin {name}={value}: no number; write one")
    if name in (*_DEGREES, VIRTUAL_STAGES, MICRO_CHUNKS, SLICES) and value < 1:
        raise OptionError(f"pin {name}={value}: no degree; write 1 or more")
    if name == "zero" and value not in range(4):
        raise OptionError(f"pin zero={value}: no ZeRO level; write 0, 1, 2 or 3")
    if name in ("sp", COLLECTIVE_MATMUL, CHAINED_CHUNKS, CHUNKED_LOSS) and value not in (0, 1):
        raise OptionError(f"pin {name}={value}: unknown; write {name}=1 or {name}=0")
