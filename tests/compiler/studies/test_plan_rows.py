"""The best plans in several settings."""

import pytest
from support.programs.plans import example_plan

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.report.plan_rows import Setting
from meshfold.studies.captured_models import CapturedModels
from meshfold.studies.plan_rows import Point, plan_rows


class Models(CapturedModels):
    """Has one plan for every setting but those with errors, and writes down what was asked."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors, self.asked = errors, list[tuple[int, int | None, int | None]]()

    def plan(self, cluster: ClusterSpec, options: CompileOptions, **sizes: object) -> Plan:
        batch = sizes["batch"]
        assert batch is None or isinstance(batch, int)
        self.asked.append((cluster.num_devices, batch, options.memory_bytes))
        if batch in self.errors:
            raise self.errors[batch]
        return example_plan()


def points(*batches: int) -> list[Point]:
    spec = resolve_cluster("local-cpux2")
    return [Point(spec, Setting(2, batch, memory_bytes=batch)) for batch in batches]


def test_a_row_per_point_with_a_plan_or_a_reason() -> None:
    models = Models({4: InfeasibleError("too little", binding_constraint="memory")})
    told: list[tuple[int, int]] = []
    options = CompileOptions(memory_bytes=10)
    rows = plan_rows(models, points(4, 8), options, lambda k, n: told.append((k, n)))
    assert models.asked == [(2, 4, 4), (2, 8, 8)] and told == [(0, 2), (1, 2)]
    assert (rows[0].figures, rows[0].refusal, rows[0].setting.batch) == (None, "too little", 4)
    assert rows[1].figures is not None and rows[1].figures.strategy == "dp2 x tp4+sp, zero3"
    assert rows[1].setting == Setting(8, 16, 4096, 40 * 2**30)


def test_what_is_wrong_everywhere_is_raised() -> None:
    same = {4: OptionError("no such rule"), 8: OptionError("no such rule")}
    with pytest.raises(OptionError, match="no such rule"):
        plan_rows(Models(same), points(4, 8), CompileOptions(), lambda *_: None)
    other = {**same, 8: OptionError("another")}
    assert len(plan_rows(Models(other), points(4, 8), CompileOptions(), lambda *_: None)) == 2
