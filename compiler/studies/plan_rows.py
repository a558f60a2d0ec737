"""The best plans of one model in several settings; a setting without one says why.

Budgets of memory share plans. The best plan in a budget is the best in every smaller one that it
fits, so the largest budget is searched first, and only where no plan fits that is known is another
searched. A plan in a budget fits in every larger one: where a search there finds a slower one, or
none, it is taken, and nothing is proven of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import sequence_length
from meshfold.report.plan_rows import PlanFigures, PlanRow, Setting
from meshfold.studies.captured_models import CapturedModels

Tell = Callable[[int, int], None]
"""Called with (settings done, settings in all)."""


@dataclass(frozen=True)
class Point:
    """Where a plan is asked for. setting: what of it the user gave."""

    cluster: ClusterSpec
    setting: Setting


def plan_rows(
    models: CapturedModels, points: Sequence[Point], options: CompileOptions, tell: Tell
) -> tuple[PlanRow, ...]:
    """One row per point, in their order, with the sizes that the plan has.

    Raises what has no row, CaptureError say; OptionError and InfeasibleError where every point has
    the same one.
    """
    rows: dict[int, PlanRow] = {}
    errors: list[InfeasibleError | OptionError] = []
    for done, k in enumerate(sorted(range(len(points)), key=lambda k: -_budget(points[k]))):
        tell(done, len(points))
        point, setting = points[k], points[k].setting
        if known := next(_fitting(points, rows, k), None):
            rows[k] = known
            continue
        try:
            made = models.plan(
                point.cluster,
                replace(options, memory_bytes=setting.memory_bytes or options.memory_bytes),
                batch=setting.batch,
                sequence=setting.sequence,
            )
        except (InfeasibleError, OptionError) as error:
            errors.append(error)
            rows[k] = PlanRow(setting, None, str(error))
        else:
            rows[k] = PlanRow(_setting_of(made), PlanFigures.of(made))
    if len(errors) == len(points) and len({str(error) for error in errors}) == 1:
        raise errors[0]
    return tuple(_no_slower(points, rows, k) for k in range(len(points)))


def _budget(point: Point) -> float:
    """Bytes; infinite where nobody gave them, the same in all points."""
    return point.setting.memory_bytes or math.inf


def _beside(points: Sequence[Point], k: int) -> Iterator[int]:
    """The points that differ from number k in their budget alone."""
    alike = replace(points[k].setting, memory_bytes=None)
    for j, point in enumerate(points):
        if j != k and replace(point.setting, memory_bytes=None) == alike:
            if point.cluster == points[k].cluster:
                yield j


def _fitting(points: Sequence[Point], rows: Mapping[int, PlanRow], k: int) -> Iterator[PlanRow]:
    """Rows of larger budgets whose plan fits in that of point k."""
    budget = points[k].setting.memory_bytes
    if budget is None:
        return
    for j in _beside(points, k):
        row = rows.get(j)
        if row and row.figures and row.figures.peak_bytes <= budget <= _budget(points[j]):
            yield PlanRow(replace(row.setting, memory_bytes=budget), row.figures)


def _no_slower(points: Sequence[Point], rows: Mapping[int, PlanRow], k: int) -> PlanRow:
    """The row of point k, or the plan of a smaller budget where that is faster."""
    best, own = rows[k], rows[k].figures
    for j in _beside(points, k):
        found = rows[j].figures
        if found and _budget(points[j]) < _budget(points[k]):
            if own is None or found.step_s < own.step_s:
                setting = replace(rows[j].setting, memory_bytes=points[k].setting.memory_bytes)
                best, own = PlanRow(setting, replace(found, gap=None)), found
    return best


def _setting_of(plan: Plan) -> Setting:
    return Setting(
        devices=plan.world_size,
        batch=plan.model.batch_size,
        sequence=sequence_length(plan),
        memory_bytes=plan.memory.capacity,
    )
