"""Core enumeration for tables with many almost equal strategies: exchanges merged by dominance.

When dozens of strategies have hardly any regret, the multisets of exchanges below the gap are too
many to list (`run_core`), but most of them are beaten by another that frees as many bytes in less
time. So exchanges are taken up one by one, by regret, and only undominated *states* are kept:

    state = (layers exchanged per part, free bytes, value of each form, regret)
    for each exchange e with regret below the gap:
        S' = states reached from S by one, two, .. more of e
        S  = undominated of S and S'                               (_undominated)

State a dominates b if it has exchanged as many layers of every part, has at least as many free
bytes and no form of the objective (seconds, a maximum of forms) is larger. Every new state is
filled up with fillers (`_filled`), which lowers the gap as the search goes on. The number of states
is bounded by the staircase of (bytes, seconds), not by the number of multisets; layers are
exchanged one at a time, so it is the size of the core that counts, not the number of layers.
(Pisinger, A minimal algorithm for the multiple-choice knapsack problem, 1995, for knapsacks.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshfold.passes.run.hull import FloatArray, IntArray

MOST_COMPARED = 1500
"""States of several forms that are compared pair by pair; more are kept without comparing."""


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Per exchange: regret_s, part, extra_bytes and extra_s (exchange, form)."""

    regret_s: FloatArray
    part: IntArray
    extra_bytes: IntArray
    extra_s: FloatArray


@dataclass(frozen=True, eq=False)
class Filling:
    """The start of every state and what fills it up.

    counts: layers per part. free_bytes, forms_s (with constants): of the plan of bases alone.
    part: of the filler, -1 without one; step_bytes, step_s: of one filler, per form.
    """

    counts: IntArray
    free_bytes: int
    forms_s: FloatArray
    part: int
    step_bytes: int
    step_s: FloatArray


@dataclass(frozen=True, eq=False)
class MergeResult:
    """chosen: the exchanges of the best plan below the limit; None when there is none.

    states: how many were kept in all. capped: the search stopped at its cap.
    """

    chosen: tuple[int, ...] | None
    states: int
    capped: bool


@dataclass(frozen=True, eq=False)
class _States:
    """Parallel arrays; used: exchanged layers (state, part); numbers: index into the log."""

    free_bytes: IntArray
    forms_s: FloatArray
    regret_s: FloatArray
    used: IntArray
    numbers: IntArray

    def take(self, kept: IntArray) -> "_States":
        """The states at these indices."""
        return _States(
            self.free_bytes[kept],
            self.forms_s[kept],
            self.regret_s[kept],
            self.used[kept],
            self.numbers[kept],
        )


class _Log:
    """How every state was reached: from which one, by which exchange."""

    def __init__(self) -> None:
        self.parents: list[IntArray] = [np.full(1, -1)]
        self.exchanges: list[IntArray] = [np.full(1, -1)]
        self.size = 1

    def add(self, parents: IntArray, exchange: int) -> IntArray:
        """Numbers of new states."""
        self.parents.append(parents)
        self.exchanges.append(np.full(len(parents), exchange))
        self.size += len(parents)
        return np.arange(self.size - len(parents), self.size)

    def chosen(self, number: int) -> tuple[int, ...]:
        """The exchanges on the way to a state, in the order they were made."""
        parents, exchanges = np.concatenate(self.parents), np.concatenate(self.exchanges)
        found = []
        while number > 0:
            found.append(int(exchanges[number]))
            number = int(parents[number])
        return tuple(reversed(found))


