"""Pipeline schedules: in which order each stage runs the passes of its microbatches.

A stage of the model runs, per microbatch, a forward F and a backward B; where a schedule splits the
backward, B is the input gradient (which the stage before waits for) and W the weight gradient
(Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024). With p devices, m microbatches and v
virtual stages per device there are p*v stages; stage s runs on device s mod p, but under zbv
and dualpipev where the way turns at the last device: stages i and 2p-1-i are on device i.

    gpipe        all forwards, then all backwards (Huang et al., NeurIPS 2019)
    1f1b         w_i forwards to warm up, then forward and backward in turn (Narayanan et al., 2021)
    interleaved  1f1b over v virtual stages per device (Narayanan et al., SC 2021)
    zero_bubble  1f1b with split backward, W delayed by i microbatches on device i (ZB-H1)
    interleaved_zero_bubble   interleaved with split backward, W delayed alike, p-1-i forwards less
                 to warm up
    zbv          ZB-V: two virtual stages per device, the loss on the first one (Qi et al.,
                 section 6)
    dualpipev    two virtual stages alike, a forward of one and a backward of the other in turn
                 (DeepSeek-AI 2024)

1f1b and zero_bubble warm up with w_i = p-1-i forwards on device i, or up to twice as many: each
more hides point-to-point latency and costs the activations of one more microbatch. The numbers of
microbatches in flight (forward done, backward not yet) follow in closed form:

    gpipe  m      1f1b  min(m, w_i + 1)      zero_bubble  min(m, w_i + 1 + i)
    interleaved, v > 1  min(m v, 2 (p-1-i) + (v-1) p + 1)   (stage, microbatch) pairs
    interleaved_zero_bubble  min(m v, (p-1-i) + (v-1) p + 1 + i)      zbv, dualpipev  counted

Prices of schedules are in meshfold.cost_models.pipeline.makespan.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

import numpy as np

from meshfold.cost_models.pipeline.actions import ActionLists, Pass, StageAction
from meshfold.cost_models.pipeline.v_schedules import dualpipev_actions, far_stage, zbv_actions
from meshfold.errors import OptionError

_TEXT = re.compile(
    r"(?P<kind>\w+)\((?P<p>[0-9]{1,6}) x (?P<m>[0-9]{1,6})"
    r"(, (?P<v>[0-9]{1,6}) virtual stages)?(, warm-up \+(?P<extra>[0-9]{1,6}))?\)"
)
_SIZES = (("p", 1), ("m", 1), ("v", 1), ("extra", 0))


class ScheduleKind(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"


V_ORDERS = MappingProxyType(
    {ScheduleKind.ZBV: zbv_actions, ScheduleKind.DUALPIPEV: dualpipev_actions}
)
"""Kinds whose stages lie in a V, and what orders a device's actions."""
_SPLIT = (ScheduleKind.ZERO_BUBBLE, ScheduleKind.INTERLEAVED_ZERO_BUBBLE, *V_ORDERS)
_IN_ROUNDS = (ScheduleKind.INTERLEAVED, ScheduleKind.INTERLEAVED_ZERO_BUBBLE)
"""Kinds that run groups of p microbatches through their virtual stages."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of `num_microbatches` over `num_devices`, `num_virtual_stages` stages on each.

    extra_warm_up: forwards that 1f1b and zero_bubble run ahead of the p-1-i of device i; a device
    takes min(extra_warm_up, p-1-i). Raises OptionError for what does not exist.
    """

    kind: ScheduleKind
    num_devices: int
    num_microbatches: int
    num_virtual_stages: int = 1
    extra_warm_up: int = 0

    def __post_init__(self) -> None:
        if min(self.num_devices, self.num_microbatches, self.num_virtual_stages) < 1:
            raise OptionError(
                f"{self}: devices, microbatches and virtual stages must be at least 1"
            )
        interleaved = self.kind in _IN_ROUNDS
        is_v = self.kind in V_ORDERS
        if self.num_virtual_stages > 1 and not (interleaved or is_v):
            raise OptionError(
                f"{self}: only interleaved schedules, zbv and dualpipev have several virtual stages"
            )
        if is_v and self.num_virtual_stages != 2:
            raise OptionError(f"{self}: {self.kind} has 2 virtual stages per device")
        if interleaved and self.num_microbatches % self.num_devices:
            raise OptionError(
                f"{self}: interleaved schedules need a multiple of {self.num_devices} microbatches"
            )
        deepens = self.kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)
        if not 0 <= self.extra_warm_up <= (max(self.num_devices - 1, 0) if deepens else 0):
            raise OptionError(
                f"{self}: extra warm-up is 0 to {self.num_devices - 1} for 1f1b and zero_bubble, "
                "0 for the others"
            )

    def __str__(self) -> str:
        per_device = (
            f", {self.num_virtual_stages} virtual stages" if self.num_virtual_stages > 1 else ""
        )
        extra = f", warm-up +{self.extra_warm_up}" if self.extra_warm_up else ""
        return f"{self.kind}({self.num_devices} x {self.num_microbatches}{per_device}{extra})"

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """The schedule of a text form. Raises OptionError where it is none."""
        found = _TEXT.fullmatch(text)
        if found is None or found["kind"] not in set(ScheduleKind):
            raise OptionError(
                f"{text!r} is no schedule: expected kind(devices x microbatches), '1f1b(4 x 8)'"
            )
        sizes = (int(found[name] or default) for name, default in _SIZES)
        return cls(ScheduleKind(found["kind"]), *sizes)

    @property
    def num_stages(self) -> int:
        return self.num_devices * self.num_virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return self.kind in _SPLIT

    def device_of(self, stage: int) -> int:
        """Where a stage runs."""
        p = self.num_devices
        if self.kind in V_ORDERS and stage >= p:
            return far_stage(p, stage)
        return stage % p

    def crosses_devices(self, stage: int) -> bool:
        """Whether what a stage takes over comes from another device; False behind the last one."""
        return 0 < stage < self.num_stages and self.device_of(stage - 1) != self.device_of(stage)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages of a device, ascending."""
        return tuple(s for s in range(self.num_stages) if self.device_of(s) == device)

    @property
    def warm_up(self) -> tuple[int, ...]:
        """Forwards that each device runs before its first forward-backward pair (w_i)."""
        p, m, v = self.num_devices, self.num_microbatches, self.num_virtual_stages
        if self.kind is ScheduleKind.GPIPE:
            return (m,) * p
        if self.kind in V_ORDERS:
            return tuple(_num_before_backward(device) - 1 for device in self.actions())
        if self.kind in _IN_ROUNDS:
            each = 2 if v > 1 and not self.splits_backward else 1
            return tuple(min(m * v, each * (p - 1 - i) + (v - 1) * p) for i in range(p))
        depths = (p - 1 - i + min(self.extra_warm_up, p - 1 - i) for i in range(p))
        return tuple(min(m, depth) for depth in depths)

    @property
    def weight_delay(self) -> tuple[int, ...]:
        """Passes by which each device lets W fall behind B; zeros where B includes W, or follows
        at no even distance (in a V)."""
        if self.kind in V_ORDERS:
            return (0,) * self.num_devices
        return tuple(i if self.splits_backward else 0 for i in range(self.num_devices))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Peak number of (stage, microbatch) pairs whose activations each device has in memory."""
        if self.kind in V_ORDERS:
            return measured_in_flight(self.actions())
        total = self.num_microbatches * self.num_virtual_stages
        pairs = zip(self.warm_up, self.weight_delay, strict=True)
        return tuple(min(total, warm + 1 + delay) for warm, delay in pairs)

    def actions(self) -> ActionLists:
        """The order of every device."""
        if self.kind in V_ORDERS:
            order, p = V_ORDERS[self.kind], self.num_devices
            return tuple(order(p, self.num_microbatches, i) for i in range(p))
        return tuple(
            _device_actions(self, i, warm, delay)
            for i, (warm, delay) in enumerate(zip(self.warm_up, self.weight_delay, strict=True))
        )


