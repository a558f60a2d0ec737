"""The best plans of one model in several settings; a setting without one says why."""

from collections.abc import Callable, Sequence
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
    rows: list[PlanRow] = []
    errors: list[InfeasibleError | OptionError] = []
    for k, point in enumerate(points):
        tell(k, len(points))
        setting = point.setting
        try:
            made = models.plan(
                point.cluster,
                replace(options, memory_bytes=setting.memory_bytes or options.memory_bytes),
                batch=setting.batch,
                sequence=setting.sequence,
            )
        except (InfeasibleError, OptionError) as error:
            errors.append(error)
            rows.append(PlanRow(setting, None, str(error)))
        else:
            rows.append(PlanRow(_setting_of(made), PlanFigures.of(made)))
    if len(errors) == len(points) and len({str(error) for error in errors}) == 1:
        raise errors[0]
    return tuple(rows)


def _setting_of(plan: Plan) -> Setting:
    return Setting(
        devices=plan.world_size,
        batch=plan.model.batch_size,
        sequence=sequence_length(plan),
        memory_bytes=plan.memory.capacity,
    )