def merge_exchanges(
    exchanges: Exchanges, filling: Filling, *, dual_s: float, limit_s: float, state_cap: int
) -> MergeResult:
    """The best plan with value below limit_s.

    exchanges: by increasing regret. dual_s + regret bounds every plan of a state and of the states
    reached from it.
    """
    log = _Log()
    states = _States(
        np.array([filling.free_bytes]),
        filling.forms_s[None, :],
        np.zeros(1),
        np.zeros((1, len(filling.counts)), np.int64),
        np.zeros(1, np.int64),
    )
    best = -1
    for index, regret_s in enumerate(exchanges.regret_s.tolist()):
        if dual_s + regret_s >= limit_s:
            break
        reached = [states]
        while True:
            last = _undominated(_exchanged(reached[-1], exchanges, index, filling.counts, log))
            last = last.take(np.flatnonzero(dual_s + last.regret_s < limit_s))
            if not len(last.numbers):
                break
            if log.size > state_cap:
                return MergeResult(log.chosen(best) if best >= 0 else None, log.size, True)
            values = _filled(last, filling)
            least = int(np.argmin(values))
            if values[least] < limit_s:
                limit_s, best = float(values[least]), int(last.numbers[least])
            reached.append(last)
        states = _undominated(_joined(reached))
        states = states.take(np.flatnonzero(dual_s + states.regret_s < limit_s))
    return MergeResult(log.chosen(best) if best >= 0 else None, log.size, False)


def _exchanged(
    states: _States, exchanges: Exchanges, index: int, counts: IntArray, log: _Log
) -> _States:
    """Every state with one more of an exchange, where its part has a layer left."""
    part = exchanges.part[index]
    states = states.take(np.flatnonzero(states.used[:, part] < counts[part]))
    used = states.used.copy()
    used[:, part] += 1
    return _States(
        states.free_bytes - exchanges.extra_bytes[index],
        states.forms_s + exchanges.extra_s[index],
        states.regret_s + exchanges.regret_s[index],
        used,
        log.add(states.numbers, index),
    )


def _joined(parts: Sequence[_States]) -> _States:
    return _States(
        np.concatenate([part.free_bytes for part in parts]),
        np.concatenate([part.forms_s for part in parts]),
        np.concatenate([part.regret_s for part in parts]),
        np.concatenate([part.used for part in parts]),
        np.concatenate([part.numbers for part in parts]),
    )


def _undominated(states: _States) -> _States:
    """States that no other dominates; of equal ones one stays."""
    if len(states.numbers) < 2:
        return states
    if states.forms_s.shape[1] > 1:
        return states if len(states.numbers) > MOST_COMPARED else _undominated_pairs(states)
    times = states.forms_s[:, 0]
    order = np.lexsort((times, -states.free_bytes, *states.used.T))
    used = states.used[order]
    group = np.concatenate(([0], np.cumsum(np.any(used[1:] != used[:-1], axis=1))))
    # Ranks of times, lowered from group to group, so that the running least starts anew in each.
    ranks = np.unique(times[order], return_inverse=True)[1]
    keys = ranks - group * len(order)
    before = np.concatenate(([len(order)], np.minimum.accumulate(keys)[:-1]))
    return states.take(order[keys < before])


def _undominated_pairs(states: _States) -> _States:
    """The same for several forms, by comparing all pairs."""
    order = np.lexsort((*states.forms_s.T, -states.free_bytes))
    states = states.take(order)
    dominates = states.free_bytes[:, None] >= states.free_bytes
    columns = [*states.forms_s.T, *states.used.T]
    for column in columns:
        dominates &= column[:, None] <= column
    earlier = np.triu(np.ones_like(dominates), 1)
    mutual = dominates & dominates.T
    beaten = (dominates & (~mutual | earlier)).any(axis=0)
    return states.take(np.flatnonzero(~beaten))


def _filled(states: _States, filling: Filling) -> FloatArray:
    """The objective of every state with its best number of fillers; infinite if it does not fit."""
    fits = states.free_bytes >= 0
    if filling.part < 0:
        return np.where(fits, states.forms_s.max(axis=1), np.inf)
    left = filling.counts[filling.part] - states.used[:, filling.part]
    high = np.where(fits, np.minimum(left, states.free_bytes // filling.step_bytes), 0)
    low = np.zeros_like(high)

    def value(fillers: IntArray) -> FloatArray:
        return np.asarray((states.forms_s + fillers[:, None] * filling.step_s).max(axis=1))

    if len(filling.step_s) == 1:
        return np.where(fits, np.minimum(value(low), value(high)), np.inf)
    while np.any(low < high):
        middle = (low + high) // 2
        falls = (value(middle + 1) < value(middle)) & (low < high)
        low, high = np.where(falls, middle + 1, low), np.where(falls, high, middle)
    return np.where(fits, value(low), np.inf)
