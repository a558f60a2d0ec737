"""Places of ranks on sharded dims, beyond their end, too."""

from support_ops import mesh_of
from support_ranks import run_on_simulated_ranks

from meshfold.rank_places import Digits, key_heads_of


def places(
    num_heads: int, digits: Digits, num_key_heads: int, key_digits: Digits
) -> list[list[int]]:
    found = run_on_simulated_ranks(
        mesh_of(4), lambda mesh: key_heads_of(mesh, num_heads, digits, num_key_heads, key_digits)
    )
    return [place.tolist() for place in found]


def test_query_heads_find_their_key_heads() -> None:
    assert places(8, (("dp", 1, 0),), 4, (("dp", 1, 0),)) == [[0, 0]] * 4
    assert places(8, (("dp", 1, 0),), 2, ()) == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_padding_takes_a_key_head_that_is_there() -> None:
    """Two or three query heads on four ranks."""
    assert places(2, (("dp", 1, 1),), 1, ()) == [[0]] * 4
    assert places(6, (("dp", 1, 2),), 3, ()) == [[0, 0], [1, 1], [2, 2], [2, 2]]
