"""Copies between device and host, and what is counted. Both are one here: nothing is in flight."""

import torch
from torch import Tensor

from meshfold.offload.host_link import HostLink


def test_copies_are_copies_and_are_counted() -> None:
    link = HostLink(torch.device("cpu"))
    source = torch.arange(4.0)
    arrived = link.on_host(source)
    source.zero_()
    link.add_on_host(arrived, torch.ones(4))
    copy = torch.empty(4, dtype=torch.bfloat16)
    link.to_device(copy, arrived)
    link.wait(link.arrival())
    link.settle()
    assert arrived.tolist() == copy.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (link.num_bytes_to_host, link.num_bytes_to_device) == (2 * 16, 8)


class Arrival:
    """Of copies that are in flight until somebody waits."""

    is_waited_for = False

    def synchronize(self) -> None:
        self.is_waited_for = True


class LinkInFlight(HostLink):
    """A link as that of a CUDA device."""

    def on_host(self, source: Tensor) -> Tensor:
        return source.clone()

    def arrival(self) -> Arrival:  # type: ignore[override]
        return Arrival()


def test_one_tensor_waits_for_each_sum_however_many_microbatches() -> None:
    link = LinkInFlight(torch.device("cpu"))
    first, second = torch.zeros(2), torch.zeros(2)
    for k in range(1, 5):
        link.add_on_host(first.detach(), torch.full((2,), float(k)))  # by whatever name
        link.add_on_host(second.detach(), torch.ones(2))
        assert len(link._sums) == 2
    assert first.tolist() == [6.0, 6.0] and second.tolist() == [3.0, 3.0], "the last is in flight"
    arrivals = [arrival for *_, arrival in link._sums.values()]
    link.settle()
    assert first.tolist() == [10.0, 10.0] and second.tolist() == [4.0, 4.0]
    assert not link._sums and all(arrival.is_waited_for for arrival in arrivals)