def _device_actions(
    schedule: Schedule, device: int, warm: int, delay: int
) -> tuple[StageAction, ...]:
    """w forwards; then F(w+k), B(k), W(k - delay) for k = 0, 1, ... as far as each exists."""
    forwards, backwards = forward_order(schedule, device), backward_order(schedule, device)
    actions = [StageAction(stage, Pass.FORWARD, j) for stage, j in forwards[:warm]]
    for k, (stage, microbatch) in enumerate(backwards):
        if warm + k < len(forwards):
            actions.append(StageAction(forwards[warm + k][0], Pass.FORWARD, forwards[warm + k][1]))
        actions.append(StageAction(stage, Pass.BACKWARD, microbatch))
        if schedule.splits_backward and k >= delay:
            deferred_stage, deferred_microbatch = backwards[k - delay]
            actions.append(StageAction(deferred_stage, Pass.WEIGHT_GRADIENT, deferred_microbatch))
    if schedule.splits_backward:
        deferred = backwards[max(0, len(backwards) - delay) :]
        actions.extend(StageAction(stage, Pass.WEIGHT_GRADIENT, j) for stage, j in deferred)
    return tuple(actions)


def _num_before_backward(actions: Sequence[StageAction]) -> int:
    return next(k for k, action in enumerate(actions) if action.kind is Pass.BACKWARD)


