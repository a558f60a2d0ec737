"""The one line of an error when other ranks do not come."""

import pytest

from meshfold.distributed.waiting import Place, cause, lost_ranks
from meshfold.errors import MeshfoldError, RankLostError

SAID = {
    "[unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation\nmore": "no answer in 3 s",
    "wait timeout after 3000ms": "no answer in 3 s",
    "[pair.cc:534] Connection closed by peer [127.0.0.1]:1234": "the connection was closed",
    "read: Connection reset by peer": "the connection was closed",
    "something  else\nof two lines": "something else",
}


@pytest.mark.parametrize("text", SAID)
def test_what_torch_says_in_few_words(text: str) -> None:
    assert cause(RuntimeError(text), 3.0) == SAID[text]


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (Place(), ""),
        (Place(step=3), " in step 3"),
        (Place(step=3, region="B"), " in step 3, region B"),
    ],
)
def test_the_line_names_rank_step_region_and_collective(place: Place, where: str) -> None:
    with (
        pytest.raises(RankLostError) as caught,
        lost_ranks(1, (0, 1, 5), "all_gather over dp", 20.0, place),
    ):
        raise RuntimeError("Timed out")
    assert isinstance(caught.value, MeshfoldError)
    assert str(caught.value) == (
        f"rank 1 waited for ranks 0, 5{where}, all_gather over dp: no answer in 20 s; look for the "
        "first error of these ranks, or give a longer timeout_s"
    )


def test_a_new_step_begins_outside_of_regions() -> None:
    place = Place(step=1)
    place.enter("B")
    place.begin(2)
    assert str(place) == " in step 2"


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), lost_ranks(0, (0, 1), "all_reduce", 1.0):
        raise KeyError("other")
