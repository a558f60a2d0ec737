"""Pins about strategies: which strategies keep them, and which one cannot be kept."""

from collections.abc import Iterable, Mapping, Sequence

from meshfold.ir.options import PinValue
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.pruning import divisors


def pinned_values(strategy: UniformStrategy) -> dict[str, PinValue]:
    """What the pins of CompileOptions say about a strategy; it has no schedule, pipelines have."""
    return {
        "dp": strategy.dp,
        "ep": strategy.ep,
        "cp": strategy.cp,
        "tp": strategy.tp,
        "zero": strategy.zero,
        "dp_shard": strategy.dp_shard or strategy.dp,
        "sp": int(strategy.sequence_parallel),
        "recompute": strategy.recompute,
        "offload": strategy.offload,
        "pp": strategy.pp,
        "microbatches": strategy.microbatches,
        "schedule": "",
        "virtual_stages": 1,
    }


def keeps_pins(strategy: UniformStrategy, pins: Mapping[str, PinValue]) -> bool:
    """Whether a strategy has every pinned value."""
    values = pinned_values(strategy)
    return all(values[name] == wanted for name, wanted in pins.items())


def broken_pin(
    everything: Sequence[UniformStrategy], pins: Mapping[str, PinValue], num_devices: int
) -> str:
    """The pin that no strategy meets, alone or with the pins before it."""
    left = everything
    for name, wanted in pins.items():
        remaining = [strategy for strategy in left if keeps_pins(strategy, {name: wanted})]
        if not remaining:
            offered = dict.fromkeys(pinned_values(strategy)[name] for strategy in left)
            if name == "dp_shard":
                offered = dict.fromkeys(d for s in left for d in divisors(s.dp)[1:] or [1])
            return (
                f"pin {name}={wanted} cannot be kept on {num_devices} devices"
                f"{' with the other pins' if len(left) < len(everything) else ''}; "
                f"{name} can be {', '.join(map(str, _sorted(offered)))}"
            )
        left = remaining
    raise AssertionError("every pin is met")


def _sorted(values: Iterable[PinValue]) -> list[PinValue]:
    """Numbers by size, words in the order given."""
    found = list(values)
    return sorted(found, key=lambda v: v if isinstance(v, int) else 0)
