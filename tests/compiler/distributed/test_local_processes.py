"""Functions on local processes: results, reports, and processes that fail."""

from typing import Any

import pytest
from support.processes.emitted import fails_on_one, summed

from meshfold.distributed.local_processes import LocalProcessError, run_local

pytestmark = pytest.mark.multiprocess


def test_results_and_reports_by_rank() -> None:
    reports: list[Any] = []
    results = run_local(2, summed, 3, on_report=lambda rank, value: reports.append((rank, value)))
    assert results == [7.0, 7.0]
    assert sorted(reports) == [(0, 3.0), (1, 4.0)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("user", "rank 1: no batch"),
        ("bug", "rank 1: KeyError: 'lost'"),
        ("dies", "rank 1: the process ended"),
    ],
)
def test_a_failing_process_ends_all(how: str, message: str) -> None:
    with pytest.raises(LocalProcessError) as caught:
        run_local(2, fails_on_one, how)
    assert str(caught.value) == message
    assert how == "dies" or "fails_on_one" in caught.value.detail
