"""Why a strategy lost, in words."""

import pytest
from support.graphs.op_graphs import folded_stack

from meshfold.ir.plan import Alternative, RegionRun
from meshfold.passes.planner.assembly import losers, runs_of, why_lost

TAKEN = Alternative("taken", 2e-3, 5_000_000, "")


@pytest.mark.parametrize(
    ("time_s", "held_bytes", "reason"),
    [
        (2e-3, 5_000_000, "as fast and as small: the simpler one was taken"),
        (3e-3, 6_000_000, "1.00 ms slower and holds 1.00 MB more"),
        (3e-3, 4_000_000, "1.00 ms slower; its 1.00 MB less are not needed"),
        (1e-3, 6_000_000, "holds 1.00 MB more, which does not fit in every layer"),
        (1e-3, 4_000_000, "faster and no larger by itself, but not beside what other regions do"),
    ],
)
def test_the_reason_names_what_is_worse(time_s: float, held_bytes: int, reason: str) -> None:
    assert why_lost(Alternative("other", time_s, held_bytes, ""), TAKEN) == reason


def test_losers_go_by_time_then_by_bytes() -> None:
    others = [Alternative(name, s, n, "") for name, s, n in (("b", 3, 1), ("a", 1, 2), ("c", 1, 1))]
    found = losers(TAKEN, others)
    assert [x.name for x in found] == ["c", "a", "b"]
    assert [x.reason for x in found] == [why_lost(x, TAKEN) for x in found]


def test_runs_begin_anew_with_every_stage() -> None:
    split = folded_stack()
    names = [split.regions[i.region].name for i in split.instances]
    count = len(names)
    for first, end in ((0, count), (1, count), (2, 3)):
        runs = runs_of(split, range(first, end))
        assert [k for r in runs for k in range(r.first, r.first + r.count)] == [*range(first, end)]
        assert [r.region for r in runs for _ in range(r.count)] == names[first:end]
        assert all(a.region != b.region for a, b in zip(runs, runs[1:], strict=False))
    assert runs_of(split, range(0, 1)) == (RegionRun(names[0], 0, 1),)
