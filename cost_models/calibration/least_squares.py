"""Two small solvers of least squares: linear with factors of 0 or more, and of a few positive
factors of any formula."""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

ROUNDS = 200
STEP = 1e-4
"""Relative, of the numeric derivatives."""


def non_negative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 with the least |rows x - wanted|^2.

    Exact: of all sets of columns the best whose plain solution has no negative factor; there are
    few columns. rows: [n, m].
    """
    a, b = np.asarray(rows, dtype=float), np.asarray(wanted, dtype=float)
    num_columns = a.shape[1]
    best, best_error = np.zeros(num_columns), float(b @ b)
    for count in range(1, num_columns + 1):
        for columns in combinations(range(num_columns), count):
            part = a[:, columns]
            scale = np.linalg.norm(part, axis=0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(part / scale, b, rcond=None)[0] / scale
            error = float(np.sum((part @ found - b) ** 2))
            if (found >= 0).all() and error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(num_columns), error
                best[list(columns)] = found
    return [float(x) for x in best]


def positive(
    errors: Callable[[Sequence[float]], Sequence[float]], start: Sequence[float]
) -> list[float]:
    """Factors > 0 with the least sum of squares of `errors(factors)`, by Levenberg-Marquardt on
    their logarithms from `start`."""

    def residual(logs: np.ndarray) -> np.ndarray:
        return np.asarray(errors([float(x) for x in np.exp(logs)]), dtype=float)

    x = np.log(np.asarray(start, dtype=float))
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
