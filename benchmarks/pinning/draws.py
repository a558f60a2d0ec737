"""One random set of pins from a seed: a point of the whole space, or some of its coordinates; or a
neighbour of a point, one or two moves away."""

import random
from collections.abc import Mapping

from meshfold.ir.options import Mode, PinValue
from meshfold.passes.one_pass.pruning import divisors

AXES: Mapping[str, int] = {"dp": 4, "tp": 4, "pp": 3, "cp": 1}
"""Weights by which a prime factor of the devices goes to an axis."""
SCHEDULES = (
    *("1f1b", "1f1b", "1f1b", "gpipe", "zero_bubble"),
    *("interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"),
)
SHARES_KEPT = (1.0, 1.0, 0.6, 0.3)
"""Of the pins of a point, the share that is asked for; the search fills in the others."""


def drawn_pins(
    seed: int,
    num_devices: int,
    batch: int,
    *,
    is_moe: bool,
    mode: Mode,
    is_tight: bool = False,
) -> dict[str, PinValue]:
    """Pins that may be refused: nothing is asked about the model. is_tight: whether memory is, so
    that what leaves the device is drawn, too."""
    draw = random.Random(seed)
    point = _degrees(draw, num_devices, is_moe)
    num_batch_ranks = int(point["dp"]) * int(point["ep"])
    num_ranks = num_batch_ranks * int(point["cp"])
    point["zero"] = draw.choice([0, 1, 2, 3, 3]) if num_ranks > 1 else 0
    shards = divisors(int(point["dp"]))
    point["dp_shard"] = draw.choice(shards) if draw.random() < 0.3 else shards[-1]
    point["sp"] = draw.choice([0, 1, 1]) if int(point["tp"]) > 1 else 0
    point["recompute"] = draw.choice(["none", "none", "selective", "full"])
    point["microbatches"] = _microbatches(draw, batch // num_batch_ranks, int(point["pp"]))
    if int(point["pp"]) > 1:
        point["schedule"] = draw.choice(SCHEDULES)
        if str(point["schedule"]).startswith("interleaved"):
            point["virtual_stages"] = draw.choice([2, 3, 4])
    if is_tight:
        point["recompute"] = draw.choice(["none", "light", "selective", "heavy", "full"])
        point["offload"] = draw.choice(["none", "activations", "optimizer", "parameters"])
    share = draw.choice(SHARES_KEPT)
    pins = {name: value for name, value in point.items() if draw.random() <= share}
    return pins | _refinements(draw, mode)


def neighbour_pins(
    seed: int, chosen: Mapping[str, PinValue], *, batch: int, is_moe: bool
) -> dict[str, PinValue]:
    """Degrees one or two moves from `chosen`, its pp, dp, ep, cp, tp, sp and microbatches; ZeRO
    and recomputation are left to the search, and mostly the schedule."""
    draw = random.Random(seed)
    point = {name: int(chosen[name]) for name in (*AXES, "ep", "sp", "microbatches")}
    for _ in range(draw.choice([1, 1, 2])):
        _move(draw, point, batch, is_moe)
    pins: dict[str, PinValue] = dict(point)
    if point["pp"] > 1 and draw.random() < 0.4:
        pins["schedule"] = draw.choice(SCHEDULES)
    return pins


def _move(draw: random.Random, point: dict[str, int], batch: int, is_moe: bool) -> None:
    """A factor goes from one axis to another, microbatches change by one, or sp does."""
    what = draw.choice(["axes", "axes", "axes", "microbatches", "microbatches", "sp"])
    if what == "axes":
        names = [*AXES, *["ep"] * is_moe]
        source = draw.choice([name for name in names if point[name] > 1] or names)
        target = draw.choice([name for name in names if name != source])
        factor = draw.choice(divisors(point[source])[1:2] or [1])
        point[source] //= factor
        point[target] *= factor
    elif what == "sp":
        point["sp"] = 1 - point["sp"]
    of_rank = max(1, batch // (point["dp"] * point["ep"]))
    if what != "sp":
        possible = divisors(of_rank)
        near = [m for m in possible if m in (point["microbatches"] * x for x in (2, 1))]
        near += [m for m in possible if 2 * m == point["microbatches"]]
        point["microbatches"] = draw.choice(near or possible)
    if point["tp"] == 1:
        point["sp"] = 0


def _degrees(draw: random.Random, num_devices: int, is_moe: bool) -> dict[str, PinValue]:
    weights = {**AXES, "ep": 4 if is_moe else 0}
    found = dict.fromkeys(weights, 1)
    while num_devices > 1:
        factor = divisors(num_devices)[1]
        (axis,) = draw.choices(list(weights), list(weights.values()))
        found[axis] *= factor
        num_devices //= factor
    return dict(found)


def _microbatches(draw: random.Random, of_rank: int, pp: int) -> int:
    """Of what a rank has of the batch; mostly one where there are no stages."""
    if of_rank < 1 or (pp == 1 and draw.random() < 0.7):
        return 1
    return draw.choice([m for m in divisors(of_rank) if m >= min(pp, of_rank)])


def _refinements(draw: random.Random, mode: Mode) -> dict[str, PinValue]:
    """What the simulated program decides, seldom."""
    sizes = ["0", "5MB", "25MB", "100MB", "400MB"]
    pins: dict[str, PinValue] = {}
    for name in ("reduce_bucket_bytes", "allgather_bucket_bytes", "hierarchical_all_reduce"):
        if draw.random() < 0.1:
            size = draw.choice(sizes)
            pins[name] = size if size != "0" else 0
    if mode == "scheduled" and draw.random() < 0.7:
        pins["micro_chunks"] = draw.choice([1, 2, 2, 4])
        if draw.random() < 0.3:
            pins["chained_chunks"] = draw.choice([0, 1])
    if draw.random() < 0.2 and mode == "scheduled":
        pins["collective_matmul"] = draw.choice([0, 1])
    return pins
