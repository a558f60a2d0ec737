"""What rows over device counts say together."""

from meshfold.report.plan_rows import PlanFigures, PlanRow, RowTable, Setting
from meshfold.report.scaling import scaling_lines


def lines(steps_s: dict[int, float | None], batch: int = 64) -> list[str]:
    rows = []
    for devices, step_s in steps_s.items():
        found = None
        if step_s is not None:
            cost = devices * step_s
            found = PlanFigures("dp", step_s, 1 / step_s, 0.0, None, 1, None, cost)
        rows.append(PlanRow(Setting(devices), found, "" if found else "nothing fits"))
    return scaling_lines(RowTable("devices", tuple(rows)), batch)


def test_the_fewest_devices() -> None:
    assert lines({8: None, 16: 1.0, 32: 0.5})[0] == "fewest devices with a plan: 16 (none on 8)"
    assert lines({8: 1.0}) == ["fewest devices with a plan: 8, the fewest asked for"]
    assert lines({8: None}) == ["no plan on any of these counts"]


def test_fewer_devices_that_are_faster() -> None:
    found = lines({8: 2.0, 16: 1.0, 32: 1.5, 64: 1.2})
    assert found[1] == "16 devices (1.00 s) are faster than 32 (1.50 s), 64 (1.20 s)"
    assert found[2] == "cheapest: 8 devices"
    assert len(found) == 3


def test_fewer_devices_that_are_nearly_as_fast() -> None:
    """Within 5 %: 1.04 of the fastest is, 1.06 is not."""
    assert lines({8: 1.06, 16: 1.04, 32: 1.0})[1] == (
        "16 devices are nearly as fast as 32: 4.0 % longer"
    )
    assert lines({8: 2.0, 16: 1.0})[1] == "cheapest: 8 devices"


def test_a_batch_that_does_not_divide() -> None:
    assert lines({8: 1.0, 24: 1.0}, batch=64)[-1] == (
        "a batch of 64 does not divide over 24 devices: data parallelism takes at most 8 of them, "
        "the rest has to be tp, cp or pp; another batch may be faster"
    )
    assert "divide" not in lines({8: 1.0, 16: 0.9}, batch=64)[-1]
