"""SPMD types: text form, legality, local shapes, against an index-by-index model."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.ir.spmd import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Experts,
    Layout,
    PaddedShard,
    Shard,
    SpmdType,
    is_legal,
    layout_text,
    local_blocks,
    local_shape,
    padded_shape,
    parse_layout,
)

types = st.one_of(
    st.sampled_from([INVARIANT, REPLICATE, PARTIAL]),
    st.builds(Shard, st.integers(0, 1), st.sampled_from([1, 2, 3, 4, 6])),
)


def test_rows_at_their_experts_count_as_a_shard() -> None:
    layout = parse_layout("S0,E0/2")
    assert layout == (Shard(0), Experts(2)) and layout_text(layout) == "S0,E0/2"
    assert all(t.is_shard for t in layout) and Experts(2) != Shard(0, 2)
    assert is_legal((12, 5), layout, (2, 3)) and not is_legal((8, 5), layout, (2, 3))
    assert local_shape((12, 5), layout, (2, 3)) == (2, 5)


padded = st.builds(PaddedShard, st.integers(0, 1), st.integers(1, 3), st.sampled_from([1, 2, 64]))


@given(st.lists(st.one_of(types, padded), max_size=3).map(tuple))
def test_text_round_trips(layout: Layout) -> None:
    assert parse_layout(layout_text(layout)) == layout


@pytest.mark.parametrize("text", ["", "Q", "S", "S-1", "S0/", "S0/x", "I0", "P/2", "S0+x", "R+"])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no SPMD type"):
        SpmdType.parse(text)


def test_impossible_types_are_refused() -> None:
    with pytest.raises(ValueError, match="dim is for Shard only"):
        SpmdType("I", 0)
    with pytest.raises(ValueError, match="dim is for Shard only"):
        SpmdType("S")
    with pytest.raises(ValueError, match="blocks must be 1 or more"):
        Shard(0, 0)
    with pytest.raises(ValueError, match="blocks must be 1 or more"):
        SpmdType("R", blocks=2)
    for kind, dim, unit in (("I", -1, 1), ("E", 0, 1), ("S", 0, -1)):
        with pytest.raises(ValueError, match="unit must be 0 or more, 0 but on Shard"):
            SpmdType(kind, dim, 1, unit)


def test_a_padded_dim_need_not_divide_and_is_sharded_by_one_axis() -> None:
    layout = (PaddedShard(0), Shard(1))
    assert is_legal((10, 6), layout, (4, 2))
    assert local_shape((10, 6), layout, (4, 2)) == (3, 3)
    assert padded_shape((10, 6), layout, (4, 2)) == (12, 6)
    assert padded_shape((10, 6), (Shard(0), INVARIANT), (5, 2)) == (10, 6)
    assert not is_legal((10, 6), (PaddedShard(0), Shard(0)), (4, 2))
    assert not is_legal((10, 5), layout, (4, 2)), "the other dim still has to divide"
    assert not is_legal((10, 6), (PaddedShard(2), INVARIANT), (4, 2)), "there is no dim 2"


def test_units_of_a_padded_dim_stay_whole() -> None:
    """q, k and v of 3 heads of 4 rows: two heads of each on a rank."""
    layout = (PaddedShard(0, 3, 4), INVARIANT)
    assert layout_text(layout) == "S0/3+4,I"
    assert is_legal((36, 6), layout, (2, 2)) and not is_legal((30, 6), layout, (2, 2))
    assert local_shape((36, 6), layout, (2, 2)) == (24, 6)
    assert padded_shape((36, 6), layout, (2, 2)) == (48, 6)


def owned(size: int, t: SpmdType, n: int, r: int) -> set[int]:
    """Indices of one dim that rank r holds, from the definition."""
    m = size // (t.blocks * n)
    return {(b * n + r) * m + o for b in range(t.blocks) for o in range(m)}


@given(
    st.sampled_from([8, 12, 24, 36]),
    st.tuples(types, types),
    st.tuples(st.sampled_from([2, 3, 4]), st.sampled_from([2, 3])),
)
def test_legal_means_equal_parts_that_cover_every_index_once(
    size: int, layout: Layout, sizes: tuple[int, ...]
) -> None:
    if not is_legal((size, size), layout, sizes):
        return
    shape = local_shape((size, size), layout, sizes)
    for dim in (0, 1):
        axes = [k for k, t in enumerate(layout) if t.is_shard and t.dim == dim]
        seen: list[int] = []
        for coords in itertools.product(*(range(sizes[k]) for k in axes)):
            mine = set(range(size))
            for k, r in zip(axes, coords, strict=True):
                mine &= owned(size, layout[k], sizes[k], r)
            assert len(mine) == shape[dim]
            seen += mine
        assert sorted(seen) == list(range(size))


@given(
    st.sampled_from([16, 24, 36, 48]),
    st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6])),
    st.tuples(st.sampled_from([2, 3, 4]), st.sampled_from([2, 3])),
)
def test_local_blocks_describe_the_shard_within_the_other_axis_part(
    size: int, blocks: tuple[int, int], sizes: tuple[int, int]
) -> None:
    layout = (Shard(0, blocks[0]), Shard(0, blocks[1]))
    if not is_legal((size,), layout, sizes):
        return
    first = sorted(owned(size, layout[0], sizes[0], 0))
    both = owned(size, layout[0], sizes[0], 0) & owned(size, layout[1], sizes[1], 1)
    positions = {first.index(i) for i in both}
    local = Shard(0, local_blocks(layout, sizes, 1))
    assert positions == owned(len(first), local, sizes[1], 1)


def test_overlapping_digits_are_illegal_and_nested_ones_legal() -> None:
    assert not is_legal((16,), (Shard(0), Shard(0)), (2, 4))
    assert is_legal((16,), (Shard(0, 4), Shard(0)), (2, 4))
    assert is_legal((16,), (Shard(0), Shard(0, 2)), (2, 4))
    assert not is_legal((16,), (Shard(1),), (2,)), "there is no dim 1"
    assert not is_legal((15,), (Shard(0),), (2,))


def test_copies_divide_the_ranks() -> None:
    assert is_legal((8,), parse_layout("S0*4"), (8,)) and not is_legal((8,), (Shard(0),), (16,))
    assert is_legal((8,), parse_layout("S0*2"), (16,))
    assert not is_legal((8,), parse_layout("S0*3"), (8,))
    assert local_shape((8, 3), parse_layout("S0*4"), (8,)) == (4, 3)
    assert local_shape((7, 3), parse_layout("S0+*4"), (8,)) == (4, 3)
    for text in ("S0*4", "S1/3*2", "S0/3+64*2"):
        assert str(SpmdType.parse(text)) == text
    with pytest.raises(ValueError, match="copies must be 1 or more"):
        SpmdType("I", copies=2)
