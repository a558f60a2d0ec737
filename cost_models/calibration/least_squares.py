"""Least squares of any formula of a few positive factors."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import least_squares

STEP = 1e-4
"""Of the numeric derivatives, on logarithms."""


def positive(
    errors: Callable[[Sequence[float]], Sequence[float]],
    start: Sequence[float],
    pull: float = 0.0,
) -> list[float]:
    """Factors > 0 with the least sum of squares of `errors(factors)`, by Levenberg-Marquardt on
    their logarithms from `start`. pull: of pull * log(factor / start) as well, so that a factor
    that hardly shows does not run away."""
    first = np.log(np.asarray(start, dtype=float))

    def residual(logs: np.ndarray) -> np.ndarray:
        found = np.asarray(errors([float(x) for x in np.exp(logs)]), dtype=float)
        return np.concatenate([found, pull * (logs - first)])

    found = least_squares(residual, first, method="lm", diff_step=STEP)
    return [float(v) for v in np.exp(found.x)]
