"""What is said where no program in one pass fits."""

import pytest
from support.search.mesh_planners import planner

from meshfold.passes.one_pass.no_fit import NoMeshFits
from meshfold.units import bytes_text

BUDGET = 50_000


@pytest.mark.parametrize(
    ("is_proven", "words"), [(True, "nothing fits"), (False, "found nothing that fits")]
)
def test_that_nothing_fits_is_said_where_a_bound_proves_it(is_proven: bool, words: str) -> None:
    of = planner("gpt2", 2, 2, BUDGET)
    smallest, found = of.smallest, NoMeshFits((of,), is_proven)
    told = found.error(4, explains=True)
    assert str(told).startswith(f"{words} in 50.0 kB per device on 4 devices: the best candidate, ")
    assert f"needs {bytes_text(smallest.memory.peak)}, most of it reserve" in str(told)
    assert (told.required_bytes, told.available_bytes) == (smallest.memory.peak, BUDGET)
    short = found.error(4, explains=False)
    assert str(short) == f"{words} in 50.0 kB per device on 4 devices"
    assert (short.binding_constraint, short.available_bytes) == ("memory", BUDGET)


def test_what_two_searches_do_not_find() -> None:
    two, four = planner("gpt2", 2, 2, BUDGET), planner("gpt2", 4, 1, BUDGET)
    both = NoMeshFits((two,), is_proven=True).and_in(NoMeshFits((four,), is_proven=False))
    assert both.words == "found nothing that fits"
    least = min(two.smallest.memory.peak, four.smallest.memory.peak)
    assert both.error(4, explains=True).required_bytes == least
