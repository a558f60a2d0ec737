"""When devices end under any order of actions, of many pipelines at once.

The order of a schedule does not depend on seconds, so its actions go in waves: those of a wave wait
for actions of earlier waves alone, for the one before on their device, and for their input from
another stage. A wave is one step of vectors over its actions and over the pipelines,

    end_a = max(end of the one before, end of the input + transfer) + seconds_a

equal to meshfold.cost_models.pipeline.makespan.simulate_actions up to rounding. It serves schedules
of several virtual stages that split the backward, which have no closed form
(vector_makespan.py).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfold.cost_models.pipeline.actions import ActionLists, Pass, StageAction

Seconds = NDArray[np.float64]
Numbers = NDArray[np.int64]

_KINDS = tuple(Pass)


@dataclass(frozen=True, eq=False)
class Waves:
    """The actions of a schedule, wave by wave; build with `Waves.of`.

    starts: number of the first action of each wave, and of all at the end. before, source: per
    action the number of the one before on its device and of its input from another stage, of all
    where there is none. kind: (pass, stage) as one number. hop: the stage boundary that its input
    crosses, the last entry where there is none. last: per device its last action.
    """

    num_stages: int
    starts: tuple[int, ...]
    before: Numbers
    source: Numbers
    kind: Numbers
    hop: Numbers
    last: Numbers

    @classmethod
    def of(cls, actions: ActionLists) -> "Waves":
        """Raises ValueError where the order deadlocks."""
        num_stages = 1 + max(action.stage for device in actions for action in device)
        wave_of = _waves(actions, num_stages)
        ordered = sorted(wave_of, key=wave_of.__getitem__)
        number = {action: at for at, action in enumerate(ordered)}
        none = len(ordered)
        before = {b: a for device in actions for a, b in zip(device, device[1:], strict=False)}
        sources = [_source(action, num_stages) for action in ordered]
        counts = np.bincount(list(wave_of.values()))
        return cls(
            num_stages,
            (0, *np.cumsum(counts).tolist()),
            np.array([number[before[a]] if a in before else none for a in ordered]),
            np.array([number[s] if s else none for s in sources]),
            np.array([_KINDS.index(a.kind) * num_stages + a.stage for a in ordered]),
            np.array(
                [
                    min(a.stage, s.stage) if s else num_stages - 1
                    for a, s in zip(ordered, sources, strict=True)
                ]
            ),
            np.array([number[device[-1]] for device in actions]),
        )

    def ends_s(self, forward: Seconds, backward: Seconds, weight: Seconds, hop: Seconds) -> Seconds:
        """When each device ends its last action, shape (p, n). forward, backward (without W),
        weight: seconds of each stage of n pipelines, shape (stages, n); hop: from each stage to the
        next, shape (stages - 1, n)."""
        own_s = np.concatenate([forward, backward, weight])[self.kind]
        way_s = np.concatenate([hop, np.zeros((1, forward.shape[1]))])[self.hop]
        ends = np.zeros((len(self.kind) + 1, forward.shape[1]))
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            arrival = ends[self.source[start:end]] + way_s[start:end]
            free = ends[self.before[start:end]]
            ends[start:end] = np.maximum(free, arrival) + own_s[start:end]
        return np.asarray(ends[self.last])


def _source(action: StageAction, num_stages: int) -> StageAction | None:
    """What an action waits for on another stage; its own stage's passes come before in the order of
    its device."""
    step = {Pass.FORWARD: -1, Pass.BACKWARD: 1}.get(action.kind, 0)
    stage = action.stage + step
    if step == 0 or not 0 <= stage < num_stages:
        return None
    return StageAction(stage, action.kind, action.microbatch)


def _waves(actions: ActionLists, num_stages: int) -> dict[StageAction, int]:
    """The wave of every action: one behind the latest of what it waits for."""
    found: dict[StageAction, int] = {}
    position, waiting = [0] * len(actions), dict[StageAction, int]()
    ready = list(range(len(actions)))
    while ready:
        device = ready.pop()
        order = actions[device]
        while position[device] < len(order):
            action = order[position[device]]
            source = _source(action, num_stages)
            if source is not None and source not in found:
                waiting[source] = device
                break
            own = found[order[position[device] - 1]] if position[device] else -1
            found[action] = 1 + max(own, found[source] if source else -1)
            position[device] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    if len(found) < sum(map(len, actions)):
        raise ValueError("the order of actions deadlocks")
    return found
