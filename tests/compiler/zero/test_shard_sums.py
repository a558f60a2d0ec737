"""Which gradients of shards leave a backward before its end, and where they go."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.zero.host_side import NoHostSide
from meshfold.zero.microbatch_state import SharedStep
from meshfold.zero.shard_sums import are_early, leave, lone_shards, on_device


class Host(NoHostSide):
    """It stores the shards that it is given."""

    def __init__(self, *stored: Tensor) -> None:
        self.stored = {id(shard) for shard in stored}
        self.taken: list[Tensor] = []

    def takes(self, shard: Tensor) -> bool:
        return id(shard) in self.stored

    def take(self, shard: Tensor, gradient: Tensor) -> None:
        self.taken.append(gradient)


def use_of(*shards: Tensor, owes: bool = False, adds: bool = True) -> Any:
    """owes: another axis is to be summed over; adds: reduced with every microbatch."""
    group = SimpleNamespace(gather=(0,), left_axes=lambda m, sums_replicas: (1,) if owes else ())
    return SimpleNamespace(
        key=(0, 0), group=group, shards=shards, sums_replicas=False, adds_up=lambda m: adds
    )


def tensors(*values: float) -> list[Tensor]:
    return [torch.full((2,), value) for value in values]


def test_shards_that_several_uses_read_are_not_alone() -> None:
    a, b, c = tensors(1, 2, 3)
    assert lone_shards([use_of(a, b), use_of(b, c)]) == {id(a), id(c)}


def test_gradients_are_added_up_and_given_back_with_the_last_microbatch() -> None:
    shards, shared = tensors(0, 0), SharedStep()
    use, found = use_of(*shards), []
    for is_last, value in ((False, 1.0), (False, 2.0), (True, 4.0)):
        shared.is_last = is_last
        found.append(leave(use, [*tensors(value), None], NoHostSide(), shared))
    assert found[:2] == [[None, None], [None, None]]
    total, none = found[2] or ()
    assert total is not None and total.tolist() == [7.0, 7.0] and none is None and shared.is_empty
    assert leave(use, None, NoHostSide(), shared) is None
    # What several uses of a parameter make is left to the end.
    shared.is_last = False
    (own,) = tensors(1)
    assert leave(use_of(shards[0], adds=False), [own], NoHostSide(), shared) == [own]


@pytest.mark.parametrize("owes", [False, True])
def test_the_host_takes_what_is_final(owes: bool) -> None:
    (shard,), (gradient,), shared = tensors(0), tensors(1), SharedStep()
    host = Host(shard)
    left = leave(use_of(shard, owes=owes, adds=False), [gradient], host, shared)
    assert left == ([gradient] if owes else [None]) and len(host.taken) == (not owes)
    assert on_device(use_of(shard), [gradient], host) == [None]
    assert on_device(use_of(shard), None, host) is None


def test_one_microbatch_alone_waits_at_its_end() -> None:
    (shard,), shared, host = tensors(0), SharedStep(), NoHostSide()
    assert not are_early(shared, host, [shard], adds=True)
    assert are_early(shared, Host(shard), [shard], adds=True)
    shared.is_last = False
    assert are_early(shared, host, [shard], adds=True)
    assert not are_early(shared, host, [shard], adds=False)
    shared.add((0, 0, 0), shard)
    shared.is_last = True
    assert are_early(shared, host, [shard], adds=True)
