"""The pool of worker processes itself: results by rank, failures with their traceback."""

import pytest
from support.processes.pool import Pools, WorkerFailure

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_results_come_by_rank_and_processes_stay(pools: Pools) -> None:
    first = pools.run(2, "support.programs.emit:who_am_i")
    assert [rank for rank, _ in first] == [0, 1]
    assert pools.run(2, "support.programs.emit:who_am_i") == first


def test_a_failure_shows_its_traceback_and_the_pool_goes_on(pools: Pools) -> None:
    with pytest.raises(WorkerFailure, match=r"rank 1(.|\n)*in fail_on(.|\n)*ZeroDivisionError"):
        pools.run(2, "support.programs.emit:fail_on", 1)
    assert len(pools.run(2, "support.programs.emit:who_am_i")) == 2
