"""How far a fit is off what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Residual:
    """Relative errors of fitted seconds, fitted / measured - 1."""

    num_points: int
    rms: float
    median: float
    """Of absolute values."""
    worst: float
    worst_name: str


def residual(errors: Mapping[str, float]) -> Residual:
    """errors: by the names of one point or more."""
    name = max(errors, key=lambda n: abs(errors[n]))
    absolute = [abs(e) for e in errors.values()]
    rms = (sum(e * e for e in absolute) / len(absolute)) ** 0.5
    return Residual(len(errors), rms, median(absolute), errors[name], name)
