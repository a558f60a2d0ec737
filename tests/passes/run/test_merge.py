import numpy as np

from meshfold.passes.run.merge import Exchanges, Filling, merge_exchanges

FILLING = Filling(
    counts=np.array([4]),
    free_bytes=10,
    time_s=40.0,
    group=0,
    filler_bytes=4,
    filler_s=-4.0,
)
# One layer less hungry: two of them make room for one more filler.
EXCHANGES = Exchanges(
    np.array([0.25, 5.0]), np.array([0, 0]), np.array([-1, 2]), np.array([1.25, 3.0])
)


def merge(limit_s: float, state_cap: int = 1000) -> tuple[tuple[int, ...] | None, bool]:
    result = merge_exchanges(EXCHANGES, FILLING, dual_s=30.0, limit_s=limit_s, state_cap=state_cap)
    return result.chosen, result.capped


def test_finds_the_exchanges_that_make_room_for_a_filler() -> None:
    # 40 - 2 * 4 = 32 without; 40 + 2 * 1.25 - 2 * 4 = 34.5 with two exchanges: 2 layers are left.
    assert merge(32.0) == (None, False)
    # One exchange: 40 + 1.25 - 8 = 33.25 is the best below 34.
    assert merge(34.0) == ((0,), False)


def test_stops_at_its_cap() -> None:
    assert merge(41.0, state_cap=0) == (None, True)


def test_takes_no_more_layers_than_there_are() -> None:
    alone = Filling(np.array([2]), -3, 10.0, -1, 0, 0.0)
    one = Exchanges(np.array([0.1]), np.array([0]), np.array([-1]), np.array([1.0]))
    result = merge_exchanges(one, alone, dual_s=0.0, limit_s=100.0, state_cap=100)
    assert result.chosen is None  # three would be needed
    roomier = Filling(np.array([3]), -3, 10.0, -1, 0, 0.0)
    result = merge_exchanges(one, roomier, dual_s=0.0, limit_s=100.0, state_cap=100)
    assert result.chosen == (0, 0, 0)
