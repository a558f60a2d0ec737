"""Orders of the schedules that go through the devices in a V: forth with the near stages and back
with the far ones, so that the first device has the model's both ends.

    zbv          after torch.distributed.pipelining.schedules.ScheduleZBVZeroBubble
    dualpipev    after ScheduleDualPipeV of the same module

With fewer microbatches than fill the V, the order is the full one without the missing: microbatches
do not wait for one another, so that nobody waits for what does not come.
"""

from collections import Counter, deque

from meshfold.cost_models.pipeline.actions import Pass, StageAction


def far_stage(num_devices: int, device: int) -> int:
    """A device's stage on the way back; the near one has the device's number. Its own inverse."""
    return 2 * num_devices - 1 - device


class _Order:
    """Actions of one device so far; add("F") takes the stage's next microbatch."""

    def __init__(self) -> None:
        self.actions: list[StageAction] = []
        self._done: Counter[tuple[int, Pass]] = Counter()
        self._deferred: deque[int] = deque()

    def num_waiting(self, stage: int) -> int:
        """How many B of a stage are ahead of its W."""
        return self._done[stage, Pass.BACKWARD] - self._done[stage, Pass.WEIGHT_GRADIENT]

    def done(self, stage: int, kind: Pass) -> int:
        return self._done[stage, kind]

    def add(self, stage: int, letters: str, times: int = 1) -> None:
        for letter in letters * times:
            kind = Pass(letter)
            self.actions.append(StageAction(stage, kind, self._done[stage, kind]))
            self._done[stage, kind] += 1

    def add_deferred(self, stage: int) -> None:
        """B, whose W waits."""
        self.add(stage, "B")
        self._deferred.append(stage)

    def add_waiting(self, times: int = 1) -> None:
        """W of the oldest ones that wait, if any."""
        for _ in range(min(times, len(self._deferred))):
            self.add(self._deferred.popleft(), "W")

    def first(self, num_microbatches: int) -> tuple[StageAction, ...]:
        return tuple(a for a in self.actions if a.microbatch < num_microbatches)


def zbv_actions(num_devices: int, num_microbatches: int, device: int) -> tuple[StageAction, ...]:
    """Forwards warm up until B of the far stage, W fills what is left (Qi et al., ICLR 2024)."""
    p, near, far = num_devices, device, far_stage(num_devices, device)
    most = max(2 * p - 1, num_microbatches)
    order = _Order()
    order.add(near, "F", 2 * (p - device) - 1)
    for _ in range(device):
        order.add(far, "F")
        order.add(near, "F")
    order.add(far, "FBW", p - device)
    while order.done(far, Pass.FORWARD) < most:
        if order.done(near, Pass.FORWARD) < most:
            order.add(near, "F")
        order.add(near, "BW")
        order.add(far, "FBW")
    for _ in range(device):
        order.add(near, "B")
        order.add(far, "B")
    order.add(near, "BW", p - device)
    for stage in (far, near):
        order.add(stage, "W", order.num_waiting(stage))
    return order.first(num_microbatches)


def dualpipev_actions(
    num_devices: int, num_microbatches: int, device: int
) -> tuple[StageAction, ...]:
    """A forward of one stage with a full backward of the other (DeepSeek-AI 2024,
    arXiv:2412.19437, in a V); B and W apart only where the V fills and empties. Forward and
    backward of a pair follow one another here: they are not interleaved op by op."""
    p, near, far = num_devices, device, far_stage(num_devices, device)
    most = max(2 * p, num_microbatches)
    order = _Order()
    order.add(near, "F", 2 * (p - device - 1))
    for _ in range(device + 1):
        order.add(near, "F")
        order.add(far, "F")
    for _ in range(p - device - 1):
        order.add(far, "BWF")
    for _ in range(most - 2 * p + device + 1):
        order.add(near, "F")
        order.add(far, "BWF")
        order.add(near, "BW")
    for _ in range(p - device - 1):
        order.add(far, "BWF")
        order.add(near, "BW")
    _empty_dual(order, p, device)
    return order.first(num_microbatches)


def _empty_dual(order: _Order, p: int, device: int) -> None:
    """The last backwards: the first half of the pairs unsplit, then W waits for gaps."""
    near, far = device, far_stage(p, device)
    num_unsplit = 2 * ((device + 1) // 2) + 1 - device % 2
    for k, stage in enumerate([far, near] * (device + 1)):
        if k < num_unsplit:
            order.add(stage, "BW")
        else:
            order.add_deferred(stage)
    for _ in range(p - device - 1):
        order.add_waiting()
        order.add_deferred(near)
    order.add_waiting(device + 1)
