"""Why a strategy lost, in words."""

import pytest

from meshfold.ir.plan import Alternative
from meshfold.passes.planner.assembly import why_lost

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
