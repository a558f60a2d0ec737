"""Which reductions run as one: consecutive ones of one key, up to a size."""

from hypothesis import given
from hypothesis import strategies as st

from meshfold.ir.bucketing import BucketMember, fill_buckets


def reductions(*sizes: tuple[str, int]) -> list[BucketMember]:
    return [BucketMember((k, 0), key, num_bytes) for k, (key, num_bytes) in enumerate(sizes)]


def test_sizes_fill_up_one_after_the_other() -> None:
    sizes = [("a", n) for n in (3, 3, 3, 20, 3, 3)]
    found = fill_buckets(reductions(*sizes), 8)
    assert found == (((0, 0), (1, 0)), ((4, 0), (5, 0)))


def test_other_kinds_in_between_do_not_part() -> None:
    found = fill_buckets(reductions(("a", 1), ("b", 9), ("a", 1), ("b", 9), ("a", 1)), 3)
    assert found == (((0, 0), (2, 0), (4, 0)),)


def test_nothing_is_coalesced_without_a_size() -> None:
    assert fill_buckets(reductions(("a", 1), ("a", 1)), 0) == ()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=30),
    st.integers(0, 40),
)
def test_groups_are_consecutive_small_enough_and_cannot_grow(
    sizes: list[tuple[str, int]], most_bytes: int
) -> None:
    all_of = reductions(*sizes)
    groups = fill_buckets(all_of, most_bytes)
    of = {r.group: r for r in all_of}
    places = [place for group in groups for place in group]
    assert len(places) == len(set(places))
    for key in "abc":
        order = [r.group for r in all_of if r.key == key]
        in_order = [g for g in groups if of[g[0]].key == key]
        merged = {place: g for g in in_order for place in g}
        # What is in no group is one of its own.
        runs = list(dict.fromkeys(merged.get(place, (place,)) for place in order))
        assert [place for run in runs for place in run] == order
        totals = [sum(of[place].num_bytes for place in run) for run in runs]
        assert all(t <= most_bytes for t, run in zip(totals, runs, strict=True) if len(run) > 1)
        for total, run in zip(totals, runs[1:], strict=False):
            assert total + of[run[0]].num_bytes > most_bytes
