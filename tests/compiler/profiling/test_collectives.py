"""Collectives of a profile: groups as meshes have them; on two processes, each of them."""

import pytest
from support.processes.pool import Pools

from meshfold.profiling.collectives import INNER, KINDS, OUTER, meshes


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "groups"),
    [
        (1, 1, []),
        (2, 2, [((1, 2), INNER)]),
        (2, 1, [((1, 2), INNER)]),
        (4, 4, [((1, 4), INNER), ((2, 2), INNER)]),
        (4, 2, [((1, 4), INNER), ((2, 2), INNER), ((2, 2), OUTER)]),
        (6, 2, [((1, 6), INNER), ((2, 3), INNER), ((3, 2), INNER), ((3, 2), OUTER)]),
    ],
)
def test_groups(num_ranks: int, per_node: int, groups: list[tuple[tuple[int, int], str]]) -> None:
    assert [(mesh.sizes, axis) for mesh, axis in meshes(num_ranks, per_node)] == groups


@pytest.mark.multiprocess
def test_each_collective_on_two_processes(pools: Pools) -> None:
    for shape, kinds in pools.run(2, "support.processes.profile:collectives_of_rank"):
        assert shape == (2, 1, 2, 2)
        assert kinds == list(KINDS)
