"""Outcomes of one rank alone, and numbers of several ranks; outcomes of two are in
tests/compiler/training/saving/test_checkpoint.py."""

import pytest
from support.processes.agreement import ODD
from support.processes.pool import Pools

from meshfold.distributed.agreement import agreed, gathered
from meshfold.errors import MeshfoldError, OptionError


def test_what_is_done_is_returned() -> None:
    assert agreed(lambda: 3) == 3
    assert agreed(lambda: None) is None
    assert gathered(lambda: 3) == [3]


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (OptionError("no such thing"), OptionError, "no such thing"),
        (MeshfoldError("two\nlines"), MeshfoldError, "two lines"),
        (ZeroDivisionError("by 0"), MeshfoldError, "ZeroDivisionError: by 0"),
    ],
)
def test_whatever_is_raised_is_one_line_of_ours(
    error: Exception, kind: type[MeshfoldError], line: str
) -> None:
    def work() -> None:
        raise error

    for share in (agreed, gathered):
        with pytest.raises(MeshfoldError) as raised:
            share(work)  # type: ignore[operator]
        assert type(raised.value) is kind and str(raised.value) == line
        assert raised.value.__cause__ is error


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_extremes_are_those_of_all_ranks(pools: Pools, num_ranks: int) -> None:
    ends = [-(2**63), 2**63 - 1]
    rows = [[5, rank, -rank, ends[rank == 1], ends[rank != 1]] for rank in range(num_ranks)]
    expected = [[f(column) for column in zip(*rows, strict=True)] for f in (min, max)]
    found = pools.run(num_ranks, "support.processes.agreement:extremes_of", rows)
    assert found == [expected] * num_ranks


@pytest.mark.multiprocess
def test_a_rank_that_says_nothing_is_not_waited_for_longer_than_the_timeout(pools: Pools) -> None:
    """Each rank waits for one that waits for another: the rounds have one timeout together."""
    timeout_s = 1.0
    found = pools.run(4, "support.processes.agreement:without_one", timeout_s)
    assert all(told for _, told in found[:ODD]) and not found[ODD][1]
    assert all(0.5 * timeout_s < took_s < 20 * timeout_s for took_s, _ in found[:ODD])
