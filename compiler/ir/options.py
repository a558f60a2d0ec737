"""Options of a compilation. One frozen record; a test freezes its fields."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from meshfold.errors import OptionError
from meshfold.ir.strategy import Offload, Recompute
from meshfold.units import is_bytes, parse_bytes

PinValue = int | str

Precision = Literal["model", "bf16", "fp16"]
"""What ops compute in: what the model's own dtypes say; or 16 bits, with parameters kept, gradients
reduced and optimizer states in float32."""

COMPUTE_DTYPES: Mapping[Precision, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "float16"})
"""Names of the narrow dtypes."""

Mode = Literal["eager", "scheduled"]
"""How a rank's program runs: region graphs as written, with autograd's backward; or their pieces in
an order found with the cost model, in which collectives have compute behind them."""

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev"
]
"""In which order the stages of a pipeline run their microbatches; meshfold.cost_models.pipeline.schedules
says what each is."""

PIN_NAMES = (
    "dp",
    "ep",
    "cp",
    "tp",
    "zero",
    "sp",
    "recompute",
    "offload",
    "pp",
    "microbatches",
    "schedule",
    "chunks",
    "parts",
    "ring",
    "merge",
    "merge_gathers",
    "hierarchy",
)
"""What can be pinned: data, expert, context and tensor parallel degrees, ZeRO level, whether
activations between tensor-parallel ops are sequence-sharded (0 or 1), what is recomputed, what is
offloaded, devices that a pipeline goes over, parts in which a rank runs its share of the batch, the
order they run in, stages per device (more than one under interleaved schedules, zbv and dualpipev
only), in how many parts of its samples a region runs in mode scheduled, whether products take rows
of other ranks as they come round (0 or 1), up to which size reductions of gradients, and gathers of
parameters, are merged ("25MB"; 0: none are), and in pieces of which size all-reduces of
gradients run in phases, by node (0: none do). Beside these a parameter's layout, `layout:NAME`."""

_WORDS = {
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "schedule": get_args(ScheduleName),
}
"""Pins that are words, and what they can be."""

PARTS = "parts"
RING = "ring"
MERGE, MERGE_GATHERS = "merge", "merge_gathers"
HIERARCHY = "hierarchy"
LAYOUT = "layout:"
"""What the name of a pin starts with that is about a parameter's layout."""


@dataclass(frozen=True, slots=True)
class LayoutPin:
    """A parameter's stored layout, fixed. pattern: its name, with * for any part; value: as the
    user wrote it (meshfold.passes.region.pins says what it can be)."""

    pattern: str
    value: str

    def __post_init__(self) -> None:
        if self.value not in ("replicate", "dp") and not _TP_LAYOUT.fullmatch(self.value):
            raise OptionError(
                f"pin {self}: write replicate, dp, tp:DIM, tp:DIM+ or either with ,dp"
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


_TP_LAYOUT = re.compile(r"tp:(\d+)(\+)?(,dp)?")


@dataclass(frozen=True)
class CompileOptions:
    """memory_bytes: budget per device (None: the device's own usable memory).
    pins: choices that the search must keep. optimizer: what the memory model charges.
    full_capture: trace every layer instead of proving equal ones equal.
    seed: of the counter-based generator behind dropout. precision, mode: see Precision, Mode.
    allow_pipelines: let pipelines compete without a pin; their models train by train_step alone.
    allow_planned: offer what can be priced and planned, but not run yet, and pipelines.
    without_cuts: prunings of the search (passes.decision_tree.PRUNINGS) to do without; for those
    who doubt one."""

    memory_bytes: int | None = None
    pins: Mapping[str, PinValue] = field(default_factory=dict)
    optimizer: str = "adamw"
    full_capture: bool = False
    seed: int = 0
    precision: Precision = "model"
    mode: Mode = "eager"
    allow_pipelines: bool = False
    allow_planned: bool = False
    without_cuts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pins", MappingProxyType(dict(self.pins)))
        for name, value in self.pins.items():
            _check_pin(name, value)
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise OptionError(f"memory must be positive, got {self.memory_bytes} bytes")
        if self.optimizer not in ("adamw", "sgd"):
            raise OptionError(f"optimizer {self.optimizer!r} is unknown; write adamw or sgd")
        if self.mode not in get_args(Mode):
            raise OptionError(f"mode {self.mode!r} is unknown; write eager or scheduled")
        if self.mode == "eager" and self.pins.get(PARTS, 1) != 1:
            raise OptionError(
                f"pin {PARTS}={self.pins[PARTS]}: regions run in parts in mode scheduled alone; "
                "add --mode scheduled"
            )
        if self.precision not in get_args(Precision):
            raise OptionError(f"precision {self.precision!r} is unknown; write model, bf16 or fp16")

    @property
    def strategy_pins(self) -> dict[str, PinValue]:
        """Pins about strategies."""
        others = (LAYOUT, PARTS, RING, MERGE, MERGE_GATHERS, HIERARCHY)
        return {k: v for k, v in self.pins.items() if not k.startswith(others)}

    @property
    def parts_pin(self) -> int | None:
        """In how many parts regions are to run."""
        value = self.pins.get(PARTS)
        return None if value is None else int(value)

    @property
    def ring_pin(self) -> bool | None:
        """Whether products are to take rows as they come round."""
        value = self.pins.get(RING)
        return None if value is None else bool(value)

    @property
    def merge_pin(self) -> int | None:
        """Bytes up to which reductions of gradients are to be merged."""
        return self._bytes_pin(MERGE)

    @property
    def merge_gathers_pin(self) -> int | None:
        """Bytes up to which gathers of parameters are to be merged."""
        return self._bytes_pin(MERGE_GATHERS)

    @property
    def hierarchy_pin(self) -> int | None:
        """Bytes of the pieces in which all-reduces of gradients are to run in phases."""
        return self._bytes_pin(HIERARCHY)

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
    if name not in PIN_NAMES:
        raise OptionError(
            f"pin {name!r} is unknown; pins are {', '.join(PIN_NAMES)} and {LAYOUT}PARAMETER"
        )
    if name in (MERGE, MERGE_GATHERS, HIERARCHY):
        if value != 0 and not (isinstance(value, str) and is_bytes(value)):
            raise OptionError(f"pin {name}={value}: write a size, as 25MB, or 0 for none at all")
        return
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise OptionError(f"pin {name}={value}: write {' or '.join(_WORDS[name])}")
        return
    if not isinstance(value, int):
        raise OptionError(f"pin {name}={value}: write a number")
    if name in ("dp", "ep", "cp", "tp", "pp", "microbatches", "chunks", PARTS) and value < 1:
        raise OptionError(f"pin {name}={value}: a degree is 1 or more")
    if name == "zero" and value not in range(4):
        raise OptionError(f"pin zero={value}: ZeRO levels are 0, 1, 2 and 3")
    if name in ("sp", RING) and value not in (0, 1):
        raise OptionError(f"pin {name}={value}: write {name}=1 or {name}=0")
