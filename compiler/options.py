"""Options of a compilation. One frozen record; a test freezes its fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshfold.errors import OptionError

PIN_NAMES = ("dp", "tp", "zero", "sp")
"""What can be pinned: data and tensor parallel degrees, ZeRO level (0 or 3), and whether
activations between tensor-parallel ops are sequence-sharded (0 or 1)."""


@dataclass(frozen=True)
class CompileOptions:
    """memory_bytes: budget per device (None: the device's own usable memory).
    pins: choices that the search must keep. optimizer: what the memory model charges.
    full_capture: trace every layer instead of proving equal ones equal.
    seed: of the counter-based generator behind dropout."""

    memory_bytes: int | None = None
    pins: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = "adamw"
    full_capture: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pins", MappingProxyType(dict(self.pins)))
        for name, value in self.pins.items():
            if name not in PIN_NAMES:
                raise OptionError(f"pin {name!r} is unknown; pins are {', '.join(PIN_NAMES)}")
            if name in ("dp", "tp") and value < 1:
                raise OptionError(f"pin {name}={value}: a degree is 1 or more")
            if name == "zero" and value not in (0, 3):
                raise OptionError(f"pin zero={value}: this version plans ZeRO levels 0 and 3")
            if name == "sp" and value not in (0, 1):
                raise OptionError(f"pin sp={value}: write sp=1 or sp=0")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise OptionError(f"memory must be positive, got {self.memory_bytes} bytes")
        if self.optimizer not in ("adamw", "sgd"):
            raise OptionError(f"optimizer {self.optimizer!r} is unknown; write adamw or sgd")