def forward_order(schedule: Schedule, device: int) -> list[tuple[int, int]]:
    """(stage, microbatch) of each forward of a device: groups of p microbatches go through its
    virtual stages one after the other."""
    p, v = schedule.num_devices, schedule.num_virtual_stages
    if v == 1:
        return [(device, j) for j in range(schedule.num_microbatches)]
    return [
        (device + p * k, group * p + j)
        for group in range(schedule.num_microbatches // p)
        for k in range(v)
        for j in range(p)
    ]


def backward_order(schedule: Schedule, device: int) -> list[tuple[int, int]]:
    """(stage, microbatch) of each backward of a device: as forward_order, last stage first."""
    last = schedule.num_stages - schedule.num_devices + device
    return [(last - stage + device, j) for stage, j in forward_order(schedule, device)]


def resident_by_virtual_stage(
    schedule: Schedule, *, weights_apart: bool = False
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The numbers of microbatches whose activations are resident on each virtual stage of a device
    at one moment: all such tuples but those that another one is no smaller than anywhere.

    What a device needs is the largest over them of sum_c n_c * (bytes of virtual stage c).
    weights_apart: with as many entries again behind them, for microbatches between B and W, which
    the first entries then leave out.
    """
    p, v = schedule.num_devices, schedule.num_virtual_stages
    if v == 1 and not weights_apart:
        return tuple(((n,),) for n in schedule.in_flight)
    ends = Pass.WEIGHT_GRADIENT if schedule.splits_backward else Pass.BACKWARD
    # A warm-up spans less than v + 2 groups of p microbatches; after it groups repeat.
    groups = min(-(-schedule.num_microbatches // p), v + 4)
    short = replace(schedule, num_microbatches=min(schedule.num_microbatches, groups * p))
    found = []
    for device in short.actions():
        in_flight, seen = [0] * (2 * v if weights_apart else v), set()
        for action in device:
            at = action.stage // p
            if action.kind is Pass.FORWARD:
                in_flight[at] += 1
            elif weights_apart and schedule.splits_backward:
                in_flight[at] -= action.kind is Pass.BACKWARD
                in_flight[v + at] += 1 if action.kind is Pass.BACKWARD else -1
            elif action.kind is ends:
                in_flight[at] -= 1
            seen.add(tuple(in_flight))
        found.append(_largest(seen))
    return tuple(found)


def counted_in_flight(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """resident_by_virtual_stage as a search of stages counts: microbatches between B and W apart
    where the backward is split."""
    if schedule.num_virtual_stages == 1 and schedule.splits_backward:
        pairs = zip(schedule.warm_up, schedule.weight_delay, strict=True)
        return tuple(_split_moments(*pair, schedule.num_microbatches) for pair in pairs)
    return resident_by_virtual_stage(schedule, weights_apart=schedule.splits_backward)


def _split_moments(warm: int, delay: int, m: int) -> tuple[tuple[int, ...], ...]:
    """(before the end of B, between B and W) of one stage at its fullest moments, that with most
    before the end of B last, in closed form:
    behind F(w + k) there are w + 1 and min(k, delay), behind B(k) one less and one more; from
    k = m - w on no forwards come any more, and until k = delay no W."""
    late = [(m - k - 1, k + 1) for k in range(m - warm, min(delay, m - 1) + 1)]
    if warm == m:
        return (*late[::-1], (m, 0))
    waiting = min(delay, m - 1 - warm)
    return (*late[::-1], (warm, waiting + 1), (warm + 1, waiting))


def _largest(seen: Collection[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other one is at least as large as in every entry, in order."""
    # By falling sums only earlier ones can be as large, and of those the largest say it all.
    ordered = np.array(sorted(seen, key=lambda n: (-sum(n), n)))
    found = np.empty((0, ordered.shape[1]), ordered.dtype)
    for n in ordered:
        if not (found >= n).all(axis=1).any():
            found = np.vstack([found, n])
    return tuple(sorted(tuple(n) for n in found.tolist()))


def measured_in_flight(actions: Sequence[Iterable[StageAction]]) -> tuple[int, ...]:
    """Peak number of (stage, microbatch) pairs in memory of each device, counted along its order.

    A pair counts from its F to its W, or to its B where no W exists.
    """
    peaks = []
    for device in actions:
        ordered = list(device)
        split = {(a.stage, a.microbatch) for a in ordered if a.kind is Pass.WEIGHT_GRADIENT}
        in_flight = peak = 0
        for action in ordered:
            if action.kind is Pass.FORWARD:
                in_flight += 1
            elif action.kind is Pass.WEIGHT_GRADIENT or (action.stage, action.microbatch) not in (
                split
            ):
                in_flight -= 1
            peak = max(peak, in_flight)
        peaks.append(peak)
    return tuple(peaks)
