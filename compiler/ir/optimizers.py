"""Optimizers that plans know by name, and what each excludes. What they keep for a parameter and
what their step costs is in meshfold.cost_models.op_costs.optimizers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from meshfold.errors import OptionError

OPTIMIZERS = (
    "adamw",
    "adamw_fused",
    "adamw_bf16",
    "adamw_8bit",
    "adafactor",
    "muon",
    "momentum",
    "sgd",
)
"""Of CompileOptions.optimizer."""

STATES = "states"
"""The pin about the precision of states."""

StatesPrecision = Literal["full", "bf16", "int8"]
"""In what AdamW's states are kept: in the dtype of the parameters; in bfloat16; in 8 bits, blocks
of them with a maximum each (meshfold.LowPrecisionStates)."""

OF_STATES: Mapping[StatesPrecision, tuple[str, ...]] = MappingProxyType(
    {"full": ("adamw", "adamw_fused"), "bf16": ("adamw_bf16",), "int8": ("adamw_8bit",)}
)
"""AdamW by the precision of its states."""

_WHOLE: Mapping[str, int | str] = MappingProxyType({"zero": 0, "tp": 1, "ep": 1, "pp": 1})

WHOLE_PARAMETERS: Mapping[str, Mapping[str, int | str]] = MappingProxyType(
    {"adafactor": _WHOLE, "muon": _WHOLE}
)
"""Optimizers that look at several numbers of a gradient at once, and the pins under which every
rank has all of every parameter."""


def check_optimizer(name: str, pins: Mapping[str, int | str]) -> None:
    """Raises OptionError for an optimizer that is unknown, or that pins exclude."""
    if name not in OPTIMIZERS:
        raise OptionError(
            f"optimizer {name!r} is unknown; write {', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}"
        )
    states = pins.get(STATES)
    if states and not any(name in OF_STATES[of] for of in OF_STATES if of in ("full", states)):
        raise OptionError(
            f"pin {STATES}={states}: optimizer {name} has no such states; write optimizer adamw"
        )
    needs = WHOLE_PARAMETERS.get(name, {})
    against = [f"{k}={v}" for k, v in pins.items() if needs.get(k, v) != v]
    against += [f"{k}={v}" for k, v in pins.items() if needs and _is_shard(k, v)]
    if against:
        raise OptionError(
            f"pin {against[0]}: optimizer {name} looks at whole parameters, of which this leaves a "
            "rank a part; leave the pin out, or write adamw"
        )


def _is_shard(name: str, value: int | str) -> bool:
    """Whether a pin is of a layout that shards a parameter."""
    return name.startswith("layout:") and value != "replicate"
