"""What single passes of a schedule are worth: the linear program over all of them, whose prices are
a mix of chains.

With e_a the end of pass a, t_a(x) its seconds at the layers x and h the seconds of a transfer

    min z   over   e_b + h + t_a(x) <= e_a          b the input of a, or the pass before it
                   e_a + sync_s(x) <= z             a the last pass of a device
                   x as fluid_paths.py has it

the price of each arc (b, a) is a share of the step that waits for it. Prices of a solver add up to
rounding only; so they are read as shares. From the ends of the devices back to the start of the
step, every pass hands what has reached it on to the passes before it, in proportion to the prices
of the arcs: whatever the prices are, the result is a mix of chains that exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix, hstack, vstack

from meshfold.cost_models.pipeline.actions import ActionLists, Pass, StageAction
from meshfold.passes.run.hull import FloatArray, IntArray

Rows = tuple[FloatArray, FloatArray]
"""(left side by variable, right side)."""


@dataclass(frozen=True, eq=False)
class PathMix:
    """Chains of passes with shares that add up to one. passes: how often each stage's passes of a
    kind are on them; hops: each transfer between stages; ends: on which device they end."""

    passes: Mapping[Pass, FloatArray]
    hops: FloatArray
    ends: FloatArray


@dataclass(frozen=True, eq=False)
class PriceProblem:
    """stage: of each variable; pass_s: seconds of a pass of each kind; sync_s: by device and
    variable; hop_s: by stage boundary; at_most, exactly: what holds for the variables."""

    stage: IntArray
    pass_s: Mapping[Pass, FloatArray]
    sync_s: FloatArray
    hop_s: FloatArray
    at_most: Rows
    exactly: Rows


@dataclass(frozen=True, eq=False)
class _Arcs:
    """(pass before or -1, pass, stage boundary that is crossed or -1) by number."""

    before: IntArray
    after: IntArray
    hop: IntArray


def priced_mix(actions: ActionLists, problem: PriceProblem) -> PathMix | None:
    """The mix of chains that decides the least step; None where the solver has no answer."""
    passes = [action for device in actions for action in device]
    arcs = _arcs(actions, passes)
    last = np.cumsum([len(device) for device in actions]) - 1
    prices = _prices(passes, arcs, last, problem)
    if prices is None:
        return None
    of_arcs, of_ends = prices
    if of_ends.sum() <= 0.0:
        return None
    ends = of_ends / of_ends.sum()
    reached = np.zeros(len(passes))
    reached[last] = ends
    hops = np.zeros(len(problem.hop_s))
    into = _arcs_into(arcs, len(passes))
    for at in _latest_first(arcs, len(passes)):
        own = into[at]
        shares = of_arcs[own] if of_arcs[own].sum() > 0.0 else np.ones(len(own))
        shares = reached[at] * shares / shares.sum()
        for arc, share in zip(own, shares.tolist(), strict=True):
            if arcs.before[arc] >= 0:
                reached[arcs.before[arc]] += share
            if arcs.hop[arc] >= 0:
                hops[arcs.hop[arc]] += share
    num_stages = len(problem.hop_s) + 1
    by_kind = {kind: np.zeros(num_stages) for kind in Pass}
    for action, share in zip(passes, reached.tolist(), strict=True):
        by_kind[action.kind][action.stage] += share
    return PathMix(by_kind, hops, ends)


def _arcs(actions: ActionLists, passes: list[StageAction]) -> _Arcs:
    number = {action: at for at, action in enumerate(passes)}
    num_stages = 1 + max(action.stage for action in passes)
    rows: list[tuple[int, int, int]] = []
    for device in actions:
        for place, action in enumerate(device):
            own = number[action]
            before = [(number[device[place - 1]], own, -1)] if place else []
            stage, kind = action.stage, action.kind
            step = {Pass.FORWARD: -1, Pass.BACKWARD: 1}.get(kind, 0)
            if step and 0 <= stage + step < num_stages:
                other = number[StageAction(stage + step, kind, action.microbatch)]
                before.append((other, own, min(stage, stage + step)))
            rows += before or [(-1, own, -1)]
    return _Arcs(*np.array(rows).T)


def _arcs_into(arcs: _Arcs, num_passes: int) -> list[list[int]]:
    into: list[list[int]] = [[] for _ in range(num_passes)]
    for arc, after in enumerate(arcs.after.tolist()):
        into[after].append(arc)
    return into


def _latest_first(arcs: _Arcs, num_passes: int) -> list[int]:
    """All passes, each before those that it waits for."""
    waiting = np.bincount(arcs.before[arcs.before >= 0], minlength=num_passes)
    into = _arcs_into(arcs, num_passes)
    ready = np.flatnonzero(waiting == 0).tolist()
    order = []
    while ready:
        at = ready.pop()
        order.append(at)
        for arc in into[at]:
            before = int(arcs.before[arc])
            if before >= 0:
                waiting[before] -= 1
                if waiting[before] == 0:
                    ready.append(before)
    return order


def _prices(
    passes: list[StageAction], arcs: _Arcs, last: IntArray, problem: PriceProblem
) -> tuple[FloatArray, FloatArray] | None:
    """(of arcs, of the devices' ends); None where the solver has no answer."""
    num_columns, num_devices = len(problem.stage), len(last)
    ones, devices = np.ones(len(arcs.after)), np.arange(num_devices)
    has_before = arcs.before >= 0
    of_ends = coo_matrix(
        (
            np.concatenate([-ones, ones[has_before]]),
            (
                np.concatenate([np.arange(len(ones)), np.flatnonzero(has_before)]),
                np.concatenate([arcs.after, arcs.before[has_before]]),
            ),
        ),
        shape=(len(ones), len(passes)),
    )
    of_last = coo_matrix((np.ones(num_devices), (devices, last)), (num_devices, len(passes)))
    scale = max(float(s.max(initial=0.0)) for s in problem.pass_s.values()) * len(passes)
    if scale == 0.0:
        return None
    hop_s = np.where(arcs.hop >= 0, np.append(problem.hop_s, 0.0)[arcs.hop], 0.0)
    at_most, limits = problem.at_most
    exactly, numbers = problem.exactly
    others = csr_matrix((len(at_most), len(passes) + 1))
    rows = [
        hstack([_pass_seconds(passes, arcs, problem) / scale, of_ends, csr_matrix((len(ones), 1))]),
        hstack(
            [csr_matrix(problem.sync_s / scale), of_last, csr_matrix(-np.ones((num_devices, 1)))]
        ),
        hstack([csr_matrix(at_most), others]),
    ]
    objective = np.zeros(num_columns + len(passes) + 1)
    objective[-1] = 1.0
    answer = linprog(
        objective,
        A_ub=vstack(rows).tocsr(),
        b_ub=np.concatenate([-hop_s / scale, np.zeros(num_devices), limits]),
        A_eq=hstack([csr_matrix(exactly), csr_matrix((len(exactly), len(passes) + 1))]),
        b_eq=numbers,
        method="highs-ipm",
    )
    if answer.x is None:
        return None
    prices = np.maximum(0.0, -answer.ineqlin.marginals)
    return prices[: len(ones)], prices[len(ones) : len(ones) + num_devices]


def _pass_seconds(passes: list[StageAction], arcs: _Arcs, problem: PriceProblem) -> coo_matrix:
    """Seconds of the pass after each arc, by variable."""
    of_stage: dict[int, IntArray] = {
        s: np.flatnonzero(problem.stage == s) for s in range(len(problem.hop_s) + 1)
    }
    groups: dict[tuple[Pass, int], list[int]] = {}
    for arc, after in enumerate(arcs.after.tolist()):
        groups.setdefault((passes[after].kind, passes[after].stage), []).append(arc)
    values, rows, columns = [], [], []
    for (kind, stage), own in groups.items():
        variables = of_stage[stage]
        values.append(np.tile(problem.pass_s[kind][variables], len(own)))
        rows.append(np.repeat(own, len(variables)))
        columns.append(np.tile(variables, len(own)))
    entries = (np.concatenate(rows), np.concatenate(columns))
    return coo_matrix((np.concatenate(values), entries), (len(arcs.after), len(problem.stage)))
