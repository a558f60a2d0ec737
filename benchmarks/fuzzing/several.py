"""Plan and cluster files in which several fields are wrong, found by hypothesis."""

from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzzing.case import Case
from fuzzing.files import CLUSTER_READER, PLAN_READERS, changed, paths, written
from fuzzing.plans import cluster_document, plan_document

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
ROUND = 200
"""Cases of one run of hypothesis."""


def several_fields(number: int) -> Iterator[Case]:
    """Cases without end; number: the seed."""
    documents = (plan_document(), PLAN_READERS), (cluster_document(), (CLUSTER_READER,))
    while True:
        for document, readers in documents:
            for changes in _draws(document, number):
                new = document
                for path, value in changes:
                    new = changed(new, path, value) if path in set(paths(new)) else new
                arguments = readers[len(str(changes)) % len(readers)]
                name = f"{arguments[0]}: {str(changes)[:200]}"
                yield Case(name, arguments, written(new), may_pass=True)
        number += 1


def _draws(document: Any, number: int) -> list[list[tuple[tuple[str | int, ...], Any]]]:
    """Changes of some fields, by path."""
    found: list[list[tuple[tuple[str | int, ...], Any]]] = []
    places = st.sampled_from(list(paths(document)))

    @seed(number)
    @settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.tuples(places, JSON), min_size=1, max_size=3))
    def draw(changes: list[tuple[tuple[str | int, ...], Any]]) -> None:
        found.append(changes)

    draw()
    return found
