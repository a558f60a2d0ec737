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
        listed = [action for device in actions for action in device]
        num_stages = 1 + max(action.stage for action in listed)
        number = {action: at for at, action in enumerate(listed)}
        sources = [_source(action, num_stages) for action in listed]
        source_of = [-1 if s is None else number.get(s, len(listed)) for s in sources]
        last = np.cumsum([len(device) for device in actions]) - 1
        before = np.arange(len(listed)) - 1
        before[[0, *(last[:-1] + 1)]] = -1
        wave_of = np.array(_waves(source_of, last.tolist()))
        order = np.argsort(wave_of, kind="stable")
        place = np.empty(len(order) + 1, np.int64)
        place[order] = np.arange(len(order))
        place[-1] = len(order)
        stage = np.array([action.stage for action in listed])
        other = np.array([num_stages - 1 if s is None else s.stage for s in sources])
        kinds = np.array([_KINDS.index(action.kind) for action in listed])
        has_source = np.array(source_of) >= 0
        return cls(
            num_stages,
            (0, *np.cumsum(np.bincount(wave_of)).tolist()),
            place[before[order]],
            place[np.array(source_of)[order]],
            (kinds * num_stages + stage)[order],
            np.where(has_source, np.minimum(stage, other), num_stages - 1)[order],
            place[last],
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


def _waves(source_of: list[int], last: list[int]) -> list[int]:
    """The wave of every action, device by device: one behind the latest of what it waits for.
    source_of: the number of its input, -1 where it has none; last: per device its last action."""
    found = [-1] * (len(source_of) + 1)  # none of them makes an input that is no action
    starts = [0, *(at + 1 for at in last[:-1])]
    position, waiting = list(starts), dict[int, int]()
    ready = list(range(len(last)))
    while ready:
        device = ready.pop()
        at, end = position[device], last[device] + 1
        own = found[at - 1] if at > starts[device] else -1
        while at < end:
            source = source_of[at]
            if source >= 0 and found[source] < 0:
                waiting[source] = device
                break
            own = 1 + max(own, found[source] if source >= 0 else -1)
            found[at] = own
            if at in waiting:
                ready.append(waiting.pop(at))
            at += 1
        position[device] = at
    found.pop()
    if min(found) < 0:
        raise ValueError("the order of actions deadlocks")
    return found
