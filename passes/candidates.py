"""The uniform strategies worth pricing: one choice of degrees, ZeRO level and sequence parallelism
for the whole model, under the user's pins. Every strategy that is left out is counted by reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshfold.errors import OptionError
from meshfold.mesh import Mesh
from meshfold.strategy import UniformStrategy

PINNED = "contradicts a pin"
BATCH = "batch does not divide over dp"


@dataclass(frozen=True)
class Candidates:
    """strategies in a fixed order; cuts: reason -> number of strategies."""

    strategies: tuple[UniformStrategy, ...]
    cuts: Mapping[str, int]


def enumerate_candidates(
    meshes: Iterable[Mesh], pins: Mapping[str, int], batch_size: int
) -> Candidates:
    """Every UniformStrategy on `meshes` that keeps the pins and divides the batch.

    ZeRO-3 is a choice where dp > 1, sequence parallelism where tp > 1. Raises OptionError naming
    the pin when none is left.
    """
    everything = [s for mesh in meshes for s in _on_mesh(mesh)]
    kept = [s for s in everything if _keeps(s, pins)]
    if not kept:
        raise OptionError(_why_not(everything, pins))
    dividing = [s for s in kept if batch_size % s.dp == 0]
    if not dividing:
        degrees = ", ".join(f"dp={d}" for d in sorted({s.dp for s in kept}))
        raise OptionError(
            f"a batch of {batch_size} does not divide over {degrees}; "
            f"change the batch or pin another dp"
        )
    cuts = Counter({PINNED: len(everything) - len(kept), BATCH: len(kept) - len(dividing)})
    return Candidates(tuple(dividing), {k: n for k, n in sorted(cuts.items()) if n})


def degrees(mesh: Mesh) -> tuple[int, int]:
    """(dp, tp) of a mesh, 1 for an axis it does not have."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    return sizes.get("dp", 1), sizes.get("tp", 1)


def _on_mesh(mesh: Mesh) -> list[UniformStrategy]:
    dp, tp = degrees(mesh)
    return [
        UniformStrategy(dp=dp, tp=tp, zero=zero, sequence_parallel=sp)
        for zero in ((0, 3) if dp > 1 else (0,))
        for sp in ((False, True) if tp > 1 else (False,))
    ]


def _values(strategy: UniformStrategy) -> dict[str, int]:
    return {
        "dp": strategy.dp,
        "tp": strategy.tp,
        "zero": strategy.zero,
        "sp": int(strategy.sequence_parallel),
    }


def _keeps(strategy: UniformStrategy, pins: Mapping[str, int]) -> bool:
    values = _values(strategy)
    return all(values[name] == wanted for name, wanted in pins.items())


def _why_not(everything: list[UniformStrategy], pins: Mapping[str, int]) -> str:
    """The pin that no strategy can keep, alone or with the pins before it."""
    num_devices = everything[0].dp * everything[0].tp
    left = everything
    for name, wanted in pins.items():
        remaining = [s for s in left if _keeps(s, {name: wanted})]
        if not remaining:
            offered = sorted({_values(s)[name] for s in left})
            choices = ", ".join(str(v) for v in offered)
            return (
                f"pin {name}={wanted} cannot be kept on {num_devices} devices"
                f"{' with the other pins' if left != everything else ''}; {name} can be {choices}"
            )
        left = remaining
    raise AssertionError("every pin was kept")
