"""Collectives of a profile: groups as meshes have them; on two processes, each of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from support.processes.pool import Pools

from meshfold.profiling.collectives import INNER, KINDS, LEAST_S, OUTER, after_work, meshes
from meshfold.profiling.timing import Timer


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


@dataclass(frozen=True)
class Clock(Timer):
    """Of runs that take the seconds that it is told."""

    told: list[float | None] = field(default_factory=list)

    def seconds(self, run: Callable[[], object]) -> float | None:
        run()
        return self.told.pop(0)


@pytest.mark.parametrize(
    ("told", "found"),
    [([0.005, 0.002], 0.003), ([0.002, 0.003], LEAST_S), ([None, 0.002], None)],
)
def test_the_work_before_a_collective_is_taken_off(
    told: list[float | None], found: float | None
) -> None:
    ran: list[int] = []
    clock = Clock(torch.device("cpu"), 0.01, None, told)
    assert after_work(lambda: ran.append(1), clock) == (
        None if found is None else pytest.approx(found)
    )
    assert ran == [1]


@pytest.mark.multiprocess
def test_each_collective_on_two_processes(pools: Pools) -> None:
    for shape, kinds in pools.run(2, "support.processes.profile:collectives_of_rank"):
        assert shape == (2, 1, 2, 2)
        assert kinds == list(KINDS)
