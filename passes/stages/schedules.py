"""The schedules that a search of stages chooses among.

    gpipe, 1f1b, zero_bubble    one stage per device; warm-up of 1f1b and zero_bubble 0, 1, 2, 4,
                                ... forwards deeper than the least, up to twice the least
    interleaved                 2, 3, 4 stages per device, as far as there are layers for them
    interleaved_zero_bubble     the same
    zbv, dualpipev              2 stages per device

1f1b that is asked for is the published one, with the least warm-up. Depth hides transfers, and at
few microbatches it favours early stages that are heavier; it costs activations in flight. What runs
the same actions as another one is left out.
"""

from meshfold.cost_models.pipeline.schedules import V_ORDERS, Schedule, ScheduleKind

VIRTUAL_STAGES = (2, 3, 4)
"""Stages per device that the interleaved schedule is tried with; a pin may ask for more."""


UNASKED = (
    ScheduleKind.GPIPE,
    ScheduleKind.ONE_F_ONE_B,
    ScheduleKind.INTERLEAVED,
    ScheduleKind.ZERO_BUBBLE,
)
"""Kinds where none is asked for; others of several stages per device: several_stages_a_device."""


def offered_schedules(
    num_devices: int,
    num_microbatches: int,
    num_layers: int,
    kind: ScheduleKind | None = None,
    num_virtual_stages: int | None = None,
) -> tuple[Schedule, ...]:
    """Every schedule that is worth a try, least warm-up first. kind, num_virtual_stages: only those
    (None: any). Empty where none exists."""
    kinds = list(UNASKED) if kind is None else [kind]
    if kind is None and num_devices == 1:
        kinds = [ScheduleKind.ONE_F_ONE_B]
    found: list[Schedule] = []
    for offered in kinds:
        if offered in V_ORDERS:
            found += _v(offered, num_devices, num_microbatches, num_layers, num_virtual_stages)
        elif offered in (ScheduleKind.INTERLEAVED, ScheduleKind.INTERLEAVED_ZERO_BUBBLE):
            found += _interleaved(
                offered, num_devices, num_microbatches, num_layers, num_virtual_stages
            )
        elif num_virtual_stages in (None, 1):
            is_published = kind is ScheduleKind.ONE_F_ONE_B
            found += _of_one_stage_a_device(
                offered, num_devices, num_microbatches, least=is_published
            )
    distinct: dict[object, Schedule] = {}
    for schedule in found:
        distinct.setdefault(_order_key(schedule), schedule)
    return tuple(distinct.values())


def several_stages_a_device(
    num_devices: int, num_microbatches: int, num_layers: int
) -> tuple[Schedule, ...]:
    """The schedules of several stages per device that are worth a try where none is asked for."""
    sizes = num_devices, num_microbatches, num_layers, None
    in_rounds = ScheduleKind.INTERLEAVED, ScheduleKind.INTERLEAVED_ZERO_BUBBLE
    rounds = [s for kind in in_rounds for s in _interleaved(kind, *sizes)]
    return *rounds, *(s for kind in V_ORDERS for s in _v(kind, *sizes))


def _order_key(schedule: Schedule) -> object:
    """Alike where the actions are: the last forward of a warm-up of all is none."""
    last = schedule.num_microbatches * schedule.num_virtual_stages - 1
    warm_up = tuple(min(warm, last) for warm in schedule.warm_up)
    return schedule.num_virtual_stages, schedule.splits_backward, warm_up


def _of_one_stage_a_device(kind: ScheduleKind, p: int, m: int, *, least: bool) -> list[Schedule]:
    """least: with the least warm-up alone."""
    if least or kind is ScheduleKind.GPIPE:
        return [Schedule(kind, p, m)]
    deepest = p - 1
    extras = {0, deepest, *(2**k for k in range(deepest.bit_length()))}
    return [Schedule(kind, p, m, extra_warm_up=x) for x in sorted(extras) if x <= deepest]


def _v(
    kind: ScheduleKind, p: int, m: int, num_layers: int, num_virtual_stages: int | None
) -> list[Schedule]:
    fits = p > 1 and 2 * p <= num_layers and num_virtual_stages in (None, 2)
    return [Schedule(kind, p, m, num_virtual_stages=2)] if fits else []


def _interleaved(
    kind: ScheduleKind, p: int, m: int, num_layers: int, num_virtual_stages: int | None
) -> list[Schedule]:
    if p == 1 or m % p:
        return []
    virtual_stages = VIRTUAL_STAGES if num_virtual_stages is None else (num_virtual_stages,)
    return [
        Schedule(kind, p, m, num_virtual_stages=v)
        for v in virtual_stages
        if v > 1 and p * v <= num_layers
    ]
