"""The verdict over plans of rising budgets."""

from dataclasses import replace

from memory_sweep import Row, faults

GB = 10**9
LOW = Row(10 * GB, 0.2, 2.0, 1.9, 10 * GB, "zero3")
HIGH = Row(20 * GB, 0.2, 1.0, 0.9, 15 * GB, "zero2")
NONE = Row(5 * GB, 0.2, label="nothing fits")


def test_faster_with_memory_is_fine_in_any_order() -> None:
    assert faults([HIGH, LOW, NONE]) == faults([NONE, LOW, HIGH]) == []
    assert faults([LOW, replace(HIGH, step_s=2.0, added_s=1.9)]) == []


def test_every_fault_is_said() -> None:
    slower = replace(HIGH, step_s=2.1)
    assert faults([LOW, slower]) == [
        "between 10.0 GB and 20.0 GB the step, stated, gets 5.00% longer"
    ]
    assert faults([LOW, replace(HIGH, added_s=1.919)]) == [
        "between 10.0 GB and 20.0 GB the step, added up, gets 1.00% longer"
    ]
    assert faults([LOW, replace(NONE, budget_bytes=20 * GB)]) == [
        "of 10.0 GB and 20.0 GB the smaller fits, the larger does not"
    ]
    assert faults([replace(LOW, peak_bytes=11 * GB)]) == ["in 10.0 GB the plan needs 11.0 GB"]
    assert faults([replace(LOW, search_s=1.5)]) == ["searches took 1.50 s, more than 1 s"]
