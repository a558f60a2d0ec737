"""Without a host nothing leaves the device."""

import torch

from meshfold.zero.host_side import HostSide, NoHostSide


def test_nothing_is_taken() -> None:
    host: HostSide = NoHostSide()
    shard = torch.ones(2)
    host.arrive(shard)
    host.take(shard, shard)
    host.end_backward()
    assert not host.takes(shard)
