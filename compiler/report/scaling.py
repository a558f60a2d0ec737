"""What rows over device counts say together: how many devices a model needs, and from which count
on more of them gain nothing. No torch."""

import math

from meshfold.report.plan_rows import PlanFigures, PlanRow, RowTable
from meshfold.units import seconds_text

NEARLY = 0.05
"""A step that is longer by no more than that is nearly as fast: less than predictions are exact to
(cost_models/hardware/error_bands.json)."""


def scaling_lines(table: RowTable, batch: int) -> list[str]:
    """Sentences about rows over devices, in the order of the counts. batch: samples of a step."""
    found = [(row.setting.devices, row.figures) for row in table.rows if row.figures]
    return [*_fewest(table.rows), *_fewer_are_faster(found), *_undivided(table.rows, batch)]


def _fewest(rows: tuple[PlanRow, ...]) -> list[str]:
    with_plan = [row.setting.devices for row in rows if row.figures]
    if not with_plan:
        return ["no plan on any of these counts"]
    fewest = min(with_plan)
    below = [row.setting.devices for row in rows if row.setting.devices < fewest]
    text = f"fewest devices with a plan: {fewest}"
    return [f"{text} (none on {max(below)})" if below else f"{text}, the fewest asked for"]


def _fewer_are_faster(found: list[tuple[int, PlanFigures]]) -> list[str]:
    """Where more devices lose, and where they gain next to nothing."""
    if len(found) < 2:
        return []
    lines = []
    fastest, best = min(found, key=lambda item: (item[1].step_s, item[0]))
    slower = [(n, f.step_s) for n, f in found if n > fastest and f.step_s > best.step_s]
    if slower:
        texts = ", ".join(f"{n} ({seconds_text(step_s)})" for n, step_s in slower)
        lines.append(f"{fastest} devices ({seconds_text(best.step_s)}) are faster than {texts}")
    enough, near = next((n, f) for n, f in found if f.step_s <= (1 + NEARLY) * best.step_s)
    if enough < fastest:
        longer = 100 * (near.step_s / best.step_s - 1)
        lines.append(f"{enough} devices are nearly as fast as {fastest}: {longer:.1f} % longer")
    cheapest = min(found, key=lambda item: (item[1].device_s_per_million, item[0]))[0]
    return [*lines, f"cheapest: {cheapest} devices"]


def _undivided(rows: tuple[PlanRow, ...], batch: int) -> list[str]:
    """Counts that cannot all share the batch by samples."""
    odd = [n for n in (row.setting.devices for row in rows) if batch % n]
    if not odd:
        return []
    counts, shares = (", ".join(map(str, x)) for x in (odd, [math.gcd(batch, n) for n in odd]))
    return [
        f"a batch of {batch} does not divide over {counts} devices: data parallelism takes at most "
        f"{shares} of them, the rest has to be tp, cp or pp; another batch may be faster"
    ]
