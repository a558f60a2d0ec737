"""Least squares of any formula of a few positive factors."""

from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 200
STEP = 1e-4
"""Relative, of the numeric derivatives."""


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

    x = first
    now, damping = residual(x), 1e-2
    for _ in range(ROUNDS):
        columns = [(residual(x + STEP * unit) - now) / STEP for unit in np.eye(len(x))]
        jacobian = np.stack(columns, axis=1)
        square = jacobian.T @ jacobian
        damped = square + damping * (np.diag(np.diag(square)) + 1e-12 * np.eye(len(x)))
        move = np.clip(-np.linalg.solve(damped, jacobian.T @ now), -1.0, 1.0)
        then = residual(x + move)
        if then @ then < now @ now:
            is_done = now @ now - then @ then <= 1e-9 * (now @ now)
            x, now, damping = x + move, then, damping / 3
            if is_done:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 4
    return [float(v) for v in np.exp(x)]
