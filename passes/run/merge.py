"""Core enumeration for tables with many almost equal strategies: exchanges pruned by dominance.

When dozens of strategies have hardly any regret, the multisets of exchanges below the gap are too
many to list (passes/run/core.py), but most of them are beaten by another that frees as many bytes
in less time. So exchanges are taken up one by one, by regret, and only undominated *states* are
kept:

    state = (layers exchanged per group, free bytes, seconds, regret)
    for each exchange e with regret below the gap:
        S' = states reached from S by one, two, .. more of e
        S  = undominated of S and S'                               (_undominated)

State a dominates b if it has exchanged as many layers of every group, has at least as many free
bytes and takes no longer. Every new state is filled up with fillers (`_filled_s`), which lowers the
gap as the search goes on. The number of states
is bounded by the staircase of (bytes, seconds), not by the number of multisets; layers are
exchanged one at a time, so it is the size of the core that counts, not the number of layers.
(Pisinger, A minimal algorithm for the multiple-choice knapsack problem, 1995, for knapsacks.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshfold.passes.run.hull import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Exchanges of one strategy candidate of a layer for another: parallel arrays."""

    regret_s: FloatArray
    group: IntArray
    extra_bytes: IntArray
    extra_s: FloatArray


@dataclass(frozen=True, eq=False)
class Filling:
    """The start of every state and what fills it up."""

    counts: IntArray
    """Layers per group."""

    free_bytes: int
    """Unused bytes of the plan of bases alone."""

    time_s: float
    """Seconds of the plan of bases alone."""

    group: int
    """Group of the filler, -1 without one."""

    filler_bytes: int
    """Bytes that one filler takes."""

    filler_s: float
    """Seconds that one filler adds: negative."""


@dataclass(frozen=True, eq=False)
class MergeResult:
    """The best plan below the limit."""

    chosen: tuple[int, ...] | None
    """Its exchanges; None when there is none."""

    states: int
    """How many were seen in all."""

    capped: bool
    """The search stopped at its cap."""


@dataclass(frozen=True, eq=False)
class _States:
    """Parallel arrays over the states."""

    free_bytes: IntArray
    time_s: FloatArray
    regret_s: FloatArray
    used: IntArray
    """[state, group] -> exchanged layers."""

    numbers: IntArray
    """Index into the log."""

    def take(self, indices: IntArray) -> "_States":
        """The states at these indices."""
        return _States(
            self.free_bytes[indices],
            self.time_s[indices],
            self.regret_s[indices],
            self.used[indices],
            self.numbers[indices],
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
        """The exchanges on the way to a state, from the first one on."""
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
        np.array([filling.time_s]),
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
            last = _exchanged(reached[-1], exchanges, index, filling.counts, log)
            # No state dominates one of less regret, so regret goes first: it is cheaper to ask.
            last = _undominated(last.take(np.flatnonzero(dual_s + last.regret_s < limit_s)))
            if not len(last.numbers):
                break
            if log.size > state_cap:
                return MergeResult(log.chosen(best) if best >= 0 else None, log.size, True)
            values = _filled_s(last, filling)
            least = int(np.argmin(values))
            if values[least] < limit_s:
                limit_s, best = float(values[least]), int(last.numbers[least])
            reached.append(last)
        if len(reached) > 1:
            states = _joined(reached)
            states = _undominated(states.take(np.flatnonzero(dual_s + states.regret_s < limit_s)))
    return MergeResult(log.chosen(best) if best >= 0 else None, log.size, False)


def _exchanged(
    states: _States, exchanges: Exchanges, index: int, counts: IntArray, log: _Log
) -> _States:
    """Every state with one more of an exchange, where its group has a layer left."""
    group = exchanges.group[index]
    states = states.take(np.flatnonzero(states.used[:, group] < counts[group]))
    used = states.used.copy()
    used[:, group] += 1
    return _States(
        states.free_bytes - exchanges.extra_bytes[index],
        states.time_s + exchanges.extra_s[index],
        states.regret_s + exchanges.regret_s[index],
        used,
        log.add(states.numbers, index),
    )


def _joined(reached: Sequence[_States]) -> _States:
    return _States(
        np.concatenate([states.free_bytes for states in reached]),
        np.concatenate([states.time_s for states in reached]),
        np.concatenate([states.regret_s for states in reached]),
        np.concatenate([states.used for states in reached]),
        np.concatenate([states.numbers for states in reached]),
    )


def _undominated(states: _States) -> _States:
    """States that no other dominates; of equal ones one is retained."""
    if len(states.numbers) < 2:
        return states
    used = states.used[:, states.used.any(axis=0)]
    order = np.lexsort((states.time_s, -states.free_bytes, *used.T))
    used = used[order]
    block = np.concatenate(([0], np.cumsum(np.any(used[1:] != used[:-1], axis=1))))
    # Ranks of times, lowered from block to block, so that the running least starts anew in each.
    ranks = np.unique(states.time_s[order], return_inverse=True)[1]
    keys = ranks - block * len(order)
    before = np.concatenate(([len(order)], np.minimum.accumulate(keys)[:-1]))
    return states.take(order[keys < before])


def _filled_s(states: _States, filling: Filling) -> FloatArray:
    """Seconds of every state with all fillers that fit; infinite if it does not fit itself."""
    fits = states.free_bytes >= 0
    if filling.group < 0:
        return np.where(fits, states.time_s, np.inf)
    left = filling.counts[filling.group] - states.used[:, filling.group]
    fillers = np.minimum(left, states.free_bytes // filling.filler_bytes)
    return np.where(fits, states.time_s + fillers * filling.filler_s, np.inf)
