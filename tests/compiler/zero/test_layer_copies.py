"""Which copies are on the device while which instance runs."""

from collections.abc import Iterable

import torch
from torch import Tensor

from meshfold.zero.host_side import NoHostSide
from meshfold.zero.layer_copies import InstanceCopies


class Host(NoHostSide):
    """held: what was asked for, by value."""

    comes_by_layer = True

    def __init__(self) -> None:
        self.held: list[tuple[list[float], list[float]]] = []

    def has_by_layer(self, shards: Iterable[Tensor]) -> bool:
        return any(shards)

    def hold(self, now: Iterable[Tensor], ahead: Iterable[Tensor] = ()) -> None:
        self.held.append(([float(x) for x in now], [float(x) for x in ahead]))


def test_the_next_instance_that_has_any_is_there_too() -> None:
    host = Host()
    copies = InstanceCopies(host, [[torch.tensor(1.0)], [], [torch.tensor(3.0)]])
    for k in range(3):
        copies.enter(k)
    copies.leave_forward(is_recording=True)
    for k in reversed(range(3)):
        copies.enter(k, is_backward=True)
    copies.leave_forward(is_recording=False)
    ahead = [([1.0], [3.0]), ([], [3.0]), ([3.0], [])]
    back = [([3.0], [1.0]), ([], [1.0]), ([1.0], [])]
    assert host.held == [*ahead, ([3.0], []), *back, ([], [])]


def test_without_a_host_nothing_is_asked() -> None:
    copies = InstanceCopies(NoHostSide(), [[torch.ones(1)]])
    copies.enter(0)
    copies.leave_forward(is_recording=True)
    assert copies.is_empty
