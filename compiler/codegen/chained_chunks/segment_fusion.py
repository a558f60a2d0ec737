"""Segments that a schedule leaves together in both directions, to be run as one.

The segments of a chained region are short while its order is looked for
(meshfold.codegen.schedule.list_scheduling). Each costs the host its time, forward and backward, so
those that follow each other at once, and whose backwards do, the other way round, are fused.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

from meshfold.codegen.program.region_schedule import ActionKind, RegionAction, SegmentedGraph

IntervalAction = tuple[RegionAction, bool]
"""An action, and whether it is in the epilogue. In order they are an initiation interval of
meshfold.passes.chained_chunks.software_pipeline."""


def interval_of(actions: Sequence[RegionAction], num_epilogue: int) -> list[IntervalAction]:
    """The interval of a direction, whose last actions, `num_epilogue`, are its epilogue."""
    epilogue = iter(actions[len(actions) - num_epilogue :])
    body = actions[: len(actions) - num_epilogue]
    return [
        (next(epilogue), True) if action.kind == ActionKind.EPILOGUE else (action, False)
        for action in body
    ]


def actions_of(interval: Sequence[IntervalAction]) -> tuple[tuple[RegionAction, ...], int]:
    """Inverse of interval_of."""
    epilogue = tuple(action for action, is_epilogue in interval if is_epilogue)
    next_one = RegionAction(ActionKind.EPILOGUE)
    body = tuple(next_one if is_epilogue else action for action, is_epilogue in interval)
    return (*body, *epilogue), len(epilogue)


def fusable_runs(
    graph: SegmentedGraph,
    forward: Sequence[IntervalAction],
    backward: Sequence[IntervalAction],
    alone: Collection[int],
) -> list[tuple[int, ...]]:
    """Runs of two or more segments, by number, in order. alone: segments that no run takes in."""
    behind = {
        (b.number, a.number)
        for (a, x), (b, y) in pairwise(backward)
        if a.kind == b.kind == ActionKind.BACKWARD and x == y
    }
    weights = {
        action.number: (k, is_epilogue)
        for k, (action, is_epilogue) in enumerate(backward)
        if action.kind == ActionKind.WEIGHTS
    }
    runs: list[list[int]] = []
    for (first, x), (then, y) in pairwise(forward):
        a, b = first.number, then.number
        if not (first.kind == then.kind == ActionKind.FORWARD and x == y):
            continue
        if not {a, b}.isdisjoint(alone) or (a, b) not in behind:
            continue
        if graph.segments[a].kind != "ops" or graph.segments[b].kind != "ops":
            continue
        is_next = bool(runs) and runs[-1][-1] == a
        run = runs[-1] if is_next else [a]
        deferred = sorted(weights[k] for k in (*run, b) if k in weights)
        if any(q != p + 1 or left != right for (p, left), (q, right) in pairwise(deferred)):
            continue
        run.append(b)
        if not is_next:
            runs.append(run)
    return [tuple(run) for run in runs]


def renumbered(interval: Sequence[IntervalAction], numbers: Sequence[int]) -> list[IntervalAction]:
    """`interval` with the segments' new numbers; those of a run, which stand together, once."""
    of_segments = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS)
    found: list[IntervalAction] = []
    for action, is_epilogue in interval:
        if action.kind in of_segments:
            action = RegionAction(action.kind, numbers[action.number])
        if (action, is_epilogue) not in found[-1:]:
            found.append((action, is_epilogue))
    return found
