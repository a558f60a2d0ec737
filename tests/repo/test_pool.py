"""The pool of worker processes itself: results by rank, failures with their traceback."""

from pathlib import Path

import pytest
from support.processes.pool import Pools, WorkerFailure

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_results_come_by_rank_and_processes_stay(pools: Pools) -> None:
    first = pools.run(2, "support.programs.emit:who_am_i")
    assert [rank for rank, _ in first] == [0, 1]
    assert pools.run(2, "support.programs.emit:who_am_i") == first


def test_an_aborted_process_is_tried_once_more(pools: Pools, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="aborted once, runs again: support.programs.emit:abort"):
        assert pools.run(2, "support.programs.emit:abort_unless", tmp_path / "was here") == [1, 1]
    with (
        pytest.warns(UserWarning, match="aborted once"),
        pytest.raises(WorkerFailure, match="the process ended"),
    ):
        pools.run(2, "support.programs.emit:abort_unless", tmp_path / "no such" / "folder")


def test_a_failure_shows_its_traceback_and_the_pool_goes_on(pools: Pools) -> None:
    with pytest.raises(WorkerFailure, match=r"rank 1(.|\n)*in fail_on(.|\n)*ZeroDivisionError"):
        pools.run(2, "support.programs.emit:fail_on", 1)
    assert len(pools.run(2, "support.programs.emit:who_am_i")) == 2
